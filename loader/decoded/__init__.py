"""Decoded samples that a node keeps in shared memory, so that its ranks decode each one once a job.

`keeping` is what datasets use, `kept` a wrapper of any dataset. Both put what was decoded into a
`store`, as `codec` writes it. `shared_store` gives the ranks of a node one store, if their datasets
decode alike (`alike`). `draws` finds decoders that draw random numbers.
"""
