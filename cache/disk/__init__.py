"""Objects on local disk: for those without room in memory, and for the next daemon."""
