"""The objects that the samples of a dataset consist of: known, declared or traced.

`bind` walks the dataset's `tree` to leaves that are known (`adapters`). Below `creel.wrap`, a
dataset that declares nothing is traced: `access_recorder` records what its samples read in the
first epoch, and `wrapped_reads` reads that through the daemon in later epochs. The reads themselves
are in `creel.loader.reading`.
"""
