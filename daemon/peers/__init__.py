"""Transfers between the daemons of different nodes: protocol, server, and reader."""
