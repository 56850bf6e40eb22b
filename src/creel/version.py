"""Which creel this is; known without an installation, too (a checkout on PYTHONPATH)."""

VERSION = "0.1.0"
