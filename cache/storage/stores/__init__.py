"""One way to read for each kind of storage, and by whose rights."""
