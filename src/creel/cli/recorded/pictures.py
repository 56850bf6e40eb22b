"""The numbers of the four pictures of a recorded run (`creel plot`). Pure.

They are those of the Lobster study (ICPP 2022), of the person's own job: what each step of each
rank took by stage, how much slower steps are than with all data in memory, throughput by workers,
and after how many steps samples are read again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from creel.cache.memory.batch_log import columns
from creel.cli.recorded.recording import Recording, TracedStream
from creel.cli.watching.forecasts import BATCHES, job_key
from creel.cli.watching.view import Values, job_of
from creel.cli.watching.what_if import window
from creel.errors import ConfigError
from creel.policies.arrays import Floats, Ints
from creel.policies.model import RankWindow, forecast, with_memory, with_workers

#: Most steps and ranks of the first picture: more cannot be told apart.
STEPS, RANKS = 48, 8
#: The third picture ends at so many workers, or at twice what is there.
_MOST_WORKERS = 64
#: Stages in which a batch is made, and the moments between which each of them lies.
STAGES = ("read", "decode", "collate")
_MOMENTS = ("began", "ready", "collating", "packed")
#: Parts of what is read now that would be in memory.
_SHARES = np.linspace(0, 1, 21)


@dataclass(frozen=True)
class RankSteps:
    """The last k steps of one rank.

    Attributes:
        steps: (k,) their numbers.
        stages: by stage, (k,) seconds in which the batch was made, divided by the workers of the
            rank: what the stage would add to a step if all work were even.
        step_s, wait_s: (k,) seconds of each step, and of its wait for the batch.
    """

    rank: int
    steps: Ints
    stages: dict[str, Floats]
    step_s: Floats
    wait_s: Floats


@dataclass(frozen=True)
class Slowdown:
    """A step's time divided by that with all in memory, (k,), by the share that is in memory."""

    shares: Floats
    times: Floats


@dataclass(frozen=True)
class Throughput:
    """Samples per second of the job.

    Attributes:
        workers: (k,) numbers of workers of each rank.
        samples_s: (k,) what the model foretells of each.
        present, measured: workers of each rank in the run, and what came then.
        fed: what training would take if no batch were late.
    """

    workers: Ints
    samples_s: Floats
    present: float
    measured: float
    fed: float


@dataclass(frozen=True)
class Reuse:
    """Reads by the steps until the object is read again: (b,) counts in bins of (b + 1,) edges.

    epoch: steps of an epoch; nan if unknown.
    """

    counts: Ints
    edges: Ints
    epoch: float


@dataclass(frozen=True)
class Pictures:
    """The pictures of one job; in the place of one that cannot be drawn, why not.

    left_out: ranks of the job that `steps` does not show.
    """

    job: str
    steps: list[RankSteps]
    left_out: int
    slowdown: Slowdown | str
    throughput: Throughput | str
    reuse: Reuse | str


def pictures(recording: Recording, job: str | None = None) -> Pictures:
    """Return the pictures of a job; None: of the one that took most batches.

    Raises:
        ConfigError: there is no such job in the recording.
    """
    ranks = _ranks(recording, job)
    shown = sorted(ranks, key=lambda stream: -_waited(stream))[:RANKS]
    shown.sort(key=lambda stream: stream.session["rank"])
    windows = [
        seen for stream in ranks if (seen := window(stream.session, stream.rows)) is not None
    ]
    few = f"too few batches were recorded: {BATCHES + 2} of each rank are needed"
    known = len(windows) == len(ranks)
    return Pictures(
        job=job_of(ranks[0].session),
        steps=[of_steps(stream) for stream in shown],
        left_out=len(ranks) - len(shown),
        slowdown=of_memory(recording, ranks, windows) if known else few,
        throughput=of_workers(recording, ranks, windows) if known else few,
        reuse=of_reuse(recording, ranks),
    )


def _ranks(recording: Recording, job: str | None) -> list[TracedStream]:
    """Return for each rank of the job its stream with most batches."""
    streams = sorted(recording.streams, key=lambda stream: job_key(stream.session))
    jobs = {
        key: list(group) for key, group in groupby(streams, lambda stream: job_key(stream.session))
    }
    if job is not None:
        jobs = {k: s for k, s in jobs.items() if job in {k, job_of(s[0].session)}}
    longest_job = max(
        jobs.values(), key=lambda s: sum(len(stream.rows) for stream in s), default=[]
    )
    if not any(len(stream.rows) for stream in longest_job):
        which = "" if job is None else f" of job {job!r}"
        raise ConfigError(f"no batch{which} is recorded: there is nothing to draw")
    longest_job.sort(key=lambda stream: stream.session["rank"])
    by_rank = groupby(longest_job, key=lambda stream: stream.session["rank"])
    best = [max(its, key=lambda stream: len(stream.rows)) for _, its in by_rank]
    return [stream for stream in best if len(stream.rows)]


