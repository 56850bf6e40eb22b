"""Decoded samples that a node keeps in shared memory, so that its ranks decode each one once a job.

`keeping` is what datasets use, `kept` a wrapper of any dataset. Both put what was decoded into a
`store`, as `codec` writes it. `shared_store` gives processes that make the same samples one store.
`draws` finds decoders that draw random numbers, `attributes` datasets that were changed.
"""
