"""A daemon's reports: counters for Prometheus and of one run, and logs."""
