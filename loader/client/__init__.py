"""The training process's connection to its node's daemon."""
