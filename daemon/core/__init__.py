"""The state and decisions of a node's daemon. Pure: events in, actions out."""
