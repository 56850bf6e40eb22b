"""Worker processes: starting them, giving them tasks, and receiving their batches."""
