"""Slow storage with exact counters."""
