"""`creel explain`: what a training script will take, by workers and by memory, before the job.

The script runs for some steps, with a daemon of its own. The model (`creel.policies.model`) then
answers for what was not tried. It needs no accelerator other than the script's own.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import click

from creel.cli.run import daemon_env, own_daemon, refuse_name_in_use
from creel.cli.watching import view
from creel.cli.watching.forecasts import BATCHES, HARDLY, ms
from creel.cli.watching.stats import recorded
from creel.cli.watching.view import Values, format_count, format_seconds
from creel.cli.watching.what_if import Machine, outlooks, window
from creel.config import Config
from creel.errors import ConfigError
from creel.loader.client.client import Client
from creel.policies.model import RankWindow, forecast, with_memory, with_workers
from creel.system import limits
from creel.units import format_size

#: Batches at the start that are left out: workers start, and nothing is read ahead yet.
FIRST = 8
#: Seconds between two looks at the script, and after which it is killed when it does not end.
_LOOK_S, _END_S = 0.2, 10.0
#: Parts of the dataset in memory that are told of.
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


class Trial(NamedTuple):
    """What a script did: the answer of `creel stats`, its busiest stream, and that one's rows."""

    answer: Values
    session: Values
    rows: list[list[int]]


def explain(
    config: Config, script: str, arguments: Sequence[str], steps: int, limit_s: float
) -> dict[str, Any]:
    """Run a script for so many steps, at most `limit_s`; return the keys in docs/cli.md.

    Raises:
        ConfigError: it ended, or the time was up, after too few steps.
        UnavailableError: another daemon has this name.
    """
    refuse_name_in_use(config.daemon.name)
    with own_daemon(config):
        command = [sys.executable, "-m", "creel.loader.in_place", script, *arguments]
        child = subprocess.Popen(command, env=daemon_env(config), stdout=sys.stderr)  # noqa: S603  the user's script
        try:
            with Client.connect(config.daemon.name, "cli") as client:
                trial = _watched(client, child, steps + FIRST, limit_s)
        finally:
            _end(child)
    seen = None if trial is None else window(trial.session, trial.rows[FIRST:])
    if trial is None or seen is None:
        raise ConfigError(
            f"{script} took too few batches from one DataLoader: {FIRST + BATCHES + 1} are needed,"
            " and more say more"
        )
    machine = Machine(limits.cores(), *limits.memory(active=True))
    return foretold(trial, seen, machine)


