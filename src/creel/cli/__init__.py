"""The `creel` command: `main` has its subcommands, `view` prints the answers of daemons.

The daemon puts the numbers of `creel stats` together (`daemon/service/stats.py`), from the
counters that `creel.counters` lists.
"""
