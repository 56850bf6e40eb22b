"""Stores of decoded samples: in memory for one job and its ranks, in a file for later jobs."""
