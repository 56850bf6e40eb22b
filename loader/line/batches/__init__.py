"""The iterators that `iter(loader)` returns: one epoch of batches."""
