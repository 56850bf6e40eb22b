"""A job's nodes and ranks, and the join of the nodes' daemons to one cluster."""
