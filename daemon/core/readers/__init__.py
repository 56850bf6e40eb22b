"""The readers of a dataset as the core sees them: jobs, their ranks, and how far each is. Pure."""
