"""EpochRun: one iterator's current epoch: its order, its session with the daemon, its position."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import BatchSampler

from creel.cache.storage.stores.retry import public
from creel.loader.client.claim import DIRECT, Claim
from creel.loader.client.cluster.ranks import rank_and_world
from creel.loader.client.connections import start_daemon_early
from creel.loader.data.binding.tree import wrapped_in
from creel.loader.data.binding.wrapped import Wrapped, recorded
from creel.loader.data.reading.bad_samples import BadSample, Key, printable
from creel.loader.line.batches.reattach import StreamSearch
from creel.loader.line.observers.last_indices import Returned
from creel.loader.line.observers.overdue import Awaited, Overdue, watch
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
from creel.loader.line.steps.batch_stream import BatchStream, Ticket, samples_in, try_predict
from creel.loader.line.steps.mapped_pages import MappedPages
from creel.loader.making.seeding.by_sample import BatchSeeds, next_epoch
from creel.loader.making.stages import BatchTimes, recorded_moments
from creel.loader.making.workers.kernel_waits import Reader, this_thread
from creel.loader.torch_private import BaseDataLoaderIter

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from creel.loader.line.batches.state import LoaderState

_log = logging.getLogger("creel.loader")

#: Minimum seconds between updates of the daemon's statistics; `creel top` reads once a second.
#: Epochs that need the daemon for these alone look for it only after that time in all.
COUNT_S = 0.25


class EpochRun:
    """One iterator's current epoch: its order, its session and its position."""

    def __init__(self, loader_state: LoaderState, loader: DataLoader[Any]) -> None:
        self._loader_state = loader_state
        binding = loader_state.binding(loader)
        #: Whether this epoch's files lie in the page cache; if so, nothing is published.
        self._page_cached = binding is not None and loader_state.page_cached(loader, binding, None)
        #: Whether `begin` checks that again: in later epochs, and if a session must tell who else
        #: reads.
        self._asks_again = rank_and_world()[1] > 1
        self.stream = loader_state.take_stream(binding, wait=not self._page_cached)
        #: The binding that the epoch's readers use; None: they read without creel.
        self.binding = None if self.stream is None and not self._page_cached else binding
        #: How this process builds batches from files, and the dataset that does; None: it does not.
        self.direct = None
        if binding is not None and self._page_cached:
            self.direct = loader_state.direct_in(loader, binding)
        self.skipped = 0
        self.delivered = 0
        self._counted = 0  # delivered batches that the daemon's statistics include
        self._counted_at = 0.0
        self._unknown: list[Wrapped] = []  # recorded wrapped datasets; no daemon needed yet
        self._returned, self._tolerance = Returned.of(loader), loader_state.tolerance
        self._dataset: Any = loader.dataset
        self._pulled: dict[int, Any] = {}  # what the sampler yielded for batches not yet returned
        self._unpublished: dict[int, int] = {}  # batch without a step -> its number of samples
        self._many = True  # whether a batch is made of several samples
        self._seeding = loader_state.args.seeding is not None
        self._seed: int | None = None  # of the epoch's samples; None before the first epoch
        self._repeats = False  # whether the epoch may read a sample twice
        self._counts = loader_state.args.creel is not False  # whether the daemon is told of batches
        self.finished = False
        self.slices = False  # whether the order yields arrays in place of lists of ints
        self.order: EpochOrder | None = None
        self.paced = False  # whether items of the order arrive while training runs
        self.epoch = 0
        self._published_ahead = False
        self._search: StreamSearch | None = None  # set after the daemon has ended in mid-epoch
        self._uncounted_from = 0.0  # when an epoch began that has no session for its statistics
        self._workers = 0
        self._pages = MappedPages(loader_state.config.window)
        self._new_counts: Callable[[], Mapping[str, int]] | None = None
        pulled = self._pulled  # in place of a reference to this
        self._readers: Sequence[Reader] = (this_thread(lambda: min(pulled, default=None)),)
        self.overdue = Overdue(self._awaited)
        self._set_served()

    def _set_served(self) -> None:
        """Note which session serves this epoch's reads, after a change of `stream` or its use."""
        #: None: reads bypass the daemon.
        passes_by = self._page_cached or self.binding is None
        self._served: BatchStream | None = None if passes_by else self.stream
        #: What workers need to use that session.
        self.ticket: Ticket | None = None if self._served is None else self._served.ticket

    def bind_late(self, loader: DataLoader[Any]) -> str | None:
        """Open a session between two epochs, if no objects were known before.

        Returns the `digest` of the binding that persistent workers must now find themselves, else
        None.
        """
        loader_state = self._loader_state
        binding = loader_state.binding(loader) if self.binding is None else None
        # Files in the page cache stay there. Another process may ask for a sample's objects only if
        # no user code runs for that.
        if (
            binding is None
            or not binding.thread_safe
            or loader_state.page_cached(loader, binding, None)
        ):
            return None
        if self.stream is not None:  # it only counts
            self.stream.close()
        self.stream = loader_state.take_stream(binding)
        self.binding = None if self.stream is None else binding
        self._set_served()
        try:
            return None if self.binding is None else binding.digest()
        except Exception:  # noqa: BLE001  a user's `__len__` may raise anything
            return None

    def begin(self, loader: DataLoader[Any], it: BaseDataLoaderIter, before: StateBefore) -> None:
        """Begin an epoch, after torch's iterator has made its draws, and replace its order."""
        loader_state = self._loader_state
        self._attach(loader)
        self._set_served()
        self._report_bad()
        learns = self.binding is None and loader_state.args.creel is not False
        self._unknown = wrapped_in(loader.dataset) if learns else []
        resume, loader_state.resume = loader_state.resume, None
        last = loader_state.run
        whole = resume is None and last is not None and last.finished
        loader_state.advice.epoch_begins(index_sampler(loader), after_a_whole_one=whole)
        begun = IteratorStart(it._sampler_iter, int(it._base_seed), before)  # noqa: SLF001
        # A proxy: the loader's own iterator keeps the order, which must not keep the loader alive.
        held: Any = weakref.proxy(loader)
        given = None if resume is None else resume["order"]
        order = take_over(
            held,
            begun,
            previous=loader_state.order,
            state=given,
            exchange=loader_state.exchange(loader),
        )
        loader_state.own_files_may_be_awaited(loader, known=order.known)
        self.skipped = 0 if resume is None else resume["batches"]
        loader_state.epoch = loader_state.epoch + 1 if resume is None else resume["epoch"]
        loader_state.order, loader_state.run = order, self
        self.order, self.epoch, self.paced = order, loader_state.epoch, order.paced
        self._begin_seeds(loader, resume)
        self._count()
        self.delivered, self.finished, self._published_ahead = self.skipped, False, False
        self._counted = self.skipped
        self._unpublished.clear()
        self._pulled.clear()
        self._many = loader._auto_collation  # noqa: SLF001  torch's
        if self._served is not None:
            start = time.monotonic_ns()
            try_predict(order, 0)  # may run a copy of the sampler; the order caches the result
            loader_state.meter["stall_sampler_ns"] += time.monotonic_ns() - start
            self._served.begin(order, self.skipped)
        elif self.stream is not None:
            self.stream.skip()
        if self.skipped:
            order.skip(self.skipped)
        watch.add(self.overdue)
        if self._counts:
            self._pages.begin(loader.dataset, order)
        self.slices = order.known and type(index_sampler(loader)) is BatchSampler
        it._sampler_iter, it._base_seed = order, order.base_seed  # noqa: SLF001

    def _begin_seeds(self, loader: DataLoader[Any], resume: Progress | None) -> None:
        """Set the seed of this epoch's samples: torch's base seed, or one after the last epoch's.

        torch draws no new base seed for persistent workers.
        """
        if not self._seeding or self.order is None:
            return
        state, seed = self._loader_state, self.order.base_seed
        before = self._seed if state.finished_seed is None else state.finished_seed
        state.finished_seed = None
        if resume is not None:
            seed = resume.get("seed", seed)
        elif before is not None and loader.persistent_workers:
            seed = next_epoch(before)
        self._seed, self._repeats = seed, may_repeat(loader._index_sampler)  # noqa: SLF001  torch's

    def seeds(self, i: int) -> BatchSeeds | None:
        """Return the seeds of the i-th batch after those skipped; None: workers have torch's."""
        if self._seed is None:
            return None
        return BatchSeeds(self._seed, self.skipped + i, self._repeats)

    def arrived(self) -> bool:
        """Whether the next batch can be asked for without waiting for data (see `PacedOrder`)."""
        return self.order is None or self.order.arrived()

    def await_daemon(self) -> None:
        """Wait a moment for another daemon, if this node's has ended and was one of a cluster.

        What would be read directly until then lies on other nodes, and in step with this rank they
        all would wait for the source.
        """
        served = self._served
        if self._search is not None and served is not None and served.session.client.cluster:
            self._loader_state.meter["stall_daemon_ns"] += self._search.wait()

    def claim(self, i: int, index: object) -> Claim:
        """Claim the session's step for the i-th batch after those skipped, about to be read."""
        self._pulled[i] = index
        if self._search is not None:
            self._reattach(self.skipped + i)
        batch, served = self.skipped + i, self._served
        self._pages.claimed(batch, index)
        claim = DIRECT if served is None else served.claim(batch, index)
        if claim.step < 0 and self._counts:
            self._unpublished[batch] = samples_in(index) if self._many else 1
        return claim

    def _attach(self, loader: DataLoader[Any]) -> None:
        """Find a session for this epoch; if it serves only statistics, do not wait for a daemon."""
        loader_state, binding = self._loader_state, self.binding
        self._end_search()
        if self.stream is not None and not self.stream.alive:
            self.stream.close()
            self.stream = None
        if binding is not None and self._asks_again:
            self._page_cached = loader_state.page_cached(loader, binding, self.stream)
        self._asks_again = True
        if self.stream is not None:
            return
        if binding is None:
            if loader_state.args.creel is not False:
                self._uncounted_from = time.monotonic() - loader_state.uncounted_s
            return
        stream = loader_state.take_stream(loader_state.binding(loader), wait=not self._page_cached)
        if stream is not None and stream.binding is binding:
            self.stream = stream
        elif stream is not None:  # persistent workers have the old dataset
            loader_state.leave_stream(stream)
        elif self._page_cached:
            self._uncounted_from = time.monotonic() - loader_state.uncounted_s

    def _reattach(self, batch: int) -> None:
        """Let another daemon serve from this batch on, once one is found.

        Earlier batches that are still being read are read directly: their steps belong to the lost
        session.
        """
        search = self._search
        found = None if search is None else search.take()
        if found is None or self.order is None:
            return
        self._search = None
        if self.stream is not None:
            self.stream.close()
        self.stream, self._published_ahead = found, False
        self._set_served()
        self._report_bad()
        if self._served is not None:
            self._served.begin(self.order, batch)

    def done(self, i: int) -> None:
        """Record that all batches below the i-th after those skipped have arrived."""
        stream = self._served
        self._pages.done(self.skipped + i)
        if stream is not None:
            stream.done(self.skipped + i)
            if not self._published_ahead and self.order is not None and not stream.joining:
                self._published_ahead = True
                start = time.monotonic_ns()
                stream.publish_upcoming(self.order)
                self._loader_state.meter["stall_sampler_ns"] += time.monotonic_ns() - start

    def note_bad(self, samples: Sequence[BadSample]) -> None:
        """Report bad samples in the log and to the daemon (`creel stats`)."""
        if not samples:
            return
        paths = [self._address(one.index) or printable(public(one.path)) for one in samples]
        rows = [(one.index, at, one.reason) for one, at in zip(samples, paths, strict=True)]
        done = "left out" if self._loader_state.tolerance.on_error == "skip" else "replaced"
        for index, address, reason in rows:
            _log.warning("sample %s %sis %s: %s", index, address and f"({address}) ", done, reason)
        # The daemon lists samples by number.
        self._loader_state.bad_unreported += [
            (index, address, reason)
            if isinstance(index, int)
            else (-1, address, f"{index}: {reason}")
            for index, address, reason in rows
        ]
        self._report_bad()

    def _report_bad(self) -> None:
        """Tell the daemon of bad samples: those below `creel.wrap` are found before a session."""
        rows, stream = self._loader_state.bad_unreported, self.stream
        if rows and stream is not None and stream.alive:
            self._loader_state.bad_unreported = []
            stream.report_bad(rows)

    def _address(self, index: Key) -> str:
        """Return the address of a sample's first object; "" if unknown."""
        try:
            assert self.binding is not None  # noqa: S101
            found = self.binding.objects(np.array([index]))[0]
            address, _, _ = self.binding.manifest.location(int(found[0]))
        except Exception:  # noqa: BLE001  user code may run here
            return ""
        return printable(public(address))

    def note_workers(
        self,
        workers: int,
        counts: Callable[[], Mapping[str, int]] | None = None,
        readers: Sequence[Reader] = (),
    ) -> None:
        """Note how many workers make the batches, what returns their new counts, who they are."""
        self._workers, self._new_counts, self._readers = workers, counts, readers

    def deliver(
        self, i: int, times: BatchTimes, worker: int = -1, batch: int | None = None
    ) -> None:
        """Count and record a batch about to be returned, before the i-th after those skipped.

        A batch that raised counts as read if training goes on, and is read again if training stops
        there.

        Args:
            times: of the batch.
            worker: who made it, see `BatchRow`; -1: the trainer.
            batch: its number after those skipped, if batches are not returned in order.
        """
        self._loader_state.meter["batches"] += 1
        index = self._pulled.pop(i - 1 if batch is None else batch, None)
        if self._tolerance.known:
            index = self._tolerance.delivered(index, self._dataset, many=self._many)
        self._returned.index = index
        self.delivered = self.skipped + i
        if self.paced and self.order is not None:
            self.order.delivered(self.delivered)
        now_ns = time.monotonic_ns()
        if self.stream is not None:
            self._record(times, worker, now_ns)
        if any(map(recorded, self._unknown)):
            self._unknown = []
            start_daemon_early(self._loader_state.config)
        now = now_ns / 1e9
        if 0 < self._uncounted_from <= now - COUNT_S:
            self._uncounted_from = self._loader_state.uncounted_s = 0.0
            self._search = self._loader_state.search(self.binding)
        stream, due = self.stream, now - self._counted_at >= COUNT_S
        if due:
            self._count()
            watch.add(self.overdue)  # a fork may have ended its thread
        if self._search is not None or stream is None or not (due or stream.session.gone):
            return
        if not stream.session.client.alive:
            # The daemon has ended. A daemon that is only stopped may go on.
            self._search = self._loader_state.search(self.binding)

    def _awaited(self) -> Awaited:
        """Return what the iterator waits with; called by the thread that looks at long waits."""
        batch = min(self._pulled, default=None)
        stream, served = self.stream, self._served
        if stream is None and self.binding is None:
            self._find_counting()
        absent = "" if served is None or batch is None else served.absent(self.skipped + batch)
        return Awaited(stream, batch, absent, self._readers)

    def _find_counting(self) -> None:
        """Find a session for statistics, as `deliver` does, while the first batch is awaited."""
        search = self._search
        if search is None and self._uncounted_from:
            self._uncounted_from = self._loader_state.uncounted_s = 0.0
            self._search = self._loader_state.search(None)
        elif search is not None and (stream := search.take()) is not None:
            self.stream, self._search = stream, None

    def lost(self, i: int) -> None:
        """Forget the i-th batch after those skipped: it raised, and will not be delivered."""
        self._pulled.pop(i, None)

    def _record(self, times: BatchTimes, worker: int, now_ns: int) -> None:
        """Write a batch into the session's flight recorder."""
        assert self.stream is not None  # noqa: S101  see `deliver`
        log = self.stream.session.words.log
        source, decode, collate, daemon, sampler = self._loader_state.meter.new_stalls()
        if worker < 0:  # all that the trainer did for it counts as waiting, without gaps
            collating = now_ns - collate
            ready = collating - decode
            began = ready - source - daemon
            log.add(began, ready, collating, now_ns, began - sampler, now_ns, worker)
        else:
            waited = source + decode + collate + daemon + sampler
            log.add(*recorded_moments(times), now_ns - waited, now_ns, worker)

    def _count(self) -> None:
        """Add the batches since the last update to the daemon's statistics.

        The daemon learns nothing while it is not alive: if it is only stopped, a later update
        counts them.
        """
        self._counted_at = time.monotonic()
        state = self._loader_state
        if self._new_counts is not None:
            state.meter.add(self._new_counts())
        state.note_kept()
        batches = self.delivered - self.skipped
        state.own_files.delivered(batches, state.meter.waited_s, self._readers)
        if self.stream is not None and not self.stream.alive:
            return
        first, self._counted = self._counted, self.delivered
        delivered = self._unpublished.keys() & range(first, self._counted)
        sizes = [self._unpublished.pop(i) for i in delivered]
        state.uncounted += np.array([len(sizes), sum(sizes)])
        if self.stream is None:
            return
        self.stream.report_own_file(state.own_files.path, state.own_files.remedy)
        more = self.overdue.settle(state.meter.unreported())
        if state.uncounted.any():
            more |= dict(zip(("batches", "samples"), state.uncounted.tolist(), strict=True))
            state.uncounted[:] = 0
        self.stream.count(first, self._counted, more, self._workers)

    def leave(self, *, deleted: bool = False) -> None:
        """End the iterator and give back its session; `deleted`: also end its sampler."""
        self._workers = 0
        self._pages.stop()
        watch.discard(self.overdue)
        self._loader_state.own_files.ends()
        search = self._search
        if search is not None and self.stream is None and not deleted:
            self.stream = search.take()
        self._count()
        self._new_counts = None
        self._end_search()
        stream, self.stream = self.stream, None
        self._set_served()
        if stream is not None:
            stream.leave()
            self._loader_state.leave_stream(stream)
        if deleted and self.order is not None:
            self.order.close()

    def _end_search(self) -> None:
        search, self._search = self._search, None
        if search is not None:
            search.leave()
        if self._uncounted_from:
            self._loader_state.uncounted_s = time.monotonic() - self._uncounted_from
            self._uncounted_from = 0.0

    def progress(self, delivered: int | None) -> Progress:
        """Return the position after `delivered` batches of the epoch (None: all returned)."""
        order = self.order
        if order is None:
            return not_begun()
        over = self.finished and delivered is None and not order.paced
        progress = Progress(
            version=PROGRESS_VERSION,
            epoch=self.epoch,
            batches=self.delivered if delivered is None else delivered,
            finished=over,
            order=order.state_after(self.delivered if delivered is None else delivered, over=over),
        )
        if self._seed is not None:
            progress["seed"] = self._seed
        return progress
