"""A daemon's reports: counters for `creel stats` (`stats`) and for Prometheus, and logs."""
