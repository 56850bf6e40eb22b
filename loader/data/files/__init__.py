"""File objects, and a file system for fsspec, whose bytes come from the cache if they are there."""
