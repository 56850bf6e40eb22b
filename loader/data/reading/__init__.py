"""Where a dataset's reads get their bytes: from the arena, or directly from the source.

Every read goes through `observer`, whose `Lease` says which objects of the step are in the arena.
The readers are `creel.open` and `creel.read` (`opened`), a plain `open` below `creel.wrap`
(`creel.loader.data.tracing`), and creel's own datasets.
"""
