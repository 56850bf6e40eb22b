"""PlanPublisher: tells the daemon which objects the steps of an epoch read, ahead of use.

What moves. A session numbers its steps from 0 and never begins again; `_end` is the next step to
publish. An epoch's batches become steps piece by piece (`PlanPiece`):

    known <= total    of a `PublishedEpoch`: batches below `known` are steps, those from `total` on
                      will never be

The trainer's thread publishes the first piece of an epoch, so that its first batch need not wait. A
planner thread then draws and publishes the rest, first of this epoch, then of the next ones
(`add`), and ends. If the trainer is faster (`reach`), or its process gets no more threads (`pump`),
it publishes the steps that it needs by the same function, `_publish`. A batch that no plan foresaw
is published when it is pulled (`publish_pulled`).

Why arrays, and in pieces. From a seed the daemon could draw the order itself, but its one thread
would take 2.2 ms for 16,384 samples, as it has no torch, where it takes 1.0 ms to plan them, and
both sides 0.15 ms to tell of them. An array for the whole epoch in a memfd would take 0.08 ms, and
save nothing else: the daemon would take it in pieces all the same, since it serves others
meanwhile, and the first batch, which cannot wait for the draw, would need a piece of its own
(benchmarks/planning.py --samples 1281167 --kinds seeded; Xeon, 2026-11-28).

What may never happen.
* A batch waits for a whole plan, or for the planner thread.
* A step means two batches. Steps are numbered and sent under one lock; `cancel` truncates the
  session before their numbers are used again, and the session then trusts READY only once the
  daemon has truncated, too.
* A prediction decides what a batch has. The trainer claims batch i with exactly the samples that
  torch's sampler yields (`claim_of`). If the plan has others, it cancels the rest and leaves the
  plan (`leave_plan`): that costs reads, never a batch.
* User code runs in another thread: unless `objects` is `thread_safe`, there is no planner thread.
* More is fetched than is proved: `allowed` samples at most, and batches that are requested.
* The daemon is flooded: at most two of the thread's pieces are sent that it has not processed.
* A thread is there when the process forks, or after the main thread has ended. A child publishes
  nothing.

Who writes. Whoever holds `_lock` computes the next piece, moves `_end`, `known` and `total`, adds
to `pieces` and sends; slow work, the draw of a permutation, is done before. The trainer alone sets
`planned`, and drops the pieces that it has passed. A finaliser may call `cancel` in the middle of
anything, also of `_publish` in its own thread: so the lock is reentrant, `_end` is moved before a
piece is sent, and a piece is looked at again after it was computed.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from creel.cache.memory.shared_words import KNOWN
from creel.loader.client.claim import Claim
from creel.loader.client.session import Session
from creel.loader.line.order.epoch_plan import EpochPlan, same_batch
from creel.system.forks import join, pause_before_fork, reset_in_child

_log = logging.getLogger("creel.loader")


@dataclass(frozen=True)
class PieceSizes:
    """Samples in one piece of a plan, by publisher (benchmarks/planning.py).

    Attributes:
        first: at the start of an epoch. The daemon may need 4 ms for it, and the first batch waits.
        trainer: by the trainer's thread: 0.3 ms, or 1 ms if the user's own code maps samples to
            objects, one call per sample.
        whole: plans of up to this many samples are published at once: 3 ms, and no thread.
        thread: by the planner thread. Large, since each array operation may wait 5 ms for a trainer
            that holds the GIL; the session sends it in parts.
    """

    first: int = 1 << 8
    trainer: int = 1 << 10
    whole: int = 1 << 15
    thread: int = 1 << 17


SIZES = PieceSizes()
#: Most pieces that the daemon has not processed yet.
_MAX_UNPROCESSED = 2
_POLL_S = 0.002  # polling interval
#: After this time a lock counts as blocked: its holder waits for this thread (a finaliser called
#: `cancel` during a message), or the planner thread was stopped.
LOCKED_S = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class PlanPiece:
    """Consecutive batches, from `first` on, and their steps, from `step` on.

    Batch `first + i` has samples `indices[ends[i-1]:ends[i]]`, and objects
    `objects[stops[i-1]:stops[i]]`. `last` is one more than the last batch.
    """

    first: int
    step: int
    indices: NDArray[np.integer]
    ends: NDArray[np.int64]
    objects: NDArray[np.int32]
    stops: NDArray[np.int64]
    last: int = field(init=False)

    def __post_init__(self) -> None:
        """Set `last`. Not a property, since it is read several times a batch."""
        object.__setattr__(self, "last", self.first + len(self.ends))

    def part(self, first: int, last: int) -> PlanPiece:
        """Return batches [first, last), at least one, all of which must be in this piece."""
        a, b = first - self.first, last - self.first
        start, stop = (int(self.ends[a - 1]), int(self.stops[a - 1])) if a else (0, 0)
        return PlanPiece(
            first,
            self.step + a,
            self.indices[start : self.ends[b - 1]],
            self.ends[a:b] - start,
            self.objects[stop : self.stops[b - 1]],
            self.stops[a:b] - stop,
        )


class PublishedEpoch:
    """The batches of one epoch that are steps of the session: those planned, then those pulled.

    The publisher adds pieces; the trainer reads them and drops those that it has passed.

    Attributes:
        epoch: its number in the session.
        plan: None if the epoch is not predicted: its batches are published as they are pulled.
        planned: whether all batches so far were as in the plan.
        known: planned batches below are published (or were skipped).
        total: batches from here on cannot be published; too high until the plan is opened.
    """

    def __init__(self, epoch: int, plan: EpochPlan | None, skip: int = 0) -> None:
        self.epoch = epoch
        self.plan = plan
        self.planned = plan is not None
        self.known = skip
        self.total = sys.maxsize
        self.pieces: list[PlanPiece] = []
        self._latest: PlanPiece | None = None

    @property
    def complete(self) -> bool:
        """Whether all of the plan is published."""
        return self.known >= self.total

    def foresaw(self, plan: EpochPlan | None) -> bool:
        """Whether this epoch has this plan, and some of it is or could be published."""
        mine = self.plan
        return plan is not None and mine is not None and mine.opened and plan.same(mine)

    def step(self, i: int) -> int:
        """Return the step after those of the batches below i; 0 if none is known."""
        piece = self._piece(i)
        return 0 if piece is None else piece.step + min(i, piece.last) - piece.first

    def claim_of(self, i: int, index: object) -> Claim | None:
        """Return the claim of batch i if it is published with exactly these samples, else None."""
        piece = self._latest  # mostly the same piece as last time
        if piece is None or not piece.first <= i < piece.last:
            piece = self._piece(i)
        if piece is None or i >= piece.last:
            return None
        k = i - piece.first
        start, first = (piece.ends[k - 1], piece.stops[k - 1]) if k else (0, 0)
        if not same_batch(piece.indices[start : piece.ends[k]], index):
            return None
        return Claim(piece.step + k, piece.objects[first : piece.stops[k]])

    def take(self, first: int, last: int) -> list[PlanPiece]:
        """Return pieces with the published batches of [first, last), and drop earlier pieces."""
        some = self.pieces[: self._at(last - 1) + 1]
        spans = ((piece, max(first, piece.first), min(last, piece.last)) for piece in some)
        out = [piece.part(a, b) for piece, a, b in spans if a < b]
        del self.pieces[: max(self._at(last), 0)]
        return out

    def leave_plan(self, i: int) -> None:
        """Drop the plan from batch i on, where it differs from the batches pulled."""
        self.planned = False
        self.total, self._latest = i, None
        kept = self.pieces[: self._at(i - 1) + 1]
        self.pieces = [piece.part(piece.first, min(i, piece.last)) for piece in kept]

    def _at(self, i: int) -> int:
        return bisect_right(self.pieces, i, key=lambda piece: piece.first) - 1

    def _piece(self, i: int) -> PlanPiece | None:
        """Return the last piece that begins at or below batch i."""
        at = self._at(i)
        piece = self._latest = self.pieces[at] if at >= 0 else None
        return piece


class PlanPublisher:
    """Publishes the steps of one session. The trainer calls its public methods.

    One lock guards everything here except the contents of a `PublishedEpoch`. Its holder computes
    the next piece and extends the session, or truncates it. The lock is not held for slow work: the
    planner thread draws a permutation before it takes the lock.

    Attributes:
        epochs: incompletely published ones, in order, and those that have just become complete.
    """

    def __init__(
        self,
        session: Session,
        objects: Callable[[NDArray[np.int64]], tuple[NDArray[np.int32], NDArray[np.int64]]],
        before: Callable[[PublishedEpoch], None],
        *,
        thread_safe: bool,
        allowed: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Make a publisher.

        Args:
            objects: as `Binding.objects`.
            before: called before each piece of an epoch is published, in any thread.
            thread_safe: whether another thread may call `objects`.
            allowed: as `Binding.allowed`.
        """
        self._before = before
        self._session = session
        self._objects = objects
        self._thread_safe, self._allowed = thread_safe, allowed
        self._sent = 0  # samples that were published
        self._direct = 0  # samples that were read directly to prove what others read
        #: (epoch, piece, whether it is unplanned) of requested batches that wait for that.
        self._held: list[tuple[int, PlanPiece, bool]] = []
        self._small = False  # whether the current epoch is published at once
        self._end = 0  # the next step to publish
        self.reset_for_process()
        reset_in_child(self)
        pause_before_fork(self)

    def reset_for_process(self) -> None:
        """Create the state that belongs to one process: a forked child publishes nothing."""
        # Reentrant: a finaliser may end an epoch while this thread holds it.
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._threadless = False  # no planner thread: the trainer publishes the whole plan
        self._paused = False  # for a fork, during which there is no thread
        self._drop()

    def pause(self) -> None:
        """End the planner thread before a fork; after the next batch there is another one."""
        self._paused = True
        join(self._thread)
        self._paused = False

    # --- called by the trainer ----------------------------------------------------------------

    def begin(self, published: PublishedEpoch) -> None:
        """Publish an epoch that begins now, from the session's next step on."""
        plan = published.plan
        if plan is None or plan.steps <= published.known:
            published.planned, published.total = False, published.known
            return
        with self._lock:
            self.epochs.append(published)
        self._small = plan.stream.total <= (SIZES.whole if self._thread_safe else SIZES.trainer)
        if not plan.stream.at_once:
            self._publish(SIZES.first)
        self._start()

    def add(self, published: PublishedEpoch) -> None:
        """Publish a later epoch after all others, by the same means as the current one."""
        with self._lock:
            self.epochs.append(published)
        self._start()

    def begin_added(self, published: PublishedEpoch, step: int) -> bool:
        """Begin an `add`ed epoch at `step`; False if its first step is or will be another one."""
        with self._lock:
            start = published.pieces[0].step if published.pieces else self._end
            return start == step and (published.complete or published in self.epochs)

    def reach(self, published: PublishedEpoch, i: int) -> bool:
        """Publish up to batch i now; False if that is impossible."""
        samples = SIZES.trainer if self._allowed() is None else 1
        while published.known <= i < published.total:
            if not self._publish(samples, wanted=True):
                break  # unless the thread has just published the last of it
            if self._thread is None and not self._threadless:
                self._start()  # the thread had ended, e.g. since the daemon was stopped for a while
        return i < min(published.known, published.total)

    def passes_by(self, published: PublishedEpoch, i: int, samples: int) -> bool:
        """Whether batch i, of so many samples, is read directly to prove what others read."""
        if self._direct >= -(self._allowed() or 0):
            return False
        with self._lock:
            published.known = max(published.known, i + 1)
            self._direct += samples
        return True

    def pump(self) -> None:
        """Without a planner thread, publish one piece or start one; called after each batch."""
        if self._held:
            with self._lock:
                self._send_held()
        if self._threadless:
            self._threadless = self._publish(SIZES.trainer)
        elif self._thread is None and self.epochs:
            self._start()

    def publish_pulled(
        self,
        published: PublishedEpoch,
        i: int,
        indices: NDArray[np.int64],
        objects: NDArray[np.int32],
    ) -> int:
        """Publish the unplanned batch i; return its step, or -1 if the daemon is lost.

        No epoch may be left to publish.
        """
        with self._lock:
            ends, stops = np.array([len(indices)]), np.array([len(objects)])
            piece = PlanPiece(i, self._end, indices, ends, objects, stops)
            return piece.step if self._extend(published, piece) else -1

    def cancel(self, step: int = sys.maxsize) -> None:
        """Publish nothing more, and cancel the published steps from `step` on."""
        if not self._lock.acquire(timeout=LOCKED_S):
            self._session.reset_for_process()
            return
        try:
            self._drop()
            self._held = [entry for entry in self._held if entry[1].step < step]
            if step < self._end:
                self._end = step
                self._session.truncate(step)
        finally:
            self._lock.release()

    # --- publishing ---------------------------------------------------------------------------

    def _drop(self) -> None:
        self.epochs: list[PublishedEpoch] = []
        self._threadless = False

    def _publish(self, samples: int, *, wanted: bool = False) -> bool:
        """Publish the next piece, of about `samples` samples.

        `wanted`: these are requested now, and so published whatever is `allowed`.

        Returns:
            False if there is nothing to publish or the daemon is lost.
        """
        with self._lock:
            published = self._next(wanted=wanted)
            if published is None:
                return False
            allowed = None if wanted else self._allowed()
            samples = samples if allowed is None else min(samples, allowed - self._sent)
            piece = self._computed(published, samples)
            if published is not self._next(wanted=wanted):  # a finaliser has cancelled it meanwhile
                return False
            self._before(published)
            if piece is None:
                published.total = published.known
            elif self._extend(published, piece):
                published.known = piece.last
            else:
                return False
            return True

    def _next(self, *, wanted: bool = False) -> PublishedEpoch | None:
        """Return the first epoch with something to publish; drop those before it."""
        while self.epochs and self.epochs[0].complete:
            del self.epochs[0]
        allowed = None if wanted else self._allowed()
        if allowed is not None and allowed <= self._sent:
            return None
        return self.epochs[0] if self.epochs else None

    def _computed(self, published: PublishedEpoch, samples: int) -> PlanPiece | None:
        """Compute the next piece of an epoch; None at its end, or on failure."""
        plan, first = published.plan, published.known
        try:
            if plan is None or first >= plan.steps:
                return None
            published.total = plan.steps
            last = plan.reach(first, samples)
            if not plan.ready(last):  # entries drawn one by one cost more
                last = plan.reach(first, samples // plan.stream.spread)
            indices, ends = plan.cut(first, last)
            objects, counts = self._objects(indices.astype(np.int64))
            if np.array_equal(objects, indices):
                objects = indices  # mostly a view of the permutation, which is kept anyway
            stops = np.zeros(len(counts) + 1, np.int64)
            np.cumsum(counts, out=stops[1:])
            return PlanPiece(first, self._end, indices, ends, objects, stops[ends])
        except Exception:  # noqa: BLE001  user code may run here; a read raises it again
            _log.debug("the plan of an epoch cannot be computed", exc_info=True)
            return None

    def _extend(self, published: PublishedEpoch, piece: PlanPiece) -> bool:
        """Send a piece; its steps follow those published before."""
        self._end = piece.step + len(piece.ends)  # first: a finaliser may cancel it meanwhile
        self._sent += len(piece.indices)
        self._held.append((published.epoch, piece, not published.planned))
        sent = self._send_held()
        if sent:
            published.pieces.append(piece)
        return sent

    def _send_held(self) -> bool:
        """Send all pieces, unless they wait for proof; False if the daemon is lost."""
        while self._held and (self._allowed() or 0) >= 0:
            epoch, piece, unplanned = self._held.pop(0)
            if not self._session.extend(
                epoch, piece.step, piece.objects, piece.stops, unplanned=unplanned
            ):
                self._held.clear()
                self._drop()
                return False
        return True

    # --- the planner thread -------------------------------------------------------------------

    def _start(self) -> None:
        """Publish small plans at once; start the planner thread for large ones."""
        while self._small and self._publish(SIZES.whole):
            pass
        with self._lock:
            if self._next() is None or self._thread is not None:
                return
            self._threadless = not self._thread_safe
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
        while (published := self._next_or_end()) is not None:
            if len(marks) == marks.maxlen and self._session.words[KNOWN] < marks[0] <= self._end:
                time.sleep(_POLL_S)
                continue
            if published.plan is not None:
                published.plan.draw()  # 0.4 s at 14 M samples; the trainer publishes meanwhile
            self._publish(SIZES.thread)
            marks.append(self._end)

    def _next_or_end(self) -> PublishedEpoch | None:
        """Return the epoch to publish; None if there is none, which ends the thread."""
        with self._lock:
            published = self._next()
            # When Python exits, the main thread has ended and waits for this thread.
            goes_on = self._session.alive and threading.main_thread().is_alive()
            goes_on = goes_on and not self._paused
            if published is None or not goes_on:
                self._thread = published = None
            return published
