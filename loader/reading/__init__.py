"""Reads: a dataset's objects through a lease, single addresses, and listings."""
