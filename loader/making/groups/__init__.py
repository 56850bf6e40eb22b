"""Ranks that share batches, or exchange samples."""
