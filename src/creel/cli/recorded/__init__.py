"""Recorded runs: what `creel trace` keeps, and the pictures that `creel plot` draws of it."""
