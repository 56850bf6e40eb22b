"""Plans: tell the daemon, ahead of use, which objects each step of an epoch reads."""
