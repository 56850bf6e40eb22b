"""The order in which an epoch reads its samples, by replaying torch's random numbers.

`epoch_order.predict` predicts an epoch by replaying torch's samplers (`samplers`, `replay`).
`epoch_plan` holds the predicted epoch, and compares it with the samples that the sampler really
yields.
"""
