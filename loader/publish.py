"""PlanPublisher: tells the daemon which objects the steps of an epoch will read, in the background.

The first steps are told at once, by the trainer's own thread; a thread makes and tells the rest
piece by piece, this epoch's and then the next ones'. A trainer who is quicker than that, or in a
process that gets no more threads, tells the steps that it needs itself. So nobody waits for a plan.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from creel.cache.board import KNOWN
from creel.forks import at_fork
from creel.loader.foresee import Plan, same_batch
from creel.loader.session import Session

_log = logging.getLogger("creel.loader")

_NONE = np.empty(0, np.int32)
#: Samples that the trainer's thread tells at a time: about 1 ms (benchmarks/planning.py).
_HERE = 1 << 12
#: The same where the person's own code says what a sample is made of, a call for each.
_OWN = 1 << 10
#: Plans up to this are told at once: 3 ms, and no thread.
_SMALL = 1 << 15
#: Samples of one piece of the thread's: large, as each array operation may wait 5 ms for a trainer
#: that does not let go of the interpreter. The session sends it in parts.
_PIECE = 1 << 17
#: The same while a permutation is being drawn.
_NEAR = 1 << 14
#: How far ahead of the trainer the thread goes, in samples, while a permutation is being drawn:
#: its entries one by one cost four times as much as out of the whole.
_LEAD = 1 << 17
#: Pieces that the daemon has not taken in yet, at most.
_FLYING = 2
#: numpy counts so many without letting other threads go on: 0.3 ms.
_COUNTED = 1 << 22
_LOOK_S = 0.002  # from one look whether something is there to the next
#: A trainer that tells a plan all by itself spends so long on it for each batch, in ns.
_SLICE_NS = 2_000_000


class Piece(NamedTuple):
    """Some steps of a plan: `indices[ends[i-1]:ends[i]]` are the samples of batch `first + i`."""

    first: int
    indices: NDArray[np.int32]
    ends: NDArray[np.int64]
    objects: NDArray[np.int32]
    stops: NDArray[np.int64]  # the same for objects

    @property
    def last(self) -> int:
        """One more than the last batch."""
        return self.first + len(self.ends)

    def after(self, first: int) -> Piece:
        """Without the batches before `first`."""
        k = first - self.first
        if k <= 0:
            return self
        at, stop = self.ends[k - 1], self.stops[k - 1]
        return Piece(
            first, self.indices[at:], self.ends[k:] - at, self.objects[stop:], self.stops[k:] - stop
        )

    def samples(self, first: int, last: int) -> NDArray[np.int32]:
        """Of batches [first, last)."""
        return self.indices[
            _start(self.ends, first - self.first) : self.ends[last - 1 - self.first]
        ]

    def ids(self, first: int, last: int) -> NDArray[np.int32]:
        """Objects of batches [first, last)."""
        return self.objects[
            _start(self.stops, first - self.first) : self.stops[last - 1 - self.first]
        ]


def _start(ends: NDArray[np.int64], i: int) -> int:
    return int(ends[i - 1]) if i else 0


class Told:
    """An epoch, as far as the daemon was told of it: its batch i is step `origin + i`.

    The publisher adds pieces; the trainer reads them, and drops those that it has passed.

    Attributes:
        origin: None before anything was told.
        known: batches below are told (or were skipped).
        total: no batch from here on can be told; a guess too high until the plan was opened.
        given: batches below were asked for by the trainer; `begun`: it is in this epoch.
        repeats: whether some object is read more than once, where all of it is told.
        like: tell it only where this other epoch `repeats`.
    """

    def __init__(self, plan: Plan, epoch: int, skip: int = 0, like: Told | None = None) -> None:
        self.plan = plan
        self.epoch = epoch
        self.origin: int | None = None
        self.known = self.given = skip
        self.total = sys.maxsize
        self.begun = False
        self.repeats = False
        self.like = like
        self._pieces: list[Piece] = []
        self._found: Piece | None = None
        self._seen: NDArray[np.bool_] | None = None  # objects that it reads
        self._unseen: list[NDArray[np.int32]] = []  # of what is told, not yet in `_seen`
        self._seeing = threading.Lock()
        self._distinct = self._reads = 0

    @property
    def complete(self) -> bool:
        """Whether all of it is told."""
        return self.known >= self.total

    @property
    def stop(self) -> int:
        """One more than the last step."""
        return self.step(self.total)

    def step(self, i: int) -> int:
        """The session's step of batch i."""
        return (self.origin or 0) + i

    def open(self) -> None:
        """Know how many batches there are."""
        self.total = min(self.total, self.plan.steps)

    def reads(self, i: int, index: object) -> bool:
        """Whether batch i is told, and to be of exactly these samples."""
        piece = self._piece(i)
        return piece is not None and same_batch(piece.samples(i, i + 1), index)

    def ids(self, i: int) -> NDArray[np.int32]:
        """(k,) objects of batch i."""
        piece = self._piece(i)
        return _NONE if piece is None else piece.ids(i, i + 1)

    def take(self, first: int, last: int) -> list[tuple[int, NDArray[np.int32]]]:
        """(samples, objects) of batches [first, last), piece by piece; what is before goes."""
        out = []
        for piece in self._pieces[: self._at(last - 1) + 1]:
            a, b = max(first, piece.first), min(last, piece.last)
            if a < b:
                out.append((len(piece.samples(a, b)), piece.ids(a, b)))
        del self._pieces[: max(self._at(last), 0)]
        return out

    def see(self, piece: Piece, size: int, *, later: bool) -> None:
        """The daemon is about to be told this, by one thread or two; of `size` objects.

        later: there is time before the next piece or after it; this takes fresh memory.
        """
        last = piece.last >= self.total
        with self._seeing:
            if self.complete:  # by the other thread, just now
                return
            self._unseen.append(piece.objects)
            if later and not last:
                return
            if self._seen is None:
                self._seen = np.zeros(size, np.bool_)
            while self._unseen:
                self._seen[self._unseen.pop()] = True
            if last:
                parts = [self._seen[a : a + _COUNTED] for a in range(0, size, _COUNTED)]
                self._distinct = sum(int(np.count_nonzero(part)) for part in parts)

    def add(self, piece: Piece) -> None:
        """The daemon was told this."""
        self._pieces.append(piece)
        self._reads += len(piece.objects)
        self.known = piece.last
        if self.complete:
            with self._seeing:
                self.repeats = self._distinct < self._reads
                self._seen = None

    def _at(self, i: int) -> int:
        return bisect_right(self._pieces, i, key=lambda piece: piece.first) - 1

    def _piece(self, i: int) -> Piece | None:
        found = self._found  # mostly it is the same as last time
        if found is None or not found.first <= i < found.last:
            at = self._at(i)
            found = self._found = self._pieces[at] if at >= 0 else None
        return found if found is not None and i < found.last else None


