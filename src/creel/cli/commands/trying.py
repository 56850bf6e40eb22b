"""Subcommands that try a job before it runs."""

from __future__ import annotations

import os
from pathlib import Path

import click

from creel.cli.commands.options import (
    FAILED,
    config_of,
    json_option,
    print_answer,
    script_of,
    seconds_option,
)
from creel.errors import ConfigError


@click.command()
@click.option("--nodes", type=click.IntRange(1), required=True, help="Nodes of the cluster.")
@click.option("--samples", metavar="COUNT", required=True, help='Samples of the dataset: "14.2M".')
@click.option("--sample-size", metavar="SIZE", required=True, help='Size of a sample: "110KB".')
@click.option(
    "--memory", metavar="SIZE", required=True, help='Memory of each node for samples: "256GiB".'
)
@click.option("--batch", type=click.IntRange(1), required=True, help="Samples per rank and step.")
@click.option(
    "--ranks", type=click.IntRange(1), default=1, show_default=True, help="Ranks per node."
)
@click.option(
    "--epochs", type=click.IntRange(1), default=5, show_default=True, help="Epochs to replay."
)
@click.option(
    "--link", metavar="SIZE", default="0", help="Bytes per second of a node's link: 10GB."
)
@click.option("--source", metavar="SIZE", default="0", help="Bytes per second of the source: 5GB.")
@click.option(
    "--opens", metavar="COUNT", default="0", help="Files that the source opens per second."
)
@click.option("--step", metavar="DURATION", default="0", help='Time to compute a step: "250ms".')
@click.option(
    "--window", type=click.IntRange(1), default=8, show_default=True, help="Steps read ahead."
)
@click.option("--depth", type=click.IntRange(1, 64), help="Epochs that placement looks ahead.")
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the job's sampler."
)
@click.option("--remap", is_flag=True, help='As DataLoader(remap="global-batch").')
@json_option
def simulate(
    *,
    samples: str,
    sample_size: str,
    memory: str,
    link: str,
    source: str,
    opens: str,
    step: str,
    depth: int | None,
    remap: bool,
    as_json: bool,
    **counts: int,
) -> None:
    """Replay the epochs of a job on a hypothetical cluster.

    Shows where samples come from, epoch by epoch, and how long an epoch takes. --memory is per
    node, --batch and --window are per rank, --link and --source are bytes per second; speeds that
    are not given are unlimited. handed on: the share of samples that go to a third node because
    none that has them has room. slowest: source reads of the slowest rank within a window, divided
    by the mean. occupancy: the most first copies that a node held, divided by its memory.
    """
    from creel.cli import simulate
    from creel.policies.cluster.simulate import Scenario
    from creel.units import parse_count, parse_seconds, parse_size

    scenario = Scenario(
        samples=parse_count(samples),
        nbytes=parse_size(sample_size),
        memory=parse_size(memory),
        link_speed=parse_size(link),
        source_speed=parse_size(source),
        source_opens=parse_count(opens),
        step_s=parse_seconds(step),
        depth=depth or 0,
        remap=remap,
        **counts,
    )
    print_answer(simulate.simulate(scenario), as_json, simulate.show)


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--steps", type=click.IntRange(1), help="Stop after this many batches.")
@json_option
@click.argument("target")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def verify(
    context: click.Context,
    target: str,
    arguments: tuple[str, ...],
    *,
    steps: int | None,
    as_json: bool,
) -> int:
    """Compare every batch with torch's, bit for bit.

    TARGET is a SCRIPT (with ARGUMENTS), or MODULE:LOADER: a DataLoader or a function that returns
    one. Options come before it. Both sides run from equal seeds. Reports the first difference
    and exits with 1, and whether torch's own batches are the same in a second run: if not, the
    dataset differs, not the loader.
    """
    if target.endswith(".py") and not Path(target).is_file():  # before seconds of importing torch
        raise ConfigError(f"there is no script {target}")
    try:
        from creel.cli.scripts import verify as verification
    except ModuleNotFoundError as e:
        if e.name != "torch":
            raise
        raise ConfigError("creel verify needs torch: pip install 'creel-data[torch]'") from None

    with script_of(context, arguments):
        result = verification.verify(target, arguments, steps)
    print_answer(result, as_json, lambda values: click.echo(verification.sentence(values)))
    return 0 if result["equal"] else FAILED


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--steps",
    type=click.IntRange(16, 900),
    default=64,
    show_default=True,
    help="Stop after this many batches.",
)
@seconds_option("--limit", 1, 600.0, "Stop after this many seconds.")
@click.option(
    "--ranks", type=click.IntRange(1, 1024), default=1, help="Processes, as torchrun starts them."
)
@json_option
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def explain(
    context: click.Context,
    script: str,
    arguments: tuple[str, ...],
    *,
    steps: int,
    limit: float,
    ranks: int,
    as_json: bool,
) -> None:
    """Say what a training script will take.

    By workers and by memory, from a few of its steps. Runs SCRIPT (with ARGUMENTS) with creel's
    DataLoader in the place of torch's and a daemon of its own, and ends it after these steps;
    with --ranks as many of it, as torchrun on one node does.
    Options come before SCRIPT, whose output goes to standard error.

    Prints what a step and a batch take, by stage; the time of a step and an epoch for each number
    of workers, and for parts of the dataset in memory, with the reads of the source (and requests
    to an object store) in an epoch; the least part with which nothing waits; and what keep_decoded
    would bring. Of a dataset that reads its files by itself, by whichever library: how long it
    waits for them, one of them, the line that serves them, and an epoch with that. Files in the
    page cache are read at its speed, not that of the storage. For several nodes take the figures
    to `creel simulate`.
    """
    if not Path(script).is_file():
        raise ConfigError(f"there is no script {script}")
    from creel.cli import explain

    if context.obj["flags"]["daemon.name"] is None:
        context.obj["flags"]["daemon.name"] = f"explain-{os.getpid()}"
    with script_of(context, arguments):
        answer = explain.explain(config_of(context), script, arguments, steps, limit, ranks)
    print_answer(answer, as_json, explain.show)
