"""The disk tier as the core sees it. Pure."""
