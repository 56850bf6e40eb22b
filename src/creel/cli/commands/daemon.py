"""Subcommands that run, ask and fill a daemon."""

from __future__ import annotations

import math
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from creel.cli.commands.options import (
    client_of,
    config_of,
    json_option,
    print_answer,
)
from creel.errors import ConfigError, NoDaemonError

if TYPE_CHECKING:
    from creel.cache.disk.named import Named


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--memory", metavar="SIZE", help='Memory budget: "64GiB", "50%" or "auto".')
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(context: click.Context, memory: str | None, command: tuple[str, ...]) -> int:
    """Run COMMAND with a daemon of its own.

    The daemon stops afterwards, and the exit code is COMMAND's. Without COMMAND: serve in the
    foreground until SIGTERM or Ctrl-C, as creeld does.
    """
    from creel.cli import run
    from creel.cli.watching import stats

    if sys.platform != "linux":
        raise ConfigError(stats.ELSEWHERE)
    if not command:
        return run.serve(config_of(context, **{"memory.budget": memory}))
    run.check_command(command[0])
    if context.obj["flags"]["daemon.name"] is None:
        context.obj["flags"]["daemon.name"] = f"run-{os.getpid()}"
    return run.around(config_of(context, **{"memory.budget": memory}), command)


@click.command()
@click.option(
    "--now", is_flag=True, help="Stop at once, without waiting for clients to disconnect."
)
@json_option
@click.pass_context
def stop(context: click.Context, *, now: bool, as_json: bool) -> None:
    """Stop the daemon."""
    with client_of(context) as client:
        client.ask("stop", now=now)
    when = "now" if now else "once its clients have disconnected"
    print_answer({"stopping": when}, as_json, lambda _: click.echo(f"stopping {when}", err=True))


@click.command()
@json_option
@click.pass_context
def status(context: click.Context, *, as_json: bool) -> None:
    """Show whether a daemon runs, and what uses it."""
    from creel.cli.watching import view

    with client_of(context) as client:
        answer = client.ask("status")
    print_answer(answer, as_json, lambda values: view.pairs(view.status_pairs(values)))


@click.command()
@click.argument("target")
@click.option("--time", "limit", metavar="DURATION", help='Load no more after this: "90s", "10m".')
@click.option("--background", is_flag=True, help="Return once loading has begun.")
@json_option
@click.pass_context
def warm(
    context: click.Context, target: str, *, limit: str | None, background: bool, as_json: bool
) -> None:
    """Load a folder, a file, shards or a dataset into memory.

    TARGET is a path, an address, or MODULE:DATASET of your program. A folder is loaded for
    creel.ImageFolder, FileDataset or TarDataset; for a dataset of your own, name it. A daemon is
    started if none runs. It stays for an hour after its last client.

    The samples of a dataset that opens its files itself are read once, to know which files these
    are: training below creel.wrap finds them in memory from its second epoch on.
    """
    from creel.cli import warm
    from creel.units import parse_seconds

    if limit is not None and background:
        raise click.UsageError("--time waits for the end, --background does not: give one of them")
    time_s = math.inf if limit is None else parse_seconds(limit)
    result = warm.warm(
        config_of(context), target, quiet=as_json, time_s=time_s, background=background
    )
    print_answer(result, as_json, lambda values: click.echo(warm.sentence(values)))


@click.command()
@json_option
@click.pass_context
def ls(context: click.Context, *, as_json: bool) -> None:
    """List the datasets that the daemon holds.

    And decoded samples that have a name.
    """
    from creel.cli.watching import view

    decoded = [entry._asdict() for entry in _named(context)]
    try:
        with client_of(context) as client:
            answer = client.ask("datasets")
    except NoDaemonError:
        if not decoded:
            raise
        answer = {"datasets": []}

    def show(values: dict[str, Any]) -> None:
        if values["datasets"] or not decoded:
            view.datasets(values["datasets"])
        view.decoded(decoded)

    print_answer({**answer, "decoded": decoded}, as_json, show)


def _named(context: click.Context) -> list[Named]:
    """Return the decoded samples that have a name, in the folder of the disk tier."""
    from creel.cache.disk.named import listed

    path = config_of(context).disk.path
    with suppress(OSError):
        return listed(path) if path else []
    return []


@click.command()
@click.argument("dataset")
@json_option
@click.pass_context
def drop(context: click.Context, dataset: str, *, as_json: bool) -> None:
    """Free what the daemon holds of a dataset.

    DATASET is a path, for all that lie there, or the first letters of a key (`creel ls`); or the
    name of decoded samples, all of which are removed.
    """
    decoded = [entry for entry in _named(context) if entry.name == dataset]
    if decoded:
        from creel.cache.disk import named
        from creel.units import format_size

        for entry in decoded:
            named.drop(config_of(context).disk.path, entry.key)
        nbytes = sum(entry.nbytes for entry in decoded)
        text = f"dropped {dataset}: {format_size(nbytes)} of decoded samples"
        values = {"dropped": len(decoded), "name": dataset, "nbytes": nbytes}
        print_answer(values, as_json, lambda _: click.echo(text))
        return
    with client_of(context) as client:
        path = str(Path(dataset).absolute()) if Path(dataset).exists() else dataset.rstrip("/")
        answer = client.ask("drop", dataset=path)
    several = f" ({answer['dropped']} datasets)" if answer["dropped"] > 1 else ""
    text = f"dropped {answer['path'] or answer['dataset']}{several}"
    print_answer(answer, as_json, lambda _: click.echo(text))