def _waited(stream: TracedStream) -> float:
    column = columns(stream.rows)
    return float((column["taken"] - column["wait_began"]).sum())


def of_steps(stream: TracedStream) -> RankSteps:
    """Return the last steps of a rank, each from the moment at which the one before began."""
    column = columns(stream.rows[-STEPS - 1 :])
    taken, last = column["taken"], slice(1, None)
    workers = max(len({*column["worker"].tolist()} - {-1}), int(stream.session["workers"]), 1)
    between = zip(STAGES, _MOMENTS, _MOMENTS[1:], strict=False)
    return RankSteps(
        rank=stream.session["rank"],
        steps=column["step"][last],
        stages={
            stage: (column[until] - column[since])[last].clip(0) / 1e9 / workers
            for stage, since, until in between
        },
        step_s=np.diff(taken) / 1e9,
        wait_s=(taken - column["wait_began"])[last] / 1e9,
    )


def of_memory(
    recording: Recording, ranks: Sequence[TracedStream], windows: Sequence[RankWindow]
) -> Slowdown | str:
    """Return how many times as long steps take as with all in memory, by what is in memory."""
    if not _datasets(recording, ranks):
        return "creel does not see what this dataset reads (no objects)"
    steps = np.array([
        _step_s([with_memory(rank, share) for rank in windows], recording.cores)
        for share in _SHARES
    ])  # fmt: skip
    return Slowdown(_SHARES, steps / steps[-1])


def of_workers(
    recording: Recording, ranks: Sequence[TracedStream], windows: Sequence[RankWindow]
) -> Throughput | str:
    """Return the samples per second of the job for numbers of workers of each rank."""
    each = [stream.session["samples"] / max(stream.session["batches"], 1) for stream in ranks]
    samples = sum(each)
    if not samples:
        return "the samples of its batches were not counted"
    present = float(np.mean([rank_window.workers for rank_window in windows]))
    took = max(rank_window.seconds / rank_window.batches for rank_window in windows)
    fed = max(min(rank_window.train_s for rank_window in windows), 1e-9)
    enough = min(math.ceil(present * took / fed), _MOST_WORKERS)
    most = max(math.ceil(2 * recording.cores / len(ranks)), 2 * math.ceil(present), enough, 2)
    workers = np.arange(1, most + 1)
    steps = [_step_s([with_workers(w, int(n)) for w in windows], recording.cores) for n in workers]
    return Throughput(workers, samples / np.array(steps), present, samples / took, samples / fed)


def _step_s(windows: Sequence[RankWindow], cores: float) -> float:
    """Return the seconds of a step of the job."""
    return max(forecast(windows, cores)[0].step_s, 1e-9)


def of_reuse(recording: Recording, ranks: Sequence[TracedStream]) -> Reuse | str:
    """Return after how many steps objects are read again, by the plan of any rank that has one."""
    first = next((stream for stream in ranks if stream.reuse["counts"]), None)
    if first is None:
        if not _datasets(recording, ranks):
            return "creel does not see what this dataset reads (no objects)"
        if all(2 * stream.session["direct_reads"] > stream.session["samples"] for stream in ranks):
            return "its files are read directly, without a plan (they lie in the page cache)"
        return "no epoch after the last one that was read is known: the plan reads nothing again"
    counts, edges = (np.array(first.reuse[name], np.int64) for name in ("counts", "edges"))
    each = first.session["samples"] / max(first.session["batches"], 1)
    world = max(int(first.session["world"]), 1)
    epoch = first.reuse["objects"] / (each * world) if each else math.nan
    return Reuse(counts, edges, epoch)


def _datasets(recording: Recording, ranks: Sequence[TracedStream]) -> list[Values]:
    """Return what the daemon knows of the datasets that have objects."""
    held: Values = recording.stats["core"]["datasets"]
    return [
        held[stream.session["dataset"]] for stream in ranks if stream.session["dataset"] in held
    ]
