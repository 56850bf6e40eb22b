"""Storage of bytes: shared memory, local disk, and the storage that datasets come from."""
