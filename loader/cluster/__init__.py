"""Joining: which nodes a job runs on, as which rank, and making one cluster of their daemons."""
