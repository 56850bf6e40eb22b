"""`creel explain`: what a training script will take, by workers and by memory, before the job.

The script runs for some steps, with a daemon of its own. The model (`creel.policies.model`) then
answers for what was not tried. It needs no accelerator other than the script's own.
"""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click

from creel.cli.reads import OwnReads, ProcessSamples
from creel.cli.run import daemon_env, own_daemon, refuse_name_in_use
from creel.cli.watching import view
from creel.cli.watching.advice import advice
from creel.cli.watching.forecasts import BATCHES, HARDLY, ms
from creel.cli.watching.stats import recorded
from creel.cli.watching.view import Values, format_count, format_seconds
from creel.cli.watching.what_if import Machine, outlooks, window
from creel.config import Config
from creel.errors import ConfigError
from creel.loader.client.client import Client
from creel.policies.model import (
    RankWindow,
    forecast,
    with_memory,
    with_storage,
    with_workers,
)
from creel.system import limits
from creel.units import format_size

#: Batches at the start that are left out: workers start, and nothing is read ahead yet.
FIRST = 8
#: Seconds between two looks at the script, and after which it is killed when it does not end.
_LOOK_S, _END_S = 0.2, 10.0
#: Seconds for which the script's reads are looked at, at least.
_READS_S = 1.0
#: The variable that names the file of `creel.cli.scripts.in_place`.
_NOTES = "CREEL_EXPLAIN_NOTES"
#: Parts of the dataset in memory that are told of.
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


class Trial(NamedTuple):
    """What a script did: the answer of `creel stats`, and of each rank its busiest stream.

    ranks: session and rows, the busiest first. They are of one job and one dataset.
    notes: the lines of `creel.cli.scripts.in_place`.
    reads: what each rank has read by itself, in the order of `ranks`.
    """

    answer: Values
    ranks: list[tuple[Values, list[list[int]]]]
    notes: Sequence[Values] = ()
    reads: Sequence[OwnReads] = ()

    @property
    def batches(self) -> list[int]:
        """Batches that are recorded of each rank."""
        return [len(rows) for _, rows in self.ranks]

    @property
    def note(self) -> Values | None:
        """The note of the longest loader of the busiest rank; None if its length is unknown."""
        of_rank = [note for note in self.notes if note["pid"] == self.ranks[0][0]["pid"]]
        return max(of_rank, key=lambda note: int(note["batches"]), default=None)


def explain(
    config: Config, script: str, arguments: Sequence[str], steps: int, limit_s: float, ranks: int
) -> dict[str, Any]:
    """Run a script for so many steps, at most `limit_s`; return the keys in docs/json.md.

    ranks: processes, with the environment that torchrun gives them; 1: the script alone.

    Raises:
        ConfigError: it ended, or the time was up, after too few steps.
        UnavailableError: another daemon has this name.
    """
    refuse_name_in_use(config.daemon.name)
    with own_daemon(config), tempfile.TemporaryDirectory() as folder:
        notes = Path(folder, "notes")
        command = [sys.executable, "-m", "creel.cli.scripts.in_place", script, *arguments]
        shared = daemon_env(config) | {_NOTES: str(notes)}
        children = [
            subprocess.Popen(command, env=shared | env, stdout=sys.stderr)  # noqa: S603  the user's script
            for env in _environments(ranks)
        ]
        process_samples = ProcessSamples([child.pid for child in children])
        try:
            with Client.connect(config.daemon.name, "cli") as client:
                trial = _watched(client, children, steps + FIRST, limit_s, process_samples)
        finally:
            process_samples.end()
            for child in children:
                child.terminate()
            for child in children:
                _end(child)
        if trial is not None and notes.exists():
            trial = trial._replace(
                notes=[json.loads(line) for line in notes.read_text().splitlines()]
            )
    if trial is None or min(trial.batches) <= FIRST + BATCHES:
        raise ConfigError(
            f"{script} took too few batches: one DataLoader must give {FIRST + BATCHES + 1} or more"
            " before the script ends or the time of --limit is over"
        )
    machine = Machine(limits.cores(), *limits.memory(active=True))
    return foretold(trial, machine)


