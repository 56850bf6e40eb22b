"""Batches on their way from a worker into a tensor."""
