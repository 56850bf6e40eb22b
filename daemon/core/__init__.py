"""The state and decisions of a node's daemon. Pure: events in, actions out.

`core` handles the events (`events`). `prefetcher` chooses the next fetches and `admission` makes
room for them; the dataset's policy (`creel.policies.eviction`) chooses the victims. `residency`
holds the tables of resident objects, `inflight` the fetches in flight, `landing` enters their
results, `sessions` holds the plans of ranks, `versions` and `checks` detect changed files.
"""
