"""What training waits for, told while it waits."""
