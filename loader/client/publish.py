"""PlanPublisher: sends the daemon which objects the steps of an epoch read, in the background.

The trainer's thread publishes the first steps at once; a planner thread computes and publishes the
rest piece by piece, first of this epoch, then of the next ones. A trainer that is faster, or whose
process gets no more threads, publishes the steps that it needs itself. No step waits for a whole
plan.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from creel.cache.memory.shared_words import KNOWN
from creel.forks import forget_in_child
from creel.loader.client.session import Session
from creel.loader.order.prediction import EpochPlan, same_batch

_log = logging.getLogger("creel.loader")

_NONE = np.empty(0, np.int32)


@dataclass(frozen=True)
class PieceSizes:
    """Samples in one piece of a plan, by who publishes it (benchmarks/planning.py).

    Attributes:
        first: at the start of an epoch: the daemon may need 4 ms for it, and the first batch waits.
        trainer: by the trainer's thread: about 1 ms.
        user_code: the same if the user's own code maps samples to objects, one call per sample.
        whole: plans of up to this many samples are published at once: 3 ms, and no thread.
        thread: by the planner thread. Large, since each array operation may wait 5 ms for a trainer
            that holds the GIL; the session sends it in parts.
        undrawn: the same while a permutation is being drawn.
        lead: how far ahead of the trainer the thread publishes meanwhile: computing a permutation's
            entries one by one costs four times as much as from the whole.
    """

    first: int = 1 << 8
    trainer: int = 1 << 12
    user_code: int = 1 << 10
    whole: int = 1 << 15
    thread: int = 1 << 17
    undrawn: int = 1 << 14
    lead: int = 1 << 17


SIZES = PieceSizes()
#: Maximum number of pieces that the daemon has not processed yet.
_MAX_UNPROCESSED = 2
#: Elements that numpy counts in one call, during which it holds the GIL: 0.3 ms.
_COUNT_AT_ONCE = 1 << 22
_POLL_S = 0.002  # polling interval
#: Time per batch, in ns, that a trainer without a planner thread spends on publishing.
_SLICE_NS = 2_000_000


class PlanPiece(NamedTuple):
    """Consecutive steps of a plan: batch `first + i` has samples `indices[ends[i-1]:ends[i]]`."""

    first: int
    indices: NDArray[np.int32]
    ends: NDArray[np.int64]
    objects: NDArray[np.int32]
    stops: NDArray[np.int64]  # the same for objects

    @property
    def last(self) -> int:
        """One more than the last batch."""
        return self.first + len(self.ends)

    def after(self, first: int) -> PlanPiece:
        """Return this piece without the batches before `first`."""
        k = first - self.first
        if k <= 0:
            return self
        at, stop = self.ends[k - 1], self.stops[k - 1]
        return PlanPiece(
            first, self.indices[at:], self.ends[k:] - at, self.objects[stop:], self.stops[k:] - stop
        )

    def samples(self, first: int, last: int) -> NDArray[np.int32]:
        """Return the samples of batches [first, last)."""
        return self.indices[
            _start(self.ends, first - self.first) : self.ends[last - 1 - self.first]
        ]

    def ids(self, first: int, last: int) -> NDArray[np.int32]:
        """Return the objects of batches [first, last)."""
        return self.objects[
            _start(self.stops, first - self.first) : self.stops[last - 1 - self.first]
        ]


def _start(ends: NDArray[np.int64], i: int) -> int:
    return int(ends[i - 1]) if i else 0


class PublishedEpoch:
    """The published part of an epoch; batch i is step `origin + i` of the session.

    The publisher adds pieces; the trainer reads them and drops those that it has passed.

    Attributes:
        origin: None until something is published.
        known: batches below are published (or were skipped).
        total: batches from here on cannot be published; too high until the plan is opened.
        requested: the trainer asked for batches below; `begun`: it is in this epoch.
        repeats: whether some object is read more than once; False until all is published.
        if_repeats: publish this epoch only if that other epoch `repeats`.
    """

    def __init__(
        self, plan: EpochPlan, epoch: int, skip: int = 0, if_repeats: PublishedEpoch | None = None
    ) -> None:
        self.plan = plan
        self.epoch = epoch
        self.origin: int | None = None
        self.known = self.requested = skip
        self.total = sys.maxsize
        self.begun = False
        self.repeats = False
        self.if_repeats = if_repeats
        self._pieces: list[PlanPiece] = []
        self._found: PlanPiece | None = None
        self._read_before: NDArray[np.bool_] | None = None  # objects that the epoch reads
        self._uncounted: list[NDArray[np.int32]] = []  # objects not yet entered into `_read_before`
        self._count_lock = threading.Lock()
        self._distinct = self._reads = 0

    @property
    def complete(self) -> bool:
        """Whether all of it is published."""
        return self.known >= self.total

    @property
    def stop(self) -> int:
        """One more than the last step."""
        return self.step(self.total)

    def step(self, i: int) -> int:
        """Return the session's step of batch i."""
        return (self.origin or 0) + i

    def open(self) -> None:
        """Set `total` to the plan's number of steps."""
        self.total = min(self.total, self.plan.steps)

    def reads(self, i: int, index: object) -> bool:
        """Whether batch i is published with exactly these samples."""
        piece = self._piece(i)
        return piece is not None and same_batch(piece.samples(i, i + 1), index)

    def ids(self, i: int) -> NDArray[np.int32]:
        """Return the (k,) objects of batch i; empty if it is not published."""
        piece = self._piece(i)
        return _NONE if piece is None else piece.ids(i, i + 1)

    def take(self, first: int, last: int) -> list[tuple[int, NDArray[np.int32]]]:
        """Return (samples, objects) of batches [first, last) per piece; drops earlier pieces."""
        out = []
        for piece in self._pieces[: self._at(last - 1) + 1]:
            a, b = max(first, piece.first), min(last, piece.last)
            if a < b:
                out.append((len(piece.samples(a, b)), piece.ids(a, b)))
        del self._pieces[: max(self._at(last), 0)]
        return out

    def count_objects(self, piece: PlanPiece, size: int, *, later: bool) -> None:
        """Enter a piece into the count of distinct objects, before it is published.

        Args:
            piece: the piece; another thread may be publishing the same steps.
            size: number of objects of the dataset.
            later: defer the work to a later piece, since it touches fresh memory.
        """
        last = piece.last >= self.total
        with self._count_lock:
            if self.complete:  # the other thread has just published the last piece
                return
            self._uncounted.append(piece.objects)
            if later and not last:
                return
            if self._read_before is None:
                self._read_before = np.zeros(size, np.bool_)
            while self._uncounted:
                self._read_before[self._uncounted.pop()] = True
            if last:
                parts = [
                    self._read_before[a : a + _COUNT_AT_ONCE]
                    for a in range(0, size, _COUNT_AT_ONCE)
                ]
                self._distinct = sum(int(np.count_nonzero(part)) for part in parts)

    def add(self, piece: PlanPiece) -> None:
        """Add a piece that was published."""
        self._pieces.append(piece)
        self._reads += len(piece.objects)
        self.known = piece.last
        if self.complete:
            with self._count_lock:
                self.repeats = self._distinct < self._reads
                self._read_before = None

    def _at(self, i: int) -> int:
        return bisect_right(self._pieces, i, key=lambda piece: piece.first) - 1

    def _piece(self, i: int) -> PlanPiece | None:
        found = self._found  # mostly the same piece as last time
        if found is None or not found.first <= i < found.last:
            at = self._at(i)
            found = self._found = self._pieces[at] if at >= 0 else None
        return found if found is not None and i < found.last else None


