"""Memory of a node: what its tables may take, room for others, and what the next daemon gets."""
