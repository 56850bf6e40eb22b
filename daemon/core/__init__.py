"""The state and decisions of a node's daemon. Pure: events in, actions out.

`core` handles the events (`events`). `prefetcher` chooses the next fetches and `admission` makes
room for them; the dataset's policy (`creel.policies.eviction`) chooses the victims. `residency`
holds the tables of resident objects, `inflight` the fetches in flight, `landing` enters their
results, `versions` and `checks` detect changed files. `readers` are the jobs: the plan of each
rank, how far it is, and the choice of the policy.
"""
