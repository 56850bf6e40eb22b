"""Which bytes samples are made of: datasets, their objects, reads, decoded samples."""
