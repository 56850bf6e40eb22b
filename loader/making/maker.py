"""BatchMaker: makes the batches of a loader, as torch's fetcher does, wherever it runs.

One maker serves one thread: the trainer's, one that copies rows, or a worker's. A batch is built
from rows of the arena if that needs no user code, else sample by sample, from the arena or
directly. What options ask for besides is done by stages around the dataset and its collation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from creel.loader.data.decoded import decode_benefit
from creel.loader.data.reading.lease import Lease
from creel.loader.making.arena_rows import ArenaRows
from creel.loader.making.batch_times import COLLATING, READING, WAITING, BatchTimes, busy
from creel.loader.making.stage import Stage
from creel.loader.making.task import WHOLE, Task
from creel.loader.making.transport.batch_message import Collate
from creel.loader.torch_private import DatasetKind

if TYPE_CHECKING:
    from creel.loader.client.session import Session
    from creel.loader.data.binding.bind import Binding
    from creel.loader.data.datasets.base import BatchBuilder


class StageClock:
    """When the stages of the batch that is being made began (monotonic ns).

    An object of its own: a maker whose collation referred to the maker would not be freed at once.
    """

    shows = False  # whether `enter` shows the stage to others

    def __init__(self) -> None:
        self.began = self.ready = self.collating = 0

    def enter(self, stage: int) -> int:  # noqa: ARG002  a worker shows its stage
        """Note which stage begins; return the time."""
        return time.monotonic_ns()


class Waits:
    """How long a maker waits for the daemon: this one for a fixed time, and it learns nothing."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s

    def wait(self, session: Session, step: int, ids: NDArray[np.int32]) -> bool:  # noqa: ARG002
        """Wait for a step; True if its objects are pinned, else they are read directly."""
        return session.wait(step, self._wait_s)

    def saw(self, lease: Lease) -> None:
        """Learn from a batch that was read under this lease."""


