"""creel's loader under frameworks that make a loader of their own out of the one they are given."""
