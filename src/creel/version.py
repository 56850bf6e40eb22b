"""The version of creel; also available without an installation (a checkout on PYTHONPATH)."""

VERSION = "0.1.0"
