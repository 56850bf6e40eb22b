"""Several nodes as one: how a job deals its samples, and which node holds what. Pure."""
