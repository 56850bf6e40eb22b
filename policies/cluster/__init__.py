"""Several nodes as one cache. Pure. One of five schemes serves a dataset (`scheme.scheme_of`):

alone   No peers, or one job that reads objects again and again: the node caches for itself.
plan    One job whose epochs all nodes know (`job_order`), each object read at most once. Every node
        computes which node holds what when an epoch ends (`boundary`, `placement`; `eviction`
        follows it), so nobody has to be told. Saves most of the traffic; ranks may exchange samples
        first (`order/remap`).
homes   One job whose order the nodes do not all know, several jobs on memories that hold all, or
        jobs on different nodes without known orders. Each object has a home by a hash of its
        number, which reads it once for all nodes and keeps it (`homes`).
soonest Several jobs with known orders, and memories that do not hold all: homes keep what any rank
        of any job reads soonest (`jobs`). Also one that rehearses; then the home of new data is
        the node that reads it first (`first_readers`), in this scheme and the one before.
ask     Other streams with repeats: homes are asked, but keep nothing for others.

`shared_plan` is what nodes tell each other of a plan, and `simulate` replays a job under one.
"""
