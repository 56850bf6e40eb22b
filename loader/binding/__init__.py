"""Which objects the samples of a dataset consist of: known, declared or traced."""
