"""What the core knows of the other nodes of a cluster, and what it does for them. Pure."""
