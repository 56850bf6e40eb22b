"""Threads that read objects into the arena, and the disk tier."""
