"""What people look at: counters, tables, a live screen, and why training waited."""
