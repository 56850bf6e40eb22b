"""Several nodes as one cache: how a job deals its samples, and which node holds what. Pure."""
