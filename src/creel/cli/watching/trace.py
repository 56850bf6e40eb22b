"""`creel trace`: the last batches of all ranks of a node as a timeline, for Perfetto or Chrome.

The file is in Chrome's Trace Event Format, with what `creel plot` needs beside it. A process is a
rank, or the daemon; a thread is a trainer, a worker or one of the daemon's. All moments are those
of the monotonic clock, which the processes of a node share.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from creel.cache.memory.batch_log import BatchRow
from creel.cli.recorded.recording import KEY, Recording, TracedStream, as_json
from creel.cli.watching.forecasts import job_key
from creel.cli.watching.stats import recorded
from creel.cli.watching.view import Values, job_of
from creel.errors import ConfigError
from creel.system import limits

if TYPE_CHECKING:
    from creel.loader.client.client import Client

Event: TypeAlias = "dict[str, Any]"
#: A session of `creel stats` and its last batches.
Stream: TypeAlias = "tuple[Values, Sequence[BatchRow]]"

_DAEMON = 0  # number of the daemon's process
_TRAINER = 0  # number of a trainer's thread


def trace(client: Client, out: str, seconds: float) -> dict[str, Any]:
    """Write the timeline of the last `seconds` to a file, and return what it has.

    Raises:
        ConfigError: training took no batch in that time, or the file cannot be written.
    """
    since_ns = max(time.monotonic_ns() - int(1e9 * seconds), 0)
    answer = client.ask("stats")
    recorded_streams = list(recorded(client, answer, since_ns))
    streams = [(session, [*map(BatchRow._make, rows)]) for session, rows in recorded_streams]
    batches = sum(len(rows) for _, rows in streams)
    if not batches:
        raise ConfigError(
            f"no batch was taken through this daemon in the last {seconds:g} s: nothing to trace;"
            " run it beside a training, or with more --seconds"
        )
    parts = [part for part in client.ask("fetches")["parts"] if part[2] > since_ns]
    events = [*of_streams(streams), *of_fetches(parts)]
    kept = [TracedStream(*stream, _reuse(client, stream[0])) for stream in recorded_streams]
    recording = as_json(Recording(limits.cores(), answer, kept))
    try:
        with Path(out).open("w", encoding="utf-8") as file:
            json.dump({"displayTimeUnit": "ms", "traceEvents": events, KEY: recording}, file)
    except OSError as e:
        raise ConfigError(f"{out} cannot be written: {e.strerror}") from e
    ranks = {_rank(session) for session, rows in streams if rows}
    waits_s = sum(row.taken - row.wait_began for _, rows in streams for row in rows) / 1e9
    return {
        "path": out,
        "ranks": len(ranks),
        "batches": batches,
        "fetches": len(parts),
        "stall_s": waits_s,
    }


def _reuse(client: Client, session: Values) -> Values:
    """Return after how many steps a stream's job reads objects again, see `stats.reuse`."""
    try:
        return client.ask("reuse", session=session["session"])
    except ConfigError:  # it has just ended
        return {"counts": [], "edges": [], "objects": 0}


def sentence(run: Values) -> str:
    """Say what a trace has, and where to look at it."""
    return (
        f"{run['path']}: {run['batches']} batches of {run['ranks']} ranks,"
        f" {run['stall_s']:.2f} s of waits, {run['fetches']} fetches; open it in ui.perfetto.dev"
        " or chrome://tracing"
    )


def of_streams(streams: Iterable[Stream]) -> Iterator[Event]:
    """Yield the events of all ranks."""
    processes: dict[tuple[str, int], int] = {}
    threads: dict[int, int] = {}  # by process
    for session, rows in streams:
        if not rows:
            continue
        job_rank = _rank(session)
        if job_rank not in processes:
            process = processes[job_rank] = len(processes) + 1
            threads[process] = 1
            yield _named("process", process, _TRAINER, f"{job_of(session)} rank {job_rank[1]}")
            yield _named("thread", process, _TRAINER, "training")
        process = processes[job_rank]
        for row, before in zip(rows, [None, *rows], strict=False):
            yield from _of_training(row, before, process)
        for worker, lane in _lanes(rows):
            thread = _TRAINER
            if worker >= 0:
                thread = threads[process]
                threads[process] += 1
                name = f"worker {worker} of stream {session['session']}"
                yield _named("thread", process, thread, name)
            for row in lane:
                yield from _of_making(row, process, thread)


def _lanes(rows: Sequence[BatchRow]) -> list[tuple[int, list[BatchRow]]]:
    """Return workers, each with batches of which none began before the one before was made.

    Threads may make two batches of one torch worker at once: there are then two lanes of it.
    """
    lanes: list[tuple[int, list[BatchRow]]] = []
    for row in sorted((row for row in rows if row.began), key=lambda row: (row.worker, row.began)):
        fits = (lane for worker, lane in lanes if worker == row.worker)
        free = next((lane for lane in fits if lane[-1].packed <= row.began), None)
        if free is None:
            lanes.append((row.worker, [row]))
        else:
            free.append(row)
    return lanes


def _of_training(row: BatchRow, before: BatchRow | None, process: int) -> Iterator[Event]:
    """Yield what training did before it had a batch: it trained, and then it waited."""
    about = {"step": row.step, "worker": row.worker}
    if before is not None and before.taken < row.wait_began:
        yield _span("train", before.taken, row.wait_began, process, _TRAINER, {"step": before.step})
    yield _span("wait", row.wait_began, row.taken, process, _TRAINER, about)
    if row.worker >= 0 and row.packed:
        handed = max(row.packed, row.wait_began)
        yield _span("hand over", handed, row.taken, process, _TRAINER, about)


def _of_making(row: BatchRow, process: int, thread: int) -> Iterator[Event]:
    """Yield the stages in which a batch was made."""
    for name, since, until in (
        ("wait for objects", row.began, row.ready),
        ("decode", row.ready, row.collating),
        ("collate", row.collating, row.packed),
    ):
        if until > since:
            about = {"step": row.step, "worker": row.worker}
            yield _span(name, since, until, process, thread, about)


def of_fetches(parts: Iterable[Sequence[Any]]) -> Iterator[Event]:
    """Yield the daemon's reads; `parts` as the daemon answers "fetches"."""
    threads: dict[int, int] = {}
    for thread, began, ended, objects, origin in parts:
        if not threads:
            yield _named("process", _DAEMON, 0, "creel's daemon")
        if thread not in threads:
            threads[thread] = len(threads)
            yield _named("thread", _DAEMON, threads[thread], f"fetch {threads[thread]}")
        name = "copy" if origin == "copy" else f"read {origin}"
        yield _span(name, began, ended, _DAEMON, threads[thread], {"objects": objects})


def _rank(session: Values) -> tuple[str, int]:
    """Return what identifies a rank of a node: its job, or else its process; and its number."""
    return job_key(session), session["rank"]


def _span(
    name: str, since_ns: int, until_ns: int, process: int, thread: int, about: Mapping[str, Any]
) -> Event:
    """Return a complete event; its times are in microseconds, as the format has them."""
    times = {"ts": since_ns / 1e3, "dur": (until_ns - since_ns) / 1e3}
    return {
        "ph": "X", "name": name, "cat": "creel", **times,
        "pid": process, "tid": thread, "args": {**about},
    }  # fmt: skip


def _named(kind: str, process: int, thread: int, name: str) -> Event:
    """Return the event that names a process or a thread."""
    args = {"name": name}
    return {"ph": "M", "name": f"{kind}_name", "pid": process, "tid": thread, "args": args}
