"""A daemon's reports: `stats`, the numbers of `creel stats`; the same for Prometheus; logs."""