class PlanPublisher:
    """The steps of one session, as the daemon is told of them. Its methods are the trainer's.

    One lock guards everything here but what a `Told` says of itself: whoever holds it may extend or
    truncate the session, and nobody else does. Pieces are made without it. `_version` tells a piece
    that was made for a plan which is void by now.
    """

    def __init__(
        self,
        session: Session,
        objects: Callable[[NDArray[np.int64]], tuple[NDArray[np.int32], NDArray[np.int64]]],
        *,
        apart: bool,
    ) -> None:
        """objects: as `Binding.objects`; apart: whether another thread may call it."""
        self._session = session
        self._objects = objects
        self._apart = apart
        self._threads = self._few = False  # of the epoch begun: tell it in a thread, or at once
        self._end = 0  # the next step that the daemon has to be told
        self._epochs: list[Told] = []  # not told completely, in order
        self._version = 0
        self._renew()
        _publishers.add(self)

    def _renew(self) -> None:
        """What belongs to one process."""
        # A finaliser may end an epoch while this thread is inside: hence reentrant.
        self._lock = threading.RLock()
        self._saying = False
        self._thread: threading.Thread | None = None
        self._alone = False  # no thread: the trainer tells the plan all by itself

    def forget(self) -> None:
        """In a forked child: nothing is told from here."""
        self._renew()
        self._drop()

    # --- what the trainer asks for ------------------------------------------------------------

    def begin(self, plan: Plan, epoch: int, skip: int) -> Told | None:
        """Tell of an epoch, `skip` batches after its start, from the session's next step on."""
        told = Told(plan, epoch, skip)
        told.open()
        if told.complete:
            return None
        with self._lock:
            told.origin, told.begun = self._end - skip, True
            self._epochs.append(told)
        self._threads = self._apart and plan.apart
        self._few = plan.samples <= (_SMALL if self._threads else _HERE)
        if not plan.at_once:
            self._publish(self._here)
        self._go()
        return told

    @property
    def _here(self) -> int:
        return _HERE if self._threads else _OWN

    def add(self, plan: Plan, epoch: int, like: Told | None = None) -> Told:
        """Tell of another epoch after all that was told, which is like the one that was begun.

        like: as `Told` has it.
        """
        told = Told(plan, epoch, like=like)
        with self._lock:
            self._epochs.append(told)
        self._go()
        return told

    def turns(self, told: Told, step: int) -> bool:
        """An epoch of `add` begins at `step`: whether that is where it was or will be told."""
        with self._lock:
            if told.origin is None and told in self._epochs and self._end == step:
                told.origin = step
            told.begun = told.origin == step
            return told.begun

    def unlike(self, told: Told) -> bool:
        """Whether an epoch was not to be told, for want of repeats; then it never will."""
        with self._lock:
            void = told.origin is None and told.like is not None
            if void and told in self._epochs:
                self._epochs.remove(told)
            return void

    def reach(self, told: Told, i: int) -> bool:
        """Have batch i told now; False when it cannot be."""
        told.given = i + 1
        if i < told.known:
            return i < told.total
        while told.known <= i < told.total:
            if not self._publish(self._here):
                break  # unless the thread has just told the last of it
        if (
            self._thread is None and not self._alone
        ):  # it ends where the daemon stands still for a while
            self._go()
        return i < told.known

    def pump(self) -> None:
        """A batch is done: where there is no thread, go on telling for a moment."""
        until = time.monotonic_ns() + _SLICE_NS if self._alone else 0
        while self._alone and time.monotonic_ns() < until:
            self._alone = self._publish(_OWN)

    def blind(self, epoch: int, objects: NDArray[np.int32]) -> int:
        """Tell of one step that nobody foresaw; its number, or -1. Nothing else is to be told."""
        with self._lock:
            ends = np.array([len(objects)])
            if not self._say(lambda: self._extend(epoch, objects, ends, blind=True)):
                return -1
            return self._end - 1

    def cancel(self, step: int) -> None:
        """Nothing that is told from `step` on is true any more, nor what was still to be told."""
        with self._lock:
            self._drop()
            if self._saying:  # this finaliser runs amid a message of this very thread
                self._session.forget()
            elif step < self._end:
                self._say(lambda: self._truncate(step))

    def stop(self) -> None:
        """The session ends."""
        with self._lock:
            self._drop()

    # --- telling ------------------------------------------------------------------------------

    def _drop(self) -> None:
        self._version += 1
        self._epochs = []
        self._alone = False

    def _say(self, message: Callable[[], bool]) -> bool:
        """Send it, with the lock held; what is half done (Ctrl-C) ends the session."""
        self._saying = True
        try:
            said = message()
        except Exception:  # noqa: BLE001  no memory, or another thread hangs up
            _log.debug("the daemon cannot be told a plan", exc_info=True)
            self._session.forget()
            said = False
        except BaseException:
            self._session.forget()
            self._drop()
            raise
        finally:
            self._saying = False
        if not said:
            self._drop()
        return said

    def _extend(
        self,
        epoch: int,
        objects: NDArray[np.int32],
        ends: NDArray[np.int64],
        *,
        blind: bool = False,
    ) -> bool:
        if not self._session.extend(epoch, self._end, objects, ends, blind=blind):
            return False
        self._end += len(ends)
        return True

    def _truncate(self, step: int) -> bool:
        self._end = step
        return self._session.truncate(step)

    def _next(self) -> Told | None:
        """The epoch to go on with."""
        while self._epochs:
            told = self._epochs[0]
            if not told.complete and (told.like is None or told.like.repeats):
                return told
            del self._epochs[0]
        return None

    def _publish(self, samples: int) -> bool:
        """Make and tell one piece of about so many samples; False when there is nothing to do."""
        with self._lock:
            version, told = self._version, self._next()
            if told is None:
                return False
            first = told.known
        piece = self._made(told, first, samples)
        with self._lock:
            if version != self._version:
                return True
            if piece is None:
                told.total = min(told.total, max(told.known, first))
            elif told.known < piece.last:  # or another thread was quicker
                rest = piece.after(told.known)
                return self._say(lambda: self._tell(told, rest))
            return True

    def _tell(self, told: Told, piece: Piece) -> bool:
        if told.origin is None:
            told.origin = self._end
        if not self._extend(told.epoch, piece.objects, piece.stops):
            return False
        told.add(piece)
        return True

    def _made(self, told: Told, first: int, samples: int) -> Piece | None:
        """The next steps of a plan; None where it cannot be computed after all."""
        try:
            told.open()
            if first >= told.total:
                return None
            last = told.plan.reach(first, samples)
            if not told.plan.ready(last):
                last = told.plan.reach(first, min(samples, _NEAR) // told.plan.spread)
            indices, ends = told.plan.cut(first, last)
            objects, counts = self._objects(indices.astype(np.int64))
            stops = np.zeros(len(counts) + 1, np.int64)
            np.cumsum(counts, out=stops[1:])
            piece = Piece(first, indices, ends, objects, stops[ends])  # a step may read nothing
            told.see(piece, len(self._session.table.offset), later=samples <= _HERE)
        except Exception:  # noqa: BLE001  the person's code may run here; a read raises it again
            _log.debug("cannot tell what an epoch reads", exc_info=True)
            return None
        return piece

    # --- the thread ---------------------------------------------------------------------------

    def _go(self) -> None:
        """See to it that all is told: at once if that is little, else by the thread."""
        while self._few and self._publish(_SMALL):
            pass
        with self._lock:
            if self._next() is None or self._thread is not None:
                return
            self._alone = not self._threads
            if self._alone:
                return
            # No daemon thread: one that comes back from torch while Python ends aborts the process.
            thread = self._thread = threading.Thread(target=self._run, name="creel-planner")
        try:
            thread.start()
        except RuntimeError:  # the system gives no more
            self._thread, self._alone = None, True

    def _run(self) -> None:
        marks: deque[int] = deque(maxlen=_FLYING)
        try:
            while (told := self._due()) is not None:
                if self._awaits(told, marks) and self._publish(_PIECE):
                    marks.append(self._end)
        except Exception:  # noqa: BLE001  the rest is told by the trainer, or not at all
            _log.debug("a plan cannot be told in the background", exc_info=True)
            with self._lock:
                self._thread = None

    def _due(self) -> Told | None:
        """What is to be told; None where there is nothing more to do, and the thread ends."""
        with self._lock:
            told = self._next()
            # Of the main thread is none left when Python is about to end, and waits for this one.
            if told is None or not self._session.alive or not threading.main_thread().is_alive():
                self._thread = told = None
            return told

    def _awaits(self, told: Told, marks: deque[int]) -> bool:
        """Wait a moment; whether the next piece should be made."""
        if len(marks) == _FLYING and self._session.board[KNOWN] < marks[0] <= self._end:
            time.sleep(_LOOK_S)
            return False
        plan, known = told.plan, told.known
        urgent = told.begun and plan.reach(told.given, _LEAD // plan.spread) > known
        if not urgent and not plan.ready(plan.reach(known, _PIECE)):
            plan.draw()
        return True


_publishers: weakref.WeakSet[PlanPublisher] = weakref.WeakSet()


def _forget_inherited() -> None:
    for publisher in list(_publishers):
        publisher.forget()


at_fork(after_in_child=_forget_inherited)
