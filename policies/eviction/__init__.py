"""What stays in memory and on disk, and what leaves when room is needed. Pure."""
