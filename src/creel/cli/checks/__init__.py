"""What `creel doctor` looks at, beside the machine itself: running jobs, a dataset, other nodes."""
