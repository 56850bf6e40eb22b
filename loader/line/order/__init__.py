"""The order in which an epoch reads its samples, by replaying torch's random numbers.

`samplers` begins an epoch and makes its `EpochOrder` (`epoch_order`): `replayed` for torch's own
samplers, `custom` for all others. `epoch_plan` holds a predicted epoch, and compares it with the
samples that the sampler really yields. What is pure arithmetic on arrays is in `policies/order/`.
"""
