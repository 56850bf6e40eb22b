"""Decoded samples that a node keeps, so that its ranks (and later jobs) decode each one once.

`keeping` is what datasets use, `kept` a wrapper of any dataset. Both put what was decoded into one
of the `stores`, as `codec` writes it. `draws` finds decoders that draw random numbers, `identity`
says when samples with a name are those of an earlier job.
"""
