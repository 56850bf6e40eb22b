"""The `creel` command: `main` has its subcommands, `view` prints what daemons answer.

The numbers of `creel stats` are put together in the daemon, by `daemon/reporting/stats.py`, from
the counters that `creel.counters` lists.
"""
