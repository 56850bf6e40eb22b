"""Subcommands that show what training does."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from creel.cli.commands.options import (
    client_of,
    interval_option,
    json_option,
    print_answer,
    repeat,
    seconds_option,
)


@click.command()
@click.option("--watch", is_flag=True, help="Repeat until Ctrl-C.")
@click.option("--why", is_flag=True, help="Say what training waited for, and what would help.")
@click.option("--bad", is_flag=True, help="List the samples that could not be read.")
@click.option("--run", is_flag=True, help="Of the latest run, not since the daemon's start.")
@interval_option
@json_option
@click.pass_context
def stats(
    context: click.Context, /, *, watch: bool, why: bool, bad: bool, run: bool, **options: Any
) -> None:
    """Show hits, source reads, evictions, and stalls by cause.

    Of each open stream of batches: its step, the steps ready ahead and how long they will last
    (lead), what was delivered, what was read past the daemon (direct), how long batches were ready
    before use (mean lead), the share of recent time that training did not wait (fed), how long
    workers were busy, by stage, and on a processor (cpu), and how long training waited (stall), by
    cause. A narrow terminal leaves columns out.

    --why instead prints a sentence for each stream: what training waited for, and how many times
    as fast steps would come with more workers, with keep_decoded, and with all in memory. A run
    begins when a job opens its first stream of batches and no other has any open.
    """
    from creel.cli.watching import stats as show

    if watch + why + bad > 1:
        raise click.UsageError("one of --watch, --why and --bad at a time")
    if run and (why or bad):
        raise click.UsageError("--run is for counters: --why and --bad have none")
    interval: float = options["interval"]
    as_json: bool = options["as_json"]
    of = {"run": True} if run else {}
    with client_of(context) as client:
        if why:
            show.reasons(client, as_json=as_json)
            return
        if bad:
            show.bad_samples(client.ask("bad_samples"), as_json=as_json)
            return

        def counters() -> None:
            show.counters(client.ask("stats", **of), as_json=as_json, line=watch)

        counters()
        if watch:
            repeat(interval, as_json, counters)


@click.command()
@interval_option
@click.pass_context
def top(context: click.Context, interval: float) -> None:
    """Show live statistics; quit with q or Ctrl-C.

    As `creel stats`, with rates over the last 10 seconds: stall is the share of that time that
    training waited, mostly its largest cause, wait what each next step will wait for, busy the
    share that workers worked (200 %: two all the time). Above it are processor time and memory of
    the daemon, the trainers and the workers, and for each job what its next steps will take, and
    which rank is late and why. About 190 columns show each cause's share.
    """
    from creel.cli.watching import top

    if not (sys.stdout.isatty() and sys.stdin.isatty()):
        raise click.UsageError("top needs a terminal; use `creel stats --watch` in a pipe")
    if os.environ.get("TERM", "").lower() in {"dumb", "unknown"}:  # rich draws nothing there
        raise click.UsageError("this terminal cannot redraw (TERM); use `creel stats --watch`")
    with client_of(context) as client:
        top.show(lambda: client.ask("stats"), lambda: client.ask("status"), interval)


@click.command()
@click.argument("out", type=click.Path(dir_okay=False))
@seconds_option("--seconds", 0.001, 10.0, "How far back it goes.")
@json_option
@click.pass_context
def trace(context: click.Context, out: str, *, seconds: float, as_json: bool) -> None:
    """Write the last batches as a timeline for Perfetto or Chrome.

    OUT is the file to write, which ui.perfetto.dev opens. The batches are those of all ranks of
    this node: the last 959 of each stream are always recorded. A process is a rank, or the daemon.
    A rank's thread "training" shows when it trained and when it waited; each worker has a thread
    with the stages of each batch.
    """
    from creel.cli.watching import trace

    with client_of(context) as client:
        answer = trace.trace(client, out, seconds)
    print_answer(answer, as_json, lambda values: click.echo(trace.sentence(values)))


@click.command()
@click.argument("recorded", type=click.Path(dir_okay=False))
@click.argument("out", type=click.Path(dir_okay=False))
@click.option("--job", help="Of this job (default: the one with most batches).")
@json_option
def plot(recorded: str, out: str, *, job: str | None, as_json: bool) -> None:
    """Draw four pictures of a recorded run.

    RECORDED is what `creel trace` wrote, OUT a file (.png or .svg). Stages of each rank's
    steps, slowdown against all in memory, throughput over workers, and after how many steps
    objects are read again. Needs no daemon.
    """
    from creel.cli.recorded import plot

    answer = plot.plot(recorded, out, job)
    print_answer(answer, as_json, lambda values: click.echo(plot.sentence(values)))


@click.command()
@click.argument("path")
@click.option("--watch", is_flag=True, help="Repeat until Ctrl-C.")
@click.option("--end", is_flag=True, help="End the stream: its producers are gone for good.")
@click.option("--forget", metavar="NAME", help="Let producers go on without the reader NAME.")
@interval_option
@json_option
def stream(
    path: str, *, watch: bool, end: bool, forget: str | None, interval: float, as_json: bool
) -> None:
    """Show a stream's chunks, its rate, and how far its readers are.

    PATH is its folder, or redis://host/key. Of each reader: where it is, how many records it has
    yet to read (lag), and how old the next of them is. Needs no daemon.
    """
    from creel.cli.watching import stream as show

    if end:
        show.end(path)
    if forget is not None:
        show.forget(path, forget)
    print_answer(show.state(path), as_json and not watch, lambda values: show.show(values, as_json))
    if watch:
        repeat(interval, as_json, lambda: show.show(show.state(path), as_json))
