"""Decisions. Pure: arrays in, arrays out; the daemon, the simulator and the tests call the same."""
