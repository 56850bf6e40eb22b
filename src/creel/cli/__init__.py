"""The `creel` command."""
