"""Where batches are made: this thread, threads, or worker processes; `groups` has other ranks."""
