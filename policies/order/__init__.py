"""torch's orders as arrays: the random numbers, how ranks share them, where batches end. Pure.

The loader replays samplers with these functions, and daemons compute from a few numbers what the
ranks of a job read (`policies.cluster.job_order`). Neither needs torch for that.
"""
