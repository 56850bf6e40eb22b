"""Threads that read what the daemon caches, and the disk tier that holds a part of it."""
