"""The objects that the samples of a dataset consist of: known, declared or traced.

`bind` walks the dataset's `tree` to leaves that are known (`adapters`). Below `creel.wrap`, a
dataset that declares nothing is traced (`data.tracing`; `wrapped` is all that this room knows
of it). `gather` reads batches of a session; `daemon_link` does for loaders that are not
creel's. The reads themselves are in `creel.loader.data.reading`.
"""
