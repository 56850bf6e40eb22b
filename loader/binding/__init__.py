"""Which objects the samples of a dataset consist of: known, declared or traced.

`bind` walks the dataset's `tree` to leaves that are known (`adapters`). What declares nothing is
traced below `creel.wrap`: `access_recorder` notes what its samples read in the first epoch, and
`wrapped_reads` has later ones read it through the daemon. The reads themselves are in
`creel.loader.reading`.
"""
