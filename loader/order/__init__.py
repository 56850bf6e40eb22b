"""The order in which an epoch reads its samples, by replaying torch's random numbers."""