class BatchMaker:
    """Makes batches of one dataset for one thread.

    Attributes:
        clock: when the stages of the last batch began.
        counts: what was counted while it was made, by the names of `creel.counters`.
        binding: of the dataset; None: nothing is read through creel.
        fetcher: torch's, around whose dataset and collation the stages are.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Collate,
        *,
        torch_flags: tuple[bool, bool],
        stages: Sequence[Stage],
        binding: Binding | None,
        plain: bool,
        live: bool,
        memory: Callable[[int], torch.Tensor],
        waits: Waits,
        clock: StageClock | None = None,
        into: Callable[[Collate], Collate] = lambda collate: collate,
    ) -> None:
        """Make a maker.

        Args:
            dataset: the person's, or a copy of it.
            collate: the person's, or what does the same.
            torch_flags: whether batches are collated, and whether the last one may be short.
            stages: what is done around these, the first one nearest to them.
            plain: a batch is default_collate of its samples.
            live: the dataset is the person's own, who may change it between two batches.
            memory: returns (nbytes,) uint8 to build a batch in.
            waits: how long to wait for the daemon.
            into: returns what collates into the maker's own memory.
        """
        self.clock = clock or StageClock()
        self.counts: dict[str, int] = {}
        self.binding = binding
        self.stages = stages
        self._torch_flags, self._into = torch_flags, into
        self._live, self._waits = live, waits
        self._rows = ArenaRows(stages, memory, plain=plain, live=live)
        #: Of the last batch: whether the daemon was lost meanwhile, and the ns of direct reads.
        self._lost, self._direct_ns = False, 0
        self._as_list = False  # whether its index is an array that stands for a list
        #: Builds whole batches from files in the page cache; None: nothing does.
        self.builder: BatchBuilder | None = None
        self.stage(dataset, collate)

    def stage(self, dataset: Any, collate: Collate) -> None:
        """Put the stages around a dataset and its collation."""
        own, (batched, drop_last) = dataset, self._torch_flags
        for stage in self.stages:
            dataset, collate = stage.inside(dataset, collate)
        collate = _timed(self._into(collate), self.clock)
        for stage in self.stages:
            dataset, collate = stage.outside(own, dataset, collate, batched=batched)
        self.fetcher = DatasetKind.create_fetcher(  # type: ignore[no-untyped-call]  # torch's
            DatasetKind.Map, dataset, batched, collate, drop_last
        )
        self.inspect()

    def inspect(self) -> None:
        """Note how batches are made from bytes, if the dataset as it is now allows that."""
        self._rows.inspect(self.binding)

    def bind(self, binding: Binding | None, waits: Waits | None = None) -> None:
        """Read through another binding of the same dataset from now on; None: directly."""
        self.binding, self._waits = binding, waits or self._waits
        self.inspect()

    def make(self, task: Task, session: Session | None) -> Any:
        """Return a batch, or a part of one. Raises what the person's code raises.

        Args:
            session: of the task's claim; None: there is none.
        """
        clock = self.clock
        clock.began = clock.ready = time.monotonic_ns()
        if clock.shows:
            clock.enter(READING)
        clock.collating = 0  # until collation begins: reading may fail before
        self._lost, self._direct_ns, self.counts = False, 0, {}
        self._as_list = task.as_list
        if task.seeds is not None:
            for stage in self.stages:
                stage.begin(task)
        if self.builder is not None and (batch := self.builder.batch(task.index)) is not None:
            self.clock.ready = self.clock.collating = self.clock.enter(COLLATING)
            return batch
        binding, index, step = self.binding, task.index, task.claim.step
        if binding is None:
            return self.fetcher.fetch(index.tolist() if task.as_list else index)
        if session is None or step < 0:
            return self.fetch(index, Lease())
        if self._live and not binding.is_current(np.atleast_1d(np.asarray(index))):
            return self.fetch(index, Lease())
        return self._read_step(binding, session, task)

    def _read_step(self, binding: Binding, session: Session, task: Task) -> Any:
        """Return a batch as rows of the arena, or read it sample by sample, there or directly."""
        clock, index, (step, ids) = self.clock, task.index, task.claim
        gatherer = None
        if task.part == WHOLE:
            arena = self._rows
            if arena.fixed and arena.session is session:
                gatherer = arena.gatherer
            else:
                gatherer = arena.gatherer_of(binding, session, self.fetcher.collate_fn)
        stamp = session.hold(step)
        if stamp < 0 and self._wait_for(session, step, ids):
            stamp = session.hold(step)
        if stamp >= 0 and gatherer is not None:
            if not gatherer.per_sample:  # copying rows counts as collation if they are the batch
                clock.collating = time.monotonic_ns()
                if clock.shows:
                    clock.enter(COLLATING)
            indices = np.asarray(index, np.int64)
            rows = gatherer.rows(ids, indices)
            held = session.held(step, stamp)
            if held and rows is not None:
                if gatherer.per_sample:
                    return gatherer.decoded(rows, indices)
                return gatherer.gather.collate(rows, indices, gatherer.memory)
            clock.enter(READING)  # sample by sample
            clock.collating = 0
            stamp = stamp if held else -1
        lease = Lease() if stamp < 0 else binding.reading(session, step, ids, stamp)
        return self.fetch(index, lease)

    def counted(
        self, task: Task, session: Session | None
    ) -> tuple[Any, BatchTimes, dict[str, int]]:
        """Return a batch, its times, and what a worker would have counted."""
        cpu_ns = time.thread_time_ns()
        data = self.make(task, session)
        times = self.times(time.monotonic_ns())
        spent = {"cpu_ns": time.thread_time_ns() - cpu_ns}
        return data, times, {**self.counts, **busy(times), **spent}

    def times(self, packed: int) -> BatchTimes:
        """Return the times of the last batch, or of one that raised; `packed`: when it was done."""
        clock, collating = self.clock, self.clock.collating or packed
        return BatchTimes(
            clock.began, clock.ready, collating, packed, self._direct_ns, int(self._lost)
        )

    def _wait_for(self, session: Session, step: int, ids: NDArray[np.int32]) -> bool:
        """Wait until a step's objects are pinned; on False the location table may be outdated."""
        self.clock.enter(WAITING)
        ready = self._waits.wait(session, step, ids)
        self._lost = not ready and not session.alive
        self.clock.ready = self.clock.enter(READING)
        return ready

    def fetch(self, index: Any, lease: Lease) -> Any:
        """Fetch as torch does, under the lease, and note what it counted."""
        try:
            with lease:
                return self.fetcher.fetch(index.tolist() if self._as_list else index)
        finally:
            self._direct_ns = lease.direct_ns
            self.counts = {
                "direct_reads": lease.direct_reads,
                "direct_nbytes": lease.direct_nbytes,
                "decoded_hits": lease.decoded_hits,
                "decoded_misses": lease.decoded_misses,
                **decode_benefit.counts(lease),
            }
            self._waits.saw(lease)


def _timed(collate: Collate, clock: StageClock) -> Collate:
    def timed(samples: Sequence[object]) -> object:
        clock.collating = clock.enter(COLLATING)
        return collate(samples)

    return timed
