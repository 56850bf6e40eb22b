"""`creel stats` and `creel.stats()`: the daemon's answer, from `daemon/service/stats.py`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from creel.cli.watching import view, what_if, why
from creel.cli.watching.view import Values
from creel.cli.watching.what_if import Machine
from creel.counters import OF_RANKS
from creel.errors import ConfigError, NoDaemonError
from creel.system import limits

if TYPE_CHECKING:
    from creel.loader.client.client import Client

_NOTHING_COUNTED = (
    "no batch has been counted yet: creel.DataLoader counts its batches, torch's own loader those"
    " of a wrapped dataset that creel serves (what creel.wrap cannot serve, creel.kept does)"
)
ELSEWHERE = "the daemon needs Linux; here creel.DataLoader is torch's, and trains without one"


class Stats(dict[str, Any]):
    """The answer of `creel stats --json`; shown as tables at a prompt and in a notebook."""

    def __repr__(self) -> str:
        lines = [f"{name:<20} {value}" for name, value in self._pairs()]
        return "\n".join([*lines, *view.columns(*self._rows())])

    def _repr_html_(self) -> str:
        from creel.loader.notebook import html, rows_html

        header, rows = self._rows()
        return html("creel", self._pairs()) + rows_html(header, rows)

    def _pairs(self) -> list[tuple[str, str]]:
        return [*view.summary_pairs(self), *view.overdue_pairs(self)]

    def _rows(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Return header and rows of the open streams of batches; without any, of ranks so far."""
        if self["sessions"]:
            return view.SESSION_HEADER, [view.session_row(s) for s in self["sessions"]]
        return view.RANK_HEADER, [view.rank_row(r) for r in self["ranks"]]


def stats(name: str | None = None) -> Stats:
    """Return the counters of this user's daemon: a dict, shown as tables in a notebook.

    Args:
        name: of the daemon; None: the one that loaders of this process use.

    Raises:
        NoDaemonError: none runs.
    """
    from creel.config import Config

    with connection(name or Config.load()[0].daemon.name) as client:
        return Stats(client.ask("stats"))


@contextmanager
def connection(name: str) -> Iterator[Client]:
    """Yield a connection to the daemon, or raise NoDaemonError with what to do about it."""
    from creel.loader.client.client import Client

    if sys.platform != "linux":
        raise NoDaemonError(ELSEWHERE)
    try:
        client = Client.connect(name, "cli")
    except NoDaemonError as e:
        raise NoDaemonError(_no_daemon(name)) from e
    try:
        yield client
    finally:
        client.close()


def _no_daemon(name: str) -> str:
    """Return why no daemon answers, and what to do about it."""
    from creel.addresses import elsewhere, held_by_another

    uid = held_by_another(name)
    if uid is not None:
        return f"user {uid} holds the address of your daemon {name!r}: choose another daemon.name"
    if pids := elsewhere(name):
        return (
            f"no daemon named {name!r} sees the files that you see here, but one runs elsewhere"
            f" (process {', '.join(map(str, pids))}, in a container or a job with its own mounts):"
            " ask from inside of it, as by docker exec, srun --overlap or nsenter -m"
        )
    return (
        f"no daemon named {name!r} runs for you: a DataLoader starts one where it has files to"
        " cache, and it ends some seconds after training; `creel run` starts one that stays"
    )


def reasons(client: Client, *, as_json: bool) -> None:
    """Print what each rank waited for, and what would help (`--why`)."""
    answer = client.ask("stats")
    machine = Machine(limits.cores(), *limits.memory(active=True))
    outlooks = what_if.outlooks(
        answer, {s["session"]: rows for s, rows in recorded(client, answer)}, machine
    )
    rows = why.rows(answer, outlooks)
    if as_json:
        view.print_json({"why": rows})
    for row in () if as_json else rows:
        click.echo(f"{view.job_of(row)} rank {row['rank']}: {row['why']}")
    if not rows and not as_json:
        click.echo(_NOTHING_COUNTED)


def recorded(
    client: Client, answer: Values, since_ns: int = 0
) -> Iterator[tuple[Values, list[list[int]]]]:
    """Yield each open stream of batches with those that were taken since, see `BatchRow`."""
    for session in answer["sessions"]:
        try:
            batches = client.ask("batches", session=session["session"], since_ns=since_ns)
        except ConfigError:  # it has just ended
            continue
        yield session, batches["rows"]


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
    view.pairs([*view.summary_pairs(answer), *view.overdue_pairs(answer)])
    if answer["sessions"]:
        rows = [view.session_row(s) for s in answer["sessions"]]
        view.table(view.SESSION_HEADER, rows, drop=view.DROP)
    elif answer["ranks"]:
        click.echo("no open sessions; totals so far:")
        rows = [view.rank_row(r) for r in answer["ranks"]]
        view.table(view.RANK_HEADER, rows, drop=view.DROP)
    if shown := answer["sessions"] or answer["ranks"]:
        for counter in filter(lambda c: c.members, OF_RANKS):
            click.echo(f"{counter.name} by {counter.label}")
            view.table(*view.by_member(counter, shown))