def _environments(ranks: int) -> list[dict[str, str]]:
    """Return what torchrun adds to the environment of each rank on one node."""
    if ranks == 1:
        return [{}]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    job |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0"}
    job["TORCHELASTIC_RUN_ID"] = f"explain-{port}"  # their job has one name
    return [{**job, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def _watched(
    client: Client,
    children: Sequence[subprocess.Popen[bytes]],
    steps: int,
    limit_s: float,
    process_samples: ProcessSamples,
) -> Trial | None:
    """Return the ranks of the busiest stream, once they have enough, or the script ends.

    Ranks that do not step together with the busiest are waited for until it has twice as much.
    """
    last, until = None, time.monotonic() + limit_s
    while all(child.poll() is None for child in children) and time.monotonic() < until:
        answer = client.ask("stats")
        trial = _busiest(answer, list(recorded(client, answer)))
        if trial is not None:
            process_samples.begin()
        if trial is not None and (last is None or sum(trial.batches) >= sum(last.batches)):
            last = trial
            most, least = trial.batches[0], min(trial.batches)
            everyone = len(trial.ranks) == max(trial.ranks[0][0]["world"], 1)
            enough = most >= steps and ((everyone and least >= steps) or most >= 2 * steps)
            if enough and process_samples.seconds >= _READS_S:
                break
        time.sleep(_LOOK_S)
    process_samples.end()
    if last is None:
        return None
    of_ranks = [
        process_samples.of(session["pid"], workers=session["workers"] > 0)
        for session, _ in last.ranks
    ]
    return last._replace(reads=of_ranks)


def _busiest(answer: Values, streams: list[tuple[Values, list[list[int]]]]) -> Trial | None:
    """Return the ranks that read the same dataset as the stream with most batches, and its job."""
    streams.sort(key=lambda stream: -len(stream[1]))
    if not streams:
        return None
    first, _ = streams[0]
    ranks: dict[int, tuple[Values, list[list[int]]]] = {}
    for session, rows in streams:
        if (session["dataset"], session["world"]) == (first["dataset"], first["world"]):
            ranks.setdefault(session["rank"], (session, rows))
    return Trial(answer, list(ranks.values()))


def _end(child: subprocess.Popen[bytes]) -> None:
    """Wait for a process that got SIGTERM, which ends its workers, too, or else kill it."""
    try:
        child.wait(_END_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def foretold(trial: Trial, machine: Machine) -> dict[str, Any]:
    """Return what the job will take. Pure.

    Of several ranks, the figures of one step and its making are those of the rank that is late.
    """
    busiest = trial.ranks[0][0]
    dataset = trial.answer["core"]["datasets"].get(busiest["dataset"])
    each = busiest["samples"] / max(busiest["batches"], 1)
    samples = None if dataset is None else int(dataset["objects"])
    world = max(int(busiest["world"]), 1)
    steps = None if samples is None or not each else math.ceil(samples / each / world)
    if dataset is None and trial.note is not None:
        samples, steps = int(trial.note["samples"]), int(trial.note["batches"])
    rows = {session["session"]: its[FIRST : _end_of(steps)] for session, its in trial.ranks}
    windows = [
        seen for session, _ in trial.ranks if (seen := window(session, rows[session["session"]]))
    ]
    forecasts = forecast(windows, machine.cores)
    late = max(range(len(forecasts)), key=lambda k: forecasts[k].wait_s)
    session, seen = trial.ranks[late][0], windows[late]

    def row(change: Callable[[RankWindow], RankWindow], values: Values) -> dict[str, Any]:
        will = forecast([change(rank_window) for rank_window in windows], machine.cores)[late]
        epoch_s = None if steps is None else steps * will.step_s
        return {**values, "step_s": will.step_s, "wait_s": will.wait_s, "epoch_s": epoch_s}

    each_read = None if samples is None else _requests(trial.answer, session, samples)
    whole = 0 if dataset is None else _nbytes(session, dataset)
    changes = outlooks(trial.answer, rows, machine)[session["session"]].changes
    counts = sorted({*range(1, int(machine.cores) + 1), max(seen.workers, 1)})
    by_session = {
        "samples": samples,
        "nbytes": whole,
        "steps": steps,
        "ranks": len(windows),
        "workers": seen.workers,
        "train_s": min(rank_window.train_s for rank_window in windows),
        "busy_s": {stage: s / seen.batches for stage, s in seen.busy_s.items()},
        **row(lambda rank_window: rank_window, {}),
        "by_workers": [row(partial(with_workers, workers=n), {"workers": n}) for n in counts],
        "by_memory": [
            row(
                partial(with_memory, hits=share),
                {
                    "share": share,
                    "nbytes": int(share * whole),
                    "reads": None if samples is None else round((1 - share) * samples),
                    "requests": None if each_read is None else round((1 - share) * each_read),
                },
            )
            for share in (_SHARES if dataset is not None else ())
        ],
        "least_share": _least_share(windows, machine.cores) if dataset is not None else None,
        "changes": [
            {**change.values, "step_s": change.step_s, "wait_s": change.wait_s}
            for change in changes
        ],
        "reads": _own_reads(trial, late, seen, row) if dataset is None and trial.reads else None,
    }
    where = trial.note.get("where", "") if trial.note else ""
    return {**by_session, "advice": advice(by_session, where)}


def _own_reads(
    trial: Trial,
    late: int,
    seen: RankWindow,
    row: Callable[[Callable[[RankWindow], RankWindow], Values], dict[str, Any]],
) -> dict[str, Any] | None:
    """Return what the dataset reads by itself, and what would come of the line that serves it.

    None if nothing waits for storage.
    """
    reads = trial.reads[late]
    stored = partial(with_storage, share=reads.share, asleep=reads.asleep)
    waits_s = stored(seen).busy_s["source"] / seen.batches
    if waits_s <= HARDLY * seen.seconds / seen.batches:
        return None
    files = sorted(reads.files, key=lambda file: -reads.files[file])
    pace = seen.batches / seen.seconds
    values = {
        "storage_s": waits_s,
        "nbytes": int(reads.nbytes / max(reads.seconds * pace, 1e-9)),
        "file": reads.container or next((path for path, _ in files if path), ""),
        "files": len({path for path, _ in files}),
        "mapped": reads.mapped,
        "line": reads.line(ahead=trial.note is not None and trial.note["ahead"]),
    }
    return row(lambda rank_window: with_memory(stored(rank_window)), values)


def _end_of(steps: int | None) -> int | None:
    """Return how many batches to look at: later epochs find in memory what the first one read."""
    return None if steps is None or steps <= FIRST + BATCHES else steps


def _nbytes(session: Values, dataset: Values) -> int:
    """Return the bytes of a dataset; the daemon knows no sizes of files that are read directly."""
    if 2 * session["direct_reads"] < session["samples"]:
        return int(dataset["nbytes"])
    return int(dataset["objects"] * session["direct_nbytes"] / session["direct_reads"])


def _requests(answer: Values, session: Values, objects: int) -> float | None:
    """Return the requests to an object store that read each object once; None: there is none."""
    for source in answer.get("sources", ()):
        asked = source.get("requests", {})
        requests = asked.get("GET", 0) + asked.get("HEAD", 0)
        if source["dataset"] == session["dataset"] and requests and source["reads"]:
            return float(objects * requests / source["reads"])
    return None


def _least_share(windows: Sequence[RankWindow], cores: float) -> float | None:
    """Return the least share of the dataset in memory, in hundredths, with which nothing waits."""
    for hundredths in range(101):
        share = hundredths / 100
        will = forecast([with_memory(rank_window, share) for rank_window in windows], cores)
        if max(of_rank.wait_s for of_rank in will) <= HARDLY * will[0].step_s:
            return hundredths / 100
    return None


def show(values: Values) -> None:
    """Print what was measured, what would come of changes, and which one to make."""
    _show_figures(values)
    click.echo(f"\n{values['advice']['sentence']}")


def _show_figures(values: Values) -> None:
    """Print a row for each number of workers and part in memory, below what was measured."""
    busy = ", ".join(f"{stage} {ms(s)}" for stage, s in values["busy_s"].items())
    rows = [
        ("one step", f"{ms(values['step_s'])}: training {ms(values['train_s'])}, the rest a wait")
    ]
    workers = values["workers"]
    by = f"by {workers} worker{'s' * (workers > 1)}" if workers else "by training itself"
    late = f"; of {values['ranks']} ranks the one that waits longest" * (values["ranks"] > 1)
    rows.append(("one batch", f"{busy}; made {by}{late}"))
    if values["steps"] is not None:
        size = f", {format_size(values['nbytes'])}" * bool(values["nbytes"])
        samples = format_count(values["samples"])
        rows.append(("one epoch", f"{values['steps']:,} steps: {samples} samples{size}"))
    if values["least_share"] is not None:
        part = f"{100 * values['least_share']:.0f} % of the dataset in memory"
        rows.append(("no wait", f"with {part} ({_size(values, values['least_share'])})"))
    rows += [("instead", _change(change)) for change in values["changes"]]
    if values["reads"] is not None:
        rows += _reads_rows(values["reads"])
    view.pairs(rows)
    click.echo()
    header: tuple[str, ...] = ("workers", "a step", "a wait in it", "an epoch")
    view.table(header, [(str(r["workers"]), *_times(r)) for r in values["by_workers"]])
    if not values["by_memory"]:
        return
    click.echo()
    if values["busy_s"]["source"] <= HARDLY * values["step_s"]:
        click.echo("memory makes no difference to a step: storage (or the page cache) keeps up")
        return
    counts = [name for name in ("reads", "requests") if values["by_memory"][0][name] is not None]
    header = ("in memory", "bytes", *counts, *header[1:])
    cells = [
        (
            *(f"{100 * r['share']:.0f} %", _size(values, r["share"])),
            *(format_count(r[name]) for name in counts),
            *_times(r),
        )
        for r in values["by_memory"]
    ]
    view.table(header, cells)


def _reads_rows(reads: Values) -> list[tuple[str, str]]:
    """Return what the dataset reads by itself, and the line that serves it."""
    size = f", {format_size(reads['nbytes'])}" * bool(reads["nbytes"])
    kind = "pages of " * reads["mapped"]
    place = f": {kind}{reads['file']}" if reads["file"] else ""
    step, _, epoch = _times(reads)
    then = f"by {reads['line']}: {step} a step, an epoch {epoch}, once it is in memory"
    return [
        ("reads", f"{ms(reads['storage_s'])} of a batch{size}, past creel{place}"),
        ("served", then),
    ]


def _size(values: Values, share: float) -> str:
    return format_size(int(share * values["nbytes"]))


def _times(row: Values) -> tuple[str, str, str]:
    epoch_s = row["epoch_s"]
    return ms(row["step_s"]), ms(row["wait_s"]), "-" if epoch_s is None else format_seconds(epoch_s)


def _change(change: Values) -> str:
    name = change["what"]
    if name == "workers":
        name = f"{change['workers']} workers"
    if name == "keep_decoded":
        name += f" ({format_size(change['nbytes'])}, fits {100 * change['fits']:.0f} %)"
    return f"{name}: {ms(change['step_s'])} a step, {ms(change['wait_s'])} of it a wait"
