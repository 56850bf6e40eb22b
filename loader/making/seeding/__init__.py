"""Random augmentation that is the same whoever reads a sample (`seeding="sample"`)."""
