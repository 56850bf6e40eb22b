"""Observers of the line: what counts, remembers, advises and tells waits, and changes no batch."""
