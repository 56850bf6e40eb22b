"""Bytes and where they lie: shared memory, local disk, and the storage they come from."""
