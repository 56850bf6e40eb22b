"""Making batches: who makes them, where, with which seeds, and how they travel."""
