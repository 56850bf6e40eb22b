"""`creel stats`: print the daemon's answer, which `daemon/reporting/stats.py` puts together."""

from __future__ import annotations

import click

from creel.cli import view, why
from creel.cli.view import Values
from creel.counters import OF_RANKS


def reasons(answer: Values, *, as_json: bool) -> None:
    """Print what each rank waited for, and what would help (`--why`)."""
    found = why.rows(answer)
    if as_json:
        view.print_json({"why": found})
    for one in () if as_json else found:
        click.echo(f"{view.job_of(one)} rank {one['rank']}: {one['why']}")
    if not found and not as_json:
        click.echo("no training has read through this daemon yet")


def bad_samples(answer: Values, *, as_json: bool) -> None:
    """Print the samples that could not be read (`--bad`)."""
    if as_json:
        view.print_json(answer)
    elif not answer["bad"]:
        click.echo("no sample was found bad")
    else:
        rows = [
            (view.job_of(b), str(b["rank"]), str(b["index"]), b["path"], b["reason"])
            for b in answer["bad"]
        ]
        view.table(("job", "rank", "sample", "path", "reason"), rows, left=5)


def counters(answer: Values, *, as_json: bool, line: bool) -> None:
    """Print the counters of the node and of its sessions or ranks; `line`: JSON on one line."""
    if as_json:
        view.print_json(answer, line=line)
        return
    view.pairs(view.summary_pairs(answer))
    if answer["sessions"]:
        rows = [view.session_row(s) for s in answer["sessions"]]
        view.table(view.SESSION_HEADER, rows, drop=view.DROP)
    elif answer["ranks"]:
        click.echo("no open sessions; totals so far:")
        rows = [view.rank_row(r) for r in answer["ranks"]]
        view.table(view.RANK_HEADER, rows, drop=view.DROP)
    if shown := answer["sessions"] or answer["ranks"]:
        for one in filter(lambda c: c.members, OF_RANKS):
            click.echo(f"{one.name} by {one.label}")
            view.table(*view.by_member(one, shown))
