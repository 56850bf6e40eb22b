"""Worker processes: start them, give them tasks, and receive their batches."""
