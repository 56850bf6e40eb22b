"""Decisions. Pure: arrays in, arrays out; daemon, simulator and tests call the same functions.

`eviction` decides what leaves memory, `prefetch` what is fetched next and how far ahead, `cluster`
what several nodes hold for each other. `order` computes what training will read, as torch does.
"""
