"""IteratorSession: an iterator's session with the daemon, and the search for another daemon."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from creel.loader.client.cluster.ranks import rank_and_world
from creel.loader.client.connections import start_daemon_early
from creel.loader.data.binding.tree import wrapped_in
from creel.loader.data.binding.wrapped import Wrapped, recorded, recording, supposed
from creel.loader.line.batches.reattach import StreamSearch

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from creel.loader.data.binding.bind import Binding
    from creel.loader.line.batches.state import LoaderState
    from creel.loader.line.order.epoch_order import EpochOrder
    from creel.loader.line.steps.batch_stream import BatchStream

#: Least time between two looks whether samples have told what all samples read: one takes 20 us.
_FOLLOW_NS = 20_000_000


class Recordings:
    """What the reads of an iterator's wrapped datasets have told, while they are recorded.

    Attributes:
        supposed: each dataset, and what it is supposed to read.
    """

    def __init__(self) -> None:
        self.supposed: list[tuple[Wrapped, object | None]] = []
        self._unknown: list[Wrapped] = []  # no daemon is needed before they are recorded
        self._look_at = 0  # ns: when to look at them again

    def begin(self, followed: Sequence[Wrapped], unknown: Sequence[Wrapped]) -> None:
        """Begin an epoch."""
        self.supposed = [(wrapped, supposed(wrapped)) for wrapped in followed]
        self._unknown = [*unknown]

    def newly_recorded(self) -> bool:
        """Whether the reads of a dataset are known for the first time: a daemon may serve them."""
        known = any(map(recorded, self._unknown))
        if known:
            self._unknown = []
        return known

    def due(self, now_ns: int) -> bool:
        return now_ns >= self._look_at

    def changed(self, now_ns: int) -> bool:
        """Whether what a dataset is supposed to read is another list than before, or none."""
        before = [(wrapped, was) for wrapped, was in self.supposed if recording(wrapped)]
        self.supposed = [(wrapped, supposed(wrapped)) for wrapped, _ in before]
        if all(now is None for _, now in self.supposed):
            self._look_at = now_ns + _FOLLOW_NS
        pairs = zip(before, self.supposed, strict=True)
        return any(was is not now for (_, was), (_, now) in pairs)


class IteratorSession:
    """Which session serves one iterator, epoch by epoch.

    Attributes:
        stream: the iterator's session, which may serve its statistics alone; None: it has none.
        binding: what the epoch's readers use; None: they read without creel.
        session: of `stream`.
        reads: the session that serves the epoch's reads; None: they bypass the daemon.
        search: for another daemon, after this node's has ended, or for one that serves files that
            were listed late; None: there is none.
        joined: the one that the workers were told to read through.
        recordings: of its wrapped datasets.
        digest: `Binding.digest` of what workers must find themselves before they join the session.
        builder: how this process builds batches from files, and the dataset that does; None: it
            does not.
        waits: whether nothing is made ahead of use, while training could go on.
        published_ahead: whether the epochs after this one are published, as far as they are known.
    """

    def __init__(self, state: LoaderState, loader: DataLoader[Any]) -> None:
        self._state = state
        binding = state.binding(loader)
        #: Whether this epoch's files lie in the page cache; if so, nothing is published.
        self._page_cached = binding is not None and state.page_cached(loader, binding, None)
        #: Whether `begin` asks that again. In the first epoch only if there are other ranks: a
        #: session alone knows what they read.
        self._asks_again = rank_and_world()[1] > 1
        self.stream = state.take_stream(binding, wait=not self._page_cached)
        self.binding = None if self.stream is None and not self._page_cached else binding
        self.builder = None
        if binding is not None and self._page_cached:
            self.builder = state.direct_in(loader, binding)
        self.search: StreamSearch | None = None
        self.waits = False
        self.recordings = Recordings()
        self.joined: BatchStream | None = None
        self.digest: str | None = None
        self._uncounted_from = 0.0  # when an epoch began that has no session for its statistics
        self.published_ahead = False
        self._set_reads()

    def _set_reads(self) -> None:
        """Note which session serves this epoch's reads, after a change of `stream` or its use."""
        passes_by = self._page_cached or self.binding is None
        self.reads: BatchStream | None = None if passes_by else self.stream
        self.session = None if self.stream is None else self.stream.session

    # --- epochs -------------------------------------------------------------------------------

    def bind_late(self, loader: DataLoader[Any]) -> None:
        """Open a session between two epochs, if no objects were known before."""
        state = self._state
        binding = self._late(loader, state.binding(loader)) if self.binding is None else None
        if binding is None:
            return
        if self.stream is not None:  # it only counts
            self.stream.close()
        self.stream = state.take_stream(binding)
        self.binding = None if self.stream is None else binding
        self._set_reads()

    def _late(self, loader: DataLoader[Any], binding: Binding | None) -> Binding | None:
        """Return a binding that workers which run already may use; set its `digest` for them."""
        # Files in the page cache stay there. Another process may ask for a sample's objects only if
        # no user code runs for that.
        if binding is None or not binding.thread_safe:
            return None
        if self._state.page_cached(loader, binding, None):
            return None
        try:
            self.digest = binding.digest()
        except Exception:  # noqa: BLE001  a user's `__len__` may raise anything
            return None
        return binding

    def epoch_begins(self, loader: DataLoader[Any]) -> None:
        """Find a session for an epoch; if it serves only statistics, do not wait for a daemon."""
        counts = self._state.args.creel is not False
        wrapped = wrapped_in(loader.dataset)
        unknown = wrapped if self.binding is None and counts else []
        self.recordings.begin([] if self._state.groups.needed else wrapped, unknown)
        self._end_search()
        if self.stream is not None and not self.stream.alive:
            self.stream.close()
            self.stream = None
        self._find_stream(loader, counts=counts)
        self._set_reads()
        self.published_ahead = self.reads is None

    def _find_stream(self, loader: DataLoader[Any], *, counts: bool) -> None:
        state, binding = self._state, self.binding
        if binding is not None and self._asks_again:
            self._page_cached = state.page_cached(loader, binding, self.stream)
        self._asks_again = True
        if self.stream is not None:
            return
        stream = None
        if binding is not None:
            stream = state.take_stream(state.binding(loader), wait=not self._page_cached)
        if stream is not None and stream.binding is binding:
            self.stream = stream
        elif stream is not None:  # persistent workers have the old dataset
            state.leave_stream(stream)
        elif counts and (binding is None or self._page_cached):
            self._uncounted_from = time.monotonic() - state.observers.uncounted_s

    def leave(self, *, deleted: bool) -> BatchStream | None:
        """Give back the session, which the caller may yet count with; see `EpochRun.leave`."""
        search = self.search
        if search is not None and self.stream is None and not deleted:
            self.stream = search.take()
        self._end_search()
        stream, self.stream = self.stream, None
        self._set_reads()
        return stream

    # --- batches ------------------------------------------------------------------------------

    def reattach(self, order: EpochOrder | None, batch: int) -> None:
        """Let another daemon serve from this batch on, once one is found.

        Earlier batches that are still being read are read directly: their steps belong to the lost
        session. If this node's daemon was one of a cluster, what would be read directly lies on
        other nodes, and in step with this rank they all would wait for the source: a loader that
        `waits` does so for a moment.
        """
        search, reads = self.search, self.reads
        if search is None or order is None:
            return
        if self.waits and reads is not None and reads.session.client.cluster:
            self._state.observers.meter["stall_daemon_ns"] += search.wait()
        stream = search.take()
        if stream is None:
            return
        self.search = None
        if self.stream is not None:
            self.stream.close()
        self.stream, self.published_ahead = stream, False
        if self.binding is None and stream.binding.leaves:
            self.binding = stream.binding
        self._set_reads()
        self._state.observers.bad_samples.report(stream)
        if self.reads is not None:
            self.reads.begin(order, batch)

    def follow_lists(self, now_ns: int) -> None:
        """Serve what samples are supposed to read by now, or no longer what they do not read."""
        if not self.recordings.due(now_ns):
            return
        changed, loader = self.recordings.changed(now_ns), self._state.loader
        if loader is None or not changed:
            if self.reads is not None:
                self.reads.pump()
            return
        if self.binding is not None:
            stream, self.stream, self.binding = self.stream, None, None
            if stream is not None:
                stream.leave()
                stream.close()
            self._set_reads()
            self._uncounted_from = time.monotonic()
        binding = self._late(loader, self._state.bound(loader))
        if binding is not None:
            self._uncounted_from = 0.0
            self._end_search()
            self.search = self._state.search(binding)

    def publish_ahead(self, order: EpochOrder | None) -> None:
        """Publish the epochs after this one, once the nodes of the job have joined."""
        if order is not None and self.reads is not None and not self.reads.joining:
            self.published_ahead = True
            start = time.monotonic_ns()
            self.reads.publish_upcoming(order)
            self._state.observers.meter["stall_sampler_ns"] += time.monotonic_ns() - start

    def delivered(self, since: float, *, counted: bool) -> None:
        """Look for a daemon, if there is none any more, or the epoch goes on without one.

        Args:
            since: an epoch that began before needs a session for its statistics.
            counted: whether the statistics were updated just now.
        """
        if self.recordings.newly_recorded():
            start_daemon_early(self._state.config)
        if 0 < self._uncounted_from <= since:
            self._begin_search()
        stream = self.stream
        if self.search is not None or stream is None or not (counted or stream.session.gone):
            return
        if not stream.session.client.alive:
            # The daemon has ended. A daemon that is only stopped may go on.
            self._begin_search()

    def find_counting(self) -> None:
        """Find a session for statistics, as `delivered` does, while the first batch is awaited."""
        if self.stream is not None or self.binding is not None:
            return
        search = self.search
        if search is None and self._uncounted_from:
            self._begin_search()
        elif search is not None and (stream := search.take()) is not None:
            self.stream, self.search = stream, None
            self._set_reads()

    def _begin_search(self) -> None:
        if self._uncounted_from:
            self._uncounted_from = self._state.observers.uncounted_s = 0.0
        self.search = self._state.search(self.binding)

    def _end_search(self) -> None:
        search, self.search = self.search, None
        if search is not None:
            search.leave()
        if self._uncounted_from:
            self._state.observers.uncounted_s = time.monotonic() - self._uncounted_from
            self._uncounted_from = 0.0
