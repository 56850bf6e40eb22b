"""Lists of files that a dataset holds: found, supposed to be read, and proved or withdrawn."""
