"""Shared memory: the arena, its allocators, shared words, location tables and slots."""
