"""The order in which an epoch reads its samples, by replaying torch's random numbers.

`orders.predict` predicts an epoch, from torch's samplers as `samplers` and `replay` replay them;
`prediction` holds what was predicted, and compares it with what the sampler really yields.
"""
