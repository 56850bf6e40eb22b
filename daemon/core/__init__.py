"""The state and decisions of a node's daemon. Pure: events in, actions out.

`core` handles the events (`events`). `prefetcher` says what is fetched next, and `admission` makes
room for it; what leaves memory then is up to the dataset's policy (`creel.policies.eviction`).
`residency` is what memory holds of a dataset, `inflight` what is being fetched, `landing` its
arrival, `sessions` the plans of the ranks that read it, `versions` and `checks` its files' changes.
"""
