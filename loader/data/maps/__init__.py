"""Files that samples map into memory: which of their bytes each sample reads."""
