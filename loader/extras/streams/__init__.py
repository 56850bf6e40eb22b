"""The reader's side of a stream (`creel.streams`): a dataset, and a sampler of what has arrived."""
