"""The part of the core that deals with the other nodes of a cluster. Pure."""
