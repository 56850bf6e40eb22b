"""Decisions. Pure: arrays in, arrays out; the daemon, the simulator and the tests call the same.

What leaves memory: `eviction`. What is fetched next, and how far ahead: `prefetch`. What several
nodes hold for each other: `cluster`.
"""
