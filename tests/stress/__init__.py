"""Tools that search for differences and leftovers; `make stress` runs random programs and chaos.

Start them as `python -m stress.NAME` in the folder `tests`.
"""
