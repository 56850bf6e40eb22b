"""A person's own script or dataset, run or read by a command; these modules import torch."""