def _watched(
    client: Client, child: subprocess.Popen[bytes], steps: int, limit_s: float
) -> Trial | None:
    """Return the stream with most batches, once it has enough, or the script ends."""
    last, until = None, time.monotonic() + limit_s
    while child.poll() is None and time.monotonic() < until:
        answer = client.ask("stats")
        told = [Trial(answer, session, rows) for session, rows in recorded(client, answer)]
        found = max(told, key=lambda one: len(one.rows), default=None)
        if found is not None and (last is None or len(found.rows) >= len(last.rows)):
            last = found
            if len(found.rows) >= steps:
                break
        time.sleep(_LOOK_S)
    return last


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the script: by SIGTERM, which ends its workers, too, or else by SIGKILL."""
    child.terminate()
    try:
        child.wait(_END_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def foretold(trial: Trial, seen: RankWindow, machine: Machine) -> dict[str, Any]:
    """Return what the job will take. Pure."""
    session = trial.session
    dataset = trial.answer["core"]["datasets"].get(session["dataset"])
    each = session["samples"] / max(session["batches"], 1)
    samples = None if dataset is None else int(dataset["objects"])
    steps = None if samples is None or not each else math.ceil(samples / each)

    def row(one: RankWindow, values: Mapping[str, Any]) -> dict[str, Any]:
        (will,) = forecast([one], machine.cores)
        epoch_s = None if steps is None else steps * will.step_s
        return {**values, "step_s": will.step_s, "wait_s": will.wait_s, "epoch_s": epoch_s}

    whole = 0 if dataset is None else _nbytes(session, dataset)
    found = outlooks(trial.answer, {session["session"]: trial.rows[FIRST:]}, machine)
    changes = found[session["session"]].changes
    counts = sorted({*range(1, int(machine.cores) + 1), max(seen.workers, 1)})
    return {
        "samples": samples,
        "nbytes": whole,
        "steps": steps,
        "workers": seen.workers,
        "train_s": seen.train_s,
        "busy_s": {stage: s / seen.batches for stage, s in seen.busy_s.items()},
        **row(seen, {}),
        "by_workers": [row(with_workers(seen, n), {"workers": n}) for n in counts],
        "by_memory": [
            row(
                with_memory(seen, share),
                {
                    "share": share,
                    "nbytes": int(share * whole),
                    "reads": None if samples is None else round((1 - share) * samples),
                },
            )
            for share in (_SHARES if dataset is not None else ())
        ],
        "least_share": _least_share(seen, machine.cores) if dataset is not None else None,
        "changes": [{**one.values, "step_s": one.step_s, "wait_s": one.wait_s} for one in changes],
    }


def _nbytes(session: Values, dataset: Values) -> int:
    """Return the bytes of a dataset; the daemon knows no sizes of files that are read directly."""
    if 2 * session["direct_reads"] < session["samples"]:
        return int(dataset["nbytes"])
    return int(dataset["objects"] * session["direct_nbytes"] / session["direct_reads"])


def _least_share(seen: RankWindow, cores: float) -> float | None:
    """Return the least share of the dataset in memory, in hundredths, with which nothing waits."""
    for hundredths in range(101):
        (will,) = forecast([with_memory(seen, hundredths / 100)], cores)
        if will.wait_s <= HARDLY * will.step_s:
            return hundredths / 100
    return None


def show(told: Values) -> None:
    """Print what was measured, and a row for each number of workers and part in memory."""
    busy = ", ".join(f"{stage} {ms(s)}" for stage, s in told["busy_s"].items())
    found = [("one step", f"{ms(told['step_s'])}: training {ms(told['train_s'])}, the rest a wait")]
    workers = told["workers"]
    by = f"by {workers} worker{'s' * (workers > 1)}" if workers else "by training itself"
    found.append(("one batch", f"{busy}; made {by}"))
    if told["steps"] is not None:
        size = f"{format_count(told['samples'])} samples, {format_size(told['nbytes'])}"
        found.append(("one epoch", f"{told['steps']:,} steps: {size}"))
    if told["least_share"] is not None:
        part = f"{100 * told['least_share']:.0f} % of the dataset in memory"
        found.append(("no wait", f"with {part} ({_size(told, told['least_share'])})"))
    found += [("instead", _change(one)) for one in told["changes"]]
    view.pairs(found)
    click.echo()
    header: tuple[str, ...] = ("workers", "a step", "a wait in it", "an epoch")
    view.table(header, [(str(r["workers"]), *_times(r)) for r in told["by_workers"]])
    if not told["by_memory"]:
        return
    click.echo()
    if told["busy_s"]["source"] <= HARDLY * told["step_s"]:
        click.echo("memory makes no difference to a step: storage (or the page cache) keeps up")
        return
    header = ("in memory", "bytes", "reads", *header[1:])
    cells = [
        (f"{100 * r['share']:.0f} %", _size(told, r["share"]), format_count(r["reads"]), *_times(r))
        for r in told["by_memory"]
    ]
    view.table(header, cells)


def _size(told: Values, share: float) -> str:
    return format_size(int(share * told["nbytes"]))


def _times(row: Values) -> tuple[str, str, str]:
    epoch_s = row["epoch_s"]
    return ms(row["step_s"]), ms(row["wait_s"]), "-" if epoch_s is None else format_seconds(epoch_s)


def _change(one: Values) -> str:
    what = one["what"]
    if what == "workers":
        what = f"{one['workers']} workers"
    if what == "keep_decoded":
        what += f" ({format_size(one['nbytes'])}, fits {100 * one['fits']:.0f} %)"
    return f"{what}: {ms(one['step_s'])} a step, {ms(one['wait_s'])} of it a wait"
