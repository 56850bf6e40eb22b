"""EpochRun: one iterator's current epoch: its order, its position, and who is told of it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import BatchSampler

from creel.loader.client.claim import DIRECT
from creel.loader.data.reading.bad_samples import BadSample
from creel.loader.line.batches.iterator_session import IteratorSession
from creel.loader.line.observers.last_indices import PulledIndices
from creel.loader.line.observers.overdue import Awaited, Overdue
from creel.loader.line.observers.statistics import Statistics
from creel.loader.line.observers.watch import watch
from creel.loader.line.order.epoch_order import (
    PROGRESS_VERSION,
    EpochOrder,
    IteratorStart,
    Progress,
    StateBefore,
    index_sampler,
    may_repeat,
    not_begun,
)
from creel.loader.line.order.samplers import take_over
from creel.loader.line.steps.batch_stream import samples_in, try_predict
from creel.loader.line.steps.mapped_pages import MappedPages
from creel.loader.making.task import Task
from creel.loader.making.workers.kernel_waits import this_thread
from creel.loader.torch_private import BaseDataLoaderIter

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from creel.loader.line.batches.state import LoaderState
    from creel.loader.making.places.made import Made

#: Minimum seconds between updates of the daemon's statistics; `creel top` reads once a second.
#: Epochs that need the daemon for these alone look for it only after that time in all.
COUNT_S = 0.25


class EpochRun:
    """One iterator's current epoch.

    Attributes:
        serving: which session serves it.
        pulled: what the sampler yielded for batches not yet returned.
        statistics: what the daemon is told.
        overdue: the present wait for a batch.
        pages: what coming batches map into memory.
        order: None before the first epoch.
        skipped: batches of the epoch that are not read, since it is resumed.
        delivered: batches returned, with those skipped.
        finished: whether all were.
        paced: whether items of the order arrive while training runs.
    """

    def __init__(self, state: LoaderState, loader: DataLoader[Any]) -> None:
        self._state = state
        self.serving = IteratorSession(state, loader)
        self.pulled = PulledIndices(loader, state.tolerance)
        by_batch = self.pulled.by_batch  # in place of a reference to this
        reader = this_thread(lambda: min(by_batch, default=None))
        self.overdue = Overdue(self._awaited, state.config.loader.hung_s)
        self.statistics = Statistics(state, self.overdue, reader)
        self.pages = MappedPages(state.config.window)
        self.order: EpochOrder | None = None
        self.epoch = self.skipped = self.delivered = 0  # `epoch` as in `Position`
        self.finished = self.paced = False
        self._slices = False  # whether the order yields arrays in place of lists of ints
        self._seeds = state.args.seeds()  # None: samples have torch's

    def begin(self, loader: DataLoader[Any], it: BaseDataLoaderIter, before: StateBefore) -> None:
        """Begin an epoch, after torch's iterator has made its draws, and replace its order."""
        state, serving = self._state, self.serving
        serving.epoch_begins(loader)
        state.observers.bad_samples.report(serving.stream)
        position = state.position
        resume, position.resume = position.resume, None
        last = position.run
        whole = resume is None and last is not None and last.finished
        state.observers.advice.epoch_begins(index_sampler(loader), after_a_whole_one=whole)
        begun = IteratorStart(it._sampler_iter, int(it._base_seed), before)  # noqa: SLF001
        # A proxy: the loader's own iterator keeps the order, which must not keep the loader alive.
        held: Any = weakref.proxy(loader)
        given = None if resume is None else resume["order"]
        exchange = state.groups.exchange(loader)
        order = take_over(held, begun, previous=position.order, state=given, exchange=exchange)
        state.own_files_may_be_awaited(loader, known=order.known)
        self.skipped = 0 if resume is None else resume["batches"]
        position.epoch = position.epoch + 1 if resume is None else resume["epoch"]
        position.order, position.run = order, self
        self.order, self.epoch, self.paced = order, position.epoch, order.paced
        self._begin_seeds(loader, order.base_seed, resume)
        self.statistics.count(serving.stream, self.delivered)
        self.delivered, self.finished = self.skipped, False
        self.statistics.epoch_begins(self.skipped)
        self.pulled.by_batch.clear()
        self.pulled.batched = loader._auto_collation  # noqa: SLF001  torch's
        if serving.reads is not None:
            start = time.monotonic_ns()
            try_predict(order, 0)  # may run a copy of the sampler; the order caches the result
            state.observers.meter["stall_sampler_ns"] += time.monotonic_ns() - start
            serving.reads.begin(order, self.skipped)
        elif serving.stream is not None:
            serving.stream.skip()
        if self.skipped:
            order.skip(self.skipped)
        self.overdue.over = False
        watch.add(self.overdue)
        if state.args.creel is not False:
            self.pages.begin(loader.dataset, order, None if last is None else last.pages)
        self._slices = order.known and type(index_sampler(loader)) is BatchSampler
        it._sampler_iter, it._base_seed = order, order.base_seed  # noqa: SLF001

    def _begin_seeds(
        self, loader: DataLoader[Any], base_seed: int, resume: Progress | None
    ) -> None:
        """Set the seed of this epoch's samples: torch's base seed, or one after the last epoch's.

        torch draws no new base seed for persistent workers.
        """
        if self._seeds is None:
            return
        position, before = self._state.position, None
        if resume is not None:
            base_seed = resume.get("seed", base_seed)
        elif loader.persistent_workers:
            before = self._seeds.seed if position.finished_seed is None else position.finished_seed
        position.finished_seed = None
        repeats = may_repeat(loader._index_sampler)  # noqa: SLF001  torch's
        self._seeds.begin(base_seed, repeats=repeats, before=before)

    def arrived(self) -> bool:
        """Whether the next batch can be asked for without waiting for data (see `PacedOrder`)."""
        return self.order is None or self.order.arrived()

    def task(self, i: int, index: object, tag: int = 0) -> Task:
        """Return the i-th batch after those skipped as it is to be made, with the session's step.

        tag: of the iterator's epoch.
        """
        self.pulled.by_batch[i] = index
        batch, serving = self.skipped + i, self.serving
        if serving.search is not None:
            serving.reattach(self.order, batch)
        if self.pages.follows:
            self.pages.claimed(batch, index)
        claim = DIRECT if serving.reads is None else serving.reads.claim(batch, index)
        if claim.step < 0 and self._state.args.creel is not False:
            samples = samples_in(index) if self.pulled.batched else 1
            self.statistics.unclaimed[batch] = samples
        as_list = self._slices and isinstance(index, np.ndarray)
        seeds = None if self._seeds is None else self._seeds.of(batch)
        return Task(tag, i, index, claim, as_list, seeds)

    def note_bad(self, samples: Sequence[BadSample]) -> None:
        """Report bad samples in the log and to the daemon (`creel stats`)."""
        if samples:
            self._state.observers.bad_samples.add(
                samples, self.serving.binding, self.serving.stream
            )

    def deliver(self, i: int, ready_batch: Made) -> None:
        """Tell of a batch about to be returned, before the i-th after those skipped.

        A batch that raised counts as read if training goes on, and is read again if training stops
        there.
        """
        meter, stream = self._state.observers.meter, self.serving.stream
        meter["batches"] += 1
        pulled = self.pulled
        index = pulled.by_batch.pop(ready_batch.batch, None)
        pulled.returned.index = pulled.good(index) if self._state.tolerance.known else index
        self.delivered = self.skipped + i
        if self.pages.follows:
            self.pages.done(self.delivered)
        if self.paced and self.order is not None:
            self.order.delivered(self.delivered)
        if not self.serving.published_ahead:
            self.serving.publish_ahead(self.order)
        now_ns = time.monotonic_ns()
        if stream is not None:
            meter.record(stream.session.words.log, ready_batch.times, ready_batch.worker, now_ns)
        if self.serving.recordings.supposed:
            self.serving.follow_lists(now_ns)
        since = now_ns / 1e9 - COUNT_S
        due = since >= self.statistics.counted_at
        if due:
            self.statistics.count(stream, self.delivered)
            watch.add(self.overdue)  # a fork may have ended its thread
        if due or stream is None or stream.session.gone:
            self.serving.delivered(since, counted=due)

    def lost(self, i: int) -> None:
        """Forget the i-th batch after those skipped: it raised, and will not be delivered."""
        self.pulled.by_batch.pop(i, None)

    def _awaited(self) -> Awaited:
        """Return what the iterator waits with; called by the thread that looks at long waits."""
        batch, serving = min(self.pulled.by_batch, default=None), self.serving
        stream, reads = serving.stream, serving.reads
        serving.find_counting()
        absent = "" if reads is None or batch is None else reads.absent(self.skipped + batch)
        return Awaited(stream, batch, absent, self.statistics.readers)

    def leave(self, *, deleted: bool = False) -> None:
        """End the iterator and give back its session; `deleted`: also end its sampler."""
        self.pages.stop()
        self.overdue.over = True
        stream = self.serving.leave(deleted=deleted)
        self.statistics.ends(stream, self.delivered)
        if stream is not None:
            stream.leave()
            self._state.leave_stream(stream)
        if deleted and self.order is not None:
            self.order.close()

    def progress(self, delivered: int | None) -> Progress:
        """Return the position after `delivered` batches of the epoch (None: all returned)."""
        order = self.order
        if order is None:
            return not_begun()
        over = self.finished and delivered is None and not order.paced
        batches = self.delivered if delivered is None else delivered
        progress = Progress(
            version=PROGRESS_VERSION,
            epoch=self.epoch,
            batches=batches,
            finished=over,
            order=order.state_after(batches, over=over),
        )
        if self._seeds is not None and self._seeds.seed is not None:
            progress["seed"] = self._seeds.seed
        return progress
