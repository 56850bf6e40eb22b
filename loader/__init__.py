"""What lives in a training process: `creel.DataLoader`, datasets and the client of the daemon."""
