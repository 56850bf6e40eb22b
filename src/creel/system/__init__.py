"""What the operating system says of processes and limits."""
