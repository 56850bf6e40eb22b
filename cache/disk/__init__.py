"""Objects on local disk: what memory has no room for, and what outlives the daemon."""