class PlanPublisher:
    """Publishes the steps of one session. The trainer calls its public methods.

    One lock guards everything here except the contents of a `PublishedEpoch`: only its holder may
    extend or truncate the session. Pieces are computed without it; `_version` identifies pieces of
    a plan that was cancelled meanwhile.
    """

    def __init__(
        self,
        session: Session,
        objects: Callable[[NDArray[np.int64]], tuple[NDArray[np.int32], NDArray[np.int64]]],
        *,
        thread_safe: bool,
    ) -> None:
        """objects: as `Binding.objects`; thread_safe: whether another thread may call it."""
        self._session = session
        self._objects = objects
        self._thread_safe = thread_safe
        self._threaded = self._small = False  # publish the current epoch in a thread, or at once
        self._end = 0  # the next step to publish
        self._version = 0
        self._threadless = False  # no planner thread: the trainer publishes the whole plan
        self.forget()
        forget_in_child(self)

    def forget(self) -> None:
        """Create the state that belongs to one process: a forked child publishes nothing."""
        # Reentrant: a finaliser may end an epoch while this thread holds it.
        self._lock = threading.RLock()
        self._sending = False
        self._thread: threading.Thread | None = None
        self._drop()

    # --- called by the trainer ----------------------------------------------------------------

    def begin(self, plan: EpochPlan, epoch: int, skip: int) -> PublishedEpoch | None:
        """Publish an epoch, `skip` batches after its start, from the session's next step on.

        Returns None if there is nothing to publish.
        """
        published = PublishedEpoch(plan, epoch, skip)
        published.open()
        if published.complete:
            return None
        with self._lock:
            published.origin, published.begun = self._end - skip, True
            self._epochs.append(published)
        self._threaded = self._thread_safe and plan.thread_safe
        self._small = plan.samples <= (SIZES.whole if self._threaded else SIZES.trainer)
        if not plan.at_once:
            self._publish(min(self._trainer_samples, SIZES.first))
        self._start()
        return published

    @property
    def _trainer_samples(self) -> int:
        return SIZES.trainer if self._threaded else SIZES.user_code

    def add(
        self, plan: EpochPlan, epoch: int, if_repeats: PublishedEpoch | None = None
    ) -> PublishedEpoch:
        """Publish a later epoch after all others; `if_repeats`: see `PublishedEpoch`.

        It is published as the epoch that was begun is: by the planner thread or by the trainer.
        """
        published = PublishedEpoch(plan, epoch, if_repeats=if_repeats)
        with self._lock:
            self._epochs.append(published)
        self._start()
        return published

    def begin_added(self, published: PublishedEpoch, step: int) -> bool:
        """Begin an epoch of `add` at `step`; False if it was or will be published elsewhere."""
        with self._lock:
            if published.origin is None and published in self._epochs and self._end == step:
                published.origin = step
            published.begun = published.origin == step
            return published.begun

    def drop_unneeded(self, published: PublishedEpoch) -> bool:
        """Drop an epoch if it is unpublished because its `if_repeats` does not repeat."""
        with self._lock:
            void = published.origin is None and published.if_repeats is not None
            if void and published in self._epochs:
                self._epochs.remove(published)
            return void

    def reach(self, published: PublishedEpoch, i: int) -> bool:
        """Publish up to batch i now; False if that is impossible."""
        published.requested = i + 1
        if i < published.known:
            return i < published.total
        while published.known <= i < published.total:
            if not self._publish(self._trainer_samples):
                break  # unless the thread has just published the last of it
        if (
            self._thread is None and not self._threadless
        ):  # the thread has ended, e.g. since the daemon was stopped for a while
            self._start()
        return i < published.known

    def pump(self) -> None:
        """Without a planner thread, publish for `_SLICE_NS`; called after each batch."""
        until = time.monotonic_ns() + _SLICE_NS if self._threadless else 0
        while self._threadless and time.monotonic_ns() < until:
            self._threadless = self._publish(SIZES.user_code)

    def publish_unplanned(self, epoch: int, objects: NDArray[np.int32]) -> int:
        """Publish one unplanned step; returns its number, or -1 if the daemon is lost.

        No epoch may be left to publish.
        """
        with self._lock:
            ends = np.array([len(objects)])
            if not self._send(lambda: self._extend(epoch, objects, ends, unplanned=True)):
                return -1
            return self._end - 1

    def cancel(self, step: int) -> None:
        """Cancel all that is published from `step` on, and all that was still to be published."""
        with self._lock:
            self._drop()
            if self._sending:  # a finaliser, called while this thread sends a message
                self._session.forget()
            elif step < self._end:
                self._send(lambda: self._truncate(step))

    def stop(self) -> None:
        """Stop publishing: the session ends."""
        with self._lock:
            self._drop()

    # --- publishing ---------------------------------------------------------------------------

    def _drop(self) -> None:
        self._version += 1
        self._epochs: list[PublishedEpoch] = []  # not completely published, in order
        self._threadless = False

    def _send(self, message: Callable[[], bool]) -> bool:
        """Run `message` with the lock held; an interrupted one (Ctrl-C) ends the session."""
        self._sending = True
        try:
            sent = message()
        except Exception:  # noqa: BLE001  no memory, or another thread closes the connection
            _log.debug("the daemon did not receive a plan", exc_info=True)
            self._session.forget()
            sent = False
        except BaseException:
            self._session.forget()
            self._drop()
            raise
        finally:
            self._sending = False
        if not sent:
            self._drop()
        return sent

    def _extend(
        self,
        epoch: int,
        objects: NDArray[np.int32],
        ends: NDArray[np.int64],
        *,
        unplanned: bool = False,
    ) -> bool:
        if not self._session.extend(epoch, self._end, objects, ends, unplanned=unplanned):
            return False
        self._end += len(ends)
        return True

    def _truncate(self, step: int) -> bool:
        self._end = step
        return self._session.truncate(step)

    def _next(self) -> PublishedEpoch | None:
        """Return the first epoch with something to publish; drops those before it."""
        while self._epochs:
            published = self._epochs[0]
            if not published.complete and (
                published.if_repeats is None or published.if_repeats.repeats
            ):
                return published
            del self._epochs[0]
        return None

    def _publish(self, samples: int) -> bool:
        """Compute and publish one piece of about `samples` samples.

        Returns:
            False if there is nothing to publish or the daemon is lost.
        """
        with self._lock:
            version, published = self._version, self._next()
            if published is None:
                return False
            first = published.known
        piece = self._computed(published, first, samples)
        with self._lock:
            if version != self._version:
                return True
            if piece is None:
                published.total = min(published.total, max(published.known, first))
            elif published.known < piece.last:  # or another thread was quicker
                rest = piece.after(published.known)
                return self._send(lambda: self._publish_piece(published, rest))
            return True

    def _publish_piece(self, published: PublishedEpoch, piece: PlanPiece) -> bool:
        if published.origin is None:
            published.origin = self._end
        if not self._extend(published.epoch, piece.objects, piece.stops):
            return False
        published.add(piece)
        return True

    def _computed(self, published: PublishedEpoch, first: int, samples: int) -> PlanPiece | None:
        """Compute the piece from batch `first` on; None at the end, or if that fails."""
        try:
            published.open()
            if first >= published.total:
                return None
            last = published.plan.reach(first, samples)
            if not published.plan.ready(last):
                last = published.plan.reach(
                    first, min(samples, SIZES.undrawn) // published.plan.spread
                )
            indices, ends = published.plan.cut(first, last)
            objects, counts = self._objects(indices.astype(np.int64))
            if np.array_equal(objects, indices):
                objects = indices  # mostly a view of the permutation, which is kept anyway
            stops = np.zeros(len(counts) + 1, np.int64)
            np.cumsum(counts, out=stops[1:])
            piece = PlanPiece(first, indices, ends, objects, stops[ends])  # a step may read nothing
            published.count_objects(
                piece, len(self._session.table.offset), later=samples <= SIZES.trainer
            )
        except Exception:  # noqa: BLE001  the user's code may run here; a read raises it again
            _log.debug("the plan of an epoch cannot be computed", exc_info=True)
            return None
        return piece

    # --- the planner thread -------------------------------------------------------------------

    def _start(self) -> None:
        """Publish small plans at once; start the planner thread for large ones."""
        while self._small and self._publish(SIZES.whole):
            pass
        with self._lock:
            if self._next() is None or self._thread is not None:
                return
            self._threadless = not self._threaded
            if self._threadless:
                return
            # Not a daemon thread: one that returns from torch during Python's exit aborts it.
            thread = self._thread = threading.Thread(target=self._run, name="creel-planner")
        try:
            thread.start()
        except RuntimeError:  # no more threads
            self._thread, self._threadless = None, True

    def _run(self) -> None:
        marks: deque[int] = deque(maxlen=_MAX_UNPROCESSED)
        try:
            while (published := self._next_or_end()) is not None:
                if self._may_publish(published, marks) and self._publish(SIZES.thread):
                    marks.append(self._end)
        except Exception:  # noqa: BLE001  the trainer publishes the rest
            _log.debug("a plan cannot be published in the background", exc_info=True)
            with self._lock:
                self._thread = None

    def _next_or_end(self) -> PublishedEpoch | None:
        """Return the epoch to publish; None if there is none, which ends the thread."""
        with self._lock:
            published = self._next()
            # When Python exits, the main thread is over and waits for this thread.
            if (
                published is None
                or not self._session.alive
                or not threading.main_thread().is_alive()
            ):
                self._thread = published = None
            return published

    def _may_publish(self, published: PublishedEpoch, marks: deque[int]) -> bool:
        """Whether to publish the next piece now; may sleep or draw the permutation first."""
        if len(marks) == _MAX_UNPROCESSED and self._session.words[KNOWN] < marks[0] <= self._end:
            time.sleep(_POLL_S)
            return False
        plan, known = published.plan, published.known
        urgent = (
            published.begun and plan.reach(published.requested, SIZES.lead // plan.spread) > known
        )
        if not urgent and not plan.ready(plan.reach(known, SIZES.thread)):
            plan.draw()
        return True
