"""A daemon's reports: statistics, a Prometheus page, systemd notifications, logs."""
