"""Shared memory: the arena, the allocation of its bytes, and the words and slots beside it."""
