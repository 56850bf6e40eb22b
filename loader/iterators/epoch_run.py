"""EpochRun: one iterator's current epoch: its order, its session with the daemon, its position."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import BatchSampler

from creel.cache.storage.stores.retry import public
from creel.loader.binding.tree import wrapped_in
from creel.loader.binding.wrapped import Wrapped, recorded
from creel.loader.client.connections import start_daemon_early
from creel.loader.cluster.ranks import rank_and_world
from creel.loader.iterators.reattach import StreamSearch
from creel.loader.iterators.state import stream_in
from creel.loader.order.epoch_order import (
    PROGRESS_VERSION,
    EpochOrder,
    IteratorStart,
    Progress,
    StateBefore,
    index_sampler,
    not_begun,
)
from creel.loader.order.samplers import adopt
from creel.loader.plan.batch_stream import BatchStream, Ticket, samples_in, try_predict
from creel.loader.reading.bad_samples import BadSample, plain
from creel.loader.torch_private import BaseDataLoaderIter

if TYPE_CHECKING:
    from creel.loader.dataloader import DataLoader
    from creel.loader.iterators.state import LoaderState

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
        self.stream = loader_state.take_stream(loader, wait=not self._page_cached)
        #: The binding that the epoch's readers use; None: they read without creel.
        self.binding = None if self.stream is None and not self._page_cached else binding
        #: A stream whose batches this process builds from its files, and how; None: it does not.
        self.direct = None
        if binding is not None and self._page_cached:
            self.direct = stream_in(loader, binding)
        self.skipped = 0
        self.delivered = 0
        self._counted = 0  # delivered batches that the daemon's statistics include
        self._counted_at = 0.0
        self._unknown: list[Wrapped] = []  # recorded wrapped datasets; no daemon needed yet
        self._unpublished: dict[int, int] = {}  # batch without a step -> its number of samples
        self._many = True  # whether a batch is made of several samples
        self.finished = False
        self.slices = False  # whether the order yields arrays in place of lists of ints
        self.order: EpochOrder | None = None
        self.epoch = 0
        self._published_ahead = False
        self._search: StreamSearch | None = None  # set after the daemon has ended in mid-epoch
        self._uncounted_from = 0.0  # when an epoch began that has no session for its statistics

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
        self.stream = loader_state.take_stream(loader)
        self.binding = None if self.stream is None else binding
        return None if self.binding is None else binding.digest()

    def begin(self, loader: DataLoader[Any], it: BaseDataLoaderIter, before: StateBefore) -> None:
        """Begin an epoch, after torch's iterator has made its draws, and replace its order."""
        loader_state = self._loader_state
        self._attach(loader)
        self._report_bad()
        learns = self.binding is None and loader.creel is not False
        self._unknown = wrapped_in(loader.dataset) if learns else []
        resume, loader_state.resume = loader_state.resume, None
        begun = IteratorStart(it._sampler_iter, int(it._base_seed), before)  # noqa: SLF001
        # A proxy: the loader's own iterator keeps the order, which must not keep the loader alive.
        held: Any = weakref.proxy(loader)
        given = None if resume is None else resume["order"]
        order = adopt(
            *(held, begun),
            previous=loader_state.order,
            state=given,
            exchange=loader_state.exchange(loader),
        )
        self.skipped = 0 if resume is None else resume["batches"]
        loader_state.epoch = loader_state.epoch + 1 if resume is None else resume["epoch"]
        loader_state.order, loader_state.run = order, self
        self.order, self.epoch = order, loader_state.epoch
        self._count()
        self.delivered, self.finished, self._published_ahead = self.skipped, False, False
        self._counted = self.skipped
        self._unpublished.clear()
        self._many = loader._auto_collation  # noqa: SLF001  torch's
        if self._served is not None:
            start = time.monotonic_ns()
            try_predict(order, 0)  # may run a copy of the sampler; the order caches the result
            loader_state.meter["stall_sampler_ns"] += time.monotonic_ns() - start
            self._served.begin(order, self.skipped)
        if self.skipped:
            order.skip(self.skipped)
        self.slices = order.known and type(index_sampler(loader)) is BatchSampler
        it._sampler_iter, it._base_seed = order, order.base_seed  # noqa: SLF001

    def arrived(self) -> bool:
        """Whether the next batch can be asked for without waiting for data (see `PacedOrder`)."""
        return self.order is None or self.order.arrived()

    def await_daemon(self) -> None:
        """Wait a moment for another daemon, if this node's has ended and was one of a cluster.

        What would be read directly until then lies on other nodes, and in step with this rank they
        all would wait for the source.
        """
        stream = self.stream
        if self._search is not None and stream is not None and stream.session.client.cluster:
            self._loader_state.meter["stall_daemon_ns"] += self._search.wait()

    def step_of(self, i: int, index: object) -> int:
        """Return the session's step of the i-th batch after those skipped; -1: read directly."""
        if self._search is not None:
            self._reattach(self.skipped + i)
        if self.stream is None:
            return -1
        step = -1 if self._page_cached else self.stream.step_of(self.skipped + i, index)
        if step < 0:
            self._unpublished[self.skipped + i] = samples_in(index) if self._many else 1
        return step

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
        if self.stream is not None or binding is None:
            return
        stream = loader_state.take_stream(loader, wait=not self._page_cached)
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
        found = None if self._search is None else self._search.take()
        if found is None or self.order is None:
            return
        self._search = None
        if self.stream is not None:
            self.stream.close()
        self.stream, self._published_ahead = found, False
        self._report_bad()
        if not self._page_cached:
            found.begin(self.order, batch)

    @property
    def _served(self) -> BatchStream | None:
        """Return the session that serves this epoch's reads; None: they bypass the daemon."""
        return None if self._page_cached else self.stream

    @property
    def ticket(self) -> Ticket | None:
        """Return what workers need to use the session; None if they do not use it now."""
        return None if self._served is None else self._served.ticket

    def done(self, i: int) -> None:
        """Record that all batches below the i-th after those skipped have arrived."""
        stream = self._served
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
        rows = [(one.index, self._address(one.index), one.reason) for one in samples]
        done = "left out" if self._loader_state.tolerance.on_error == "skip" else "replaced"
        for index, address, reason in rows:
            _log.warning("sample %d %sis %s: %s", index, address and f"({address}) ", done, reason)
        self._loader_state.bad_unreported += rows
        self._report_bad()

    def _report_bad(self) -> None:
        """Tell the daemon of bad samples: those below `creel.wrap` are found before a session."""
        rows, stream = self._loader_state.bad_unreported, self.stream
        if rows and stream is not None and stream.alive:
            self._loader_state.bad_unreported = []
            stream.report_bad(rows)

    def _address(self, index: int) -> str:
        """Return the address of a sample's first object; "" if unknown."""
        try:
            assert self.binding is not None  # noqa: S101
            found = self.binding.objects(np.array([index]))[0]
            address, _, _ = self.binding.manifest.location(int(found[0]))
        except Exception:  # noqa: BLE001  user code may run here
            return ""
        return plain(public(address))

    def deliver(self, i: int) -> None:
        """Count a batch about to be returned, the one before the i-th after those skipped.

        A batch that raised counts as read if training goes on, and is read again if training stops
        there.
        """
        self._loader_state.meter["batches"] += 1
        self.delivered = self.skipped + i
        if self.order is not None:
            self.order.delivered(self.delivered)
        if any(map(recorded, self._unknown)):
            self._unknown = []
            start_daemon_early(self._loader_state.config)
        waited_s = time.monotonic() - self._uncounted_from if self._uncounted_from else 0.0
        if self.binding is not None and waited_s and waited_s >= COUNT_S:
            self._uncounted_from = 0.0
            self._search = StreamSearch(partial(self._loader_state.open, self.binding))
        stream, due = self.stream, self.due()
        if due:
            self._count()
        if self._search is not None or stream is None or not (due or stream.session.gone):
            return
        if not stream.session.client.alive:
            # The daemon has ended. A daemon that is only stopped may go on.
            self._search = StreamSearch(partial(self._loader_state.open, stream.binding))

    def due(self) -> bool:
        """Whether to update the daemon's statistics now: at most once per `COUNT_S`."""
        if self.stream is None or self.delivered == self._counted:
            return False
        return time.monotonic() - self._counted_at >= COUNT_S

    def _count(self) -> None:
        """Add the batches since the last update to the daemon's statistics.

        Does nothing while the daemon is not alive: if it is only stopped, a later update counts
        them.
        """
        self._counted_at = time.monotonic()
        if self.stream is None or not self.stream.alive:
            return
        first, self._counted = self._counted, self.delivered
        more = self._loader_state.meter.unreported()
        sizes = [
            self._unpublished.pop(i) for i in range(first, self._counted) if i in self._unpublished
        ]
        if sizes:
            more |= {"batches": len(sizes), "samples": sum(sizes)}
        self.stream.count(first, self._counted, more)

    def leave(self, *, deleted: bool = False) -> None:
        """End the iterator and give back its session; `deleted`: also end its sampler."""
        self._count()
        self._end_search()
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.leave()
            self._loader_state.leave_stream(stream)
        if deleted and self.order is not None:
            self.order.close()

    def _end_search(self) -> None:
        if self._search is not None:
            self._search.leave()
            self._search = None
        if self._uncounted_from:
            self._loader_state.uncounted_s = time.monotonic() - self._uncounted_from
            self._uncounted_from = 0.0

    def progress(self, delivered: int | None) -> Progress:
        """Return the position after `delivered` batches of the epoch (None: all returned)."""
        order = self.order
        if order is None:
            return not_begun()
        over = self.finished and delivered is None and not order.paced
        return Progress(
            version=PROGRESS_VERSION,
            epoch=self.epoch,
            batches=self.delivered if delivered is None else delivered,
            finished=over,
            order=order.state_after(self.delivered if delivered is None else delivered, over=over),
        )
