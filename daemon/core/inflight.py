"""Fetches in flight, within limits; sessions share the fetch of an object. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from creel.cache.memory.pools.free_ranges import NOWHERE, must
from creel.daemon.core.admission import Admission
from creel.daemon.core.events import DISK, SOURCE, Action, FetchObjects
from creel.daemon.core.residency import Residency
from creel.errors import IllegalEventError
from creel.policies.arrays import Index, Ints, Mask, every, some
from creel.policies.eviction.policy import ABSENT, FETCHING, SKIPPED
from creel.policies.prefetch import Window, affordable, portions

#: Share of the objects and bytes in flight that is reserved for stalled readers.
_SPARED = 0.25
#: Once the limit is reached, this share of it must land before more fetches start. Else each object
#: that lands starts one other, and every event is about one object, not hundreds: the silly window
#: syndrome of TCP (RFC 1122, 4.2.3.4). An event costs the loop about 1 ms.
_LANDED = 1 / 8
#: Deadline, in seconds, of a fetch without a reader (`Warm`).
_WHENEVER_S = 3600.0
#: Objects, or positions of a plan, that are fetched together: about one urgency class at 256
#: objects a step.
FETCHED_AT_ONCE = 512
#: Most positions of a plan whose states one pass examines without fetching.
SCANNED_AT_ONCE = 1 << 13


@dataclass(eq=False, slots=True)
class InflightFetch:
    """One fetch: objects, places (NOWHERE: length unknown), lengths and purpose.

    `due` is the step that reads the objects, on the eviction policy's clock; `deadline` in seconds.
    `nbytes` are the total bytes expected, `expected` the part of them that has no room yet.
    """

    residency: Residency
    ids: Index  # (k,) objects
    offset: Ints  # (k,) their places in the arena, or NOWHERE
    length: Ints  # (k,) their bytes, or -1
    due: int  # the step that needs them, on the policy's clock
    begun: float  # monotonic seconds, as `deadline`
    nbytes: int
    expected: int
    generation: int  # see `Versions`
    deadline: float
    origin: int = SOURCE  # where from, as in `FetchObjects`
    cancelled: bool = False  # whether nobody needs them any more

    def only(self, which: Mask) -> InflightFetch:
        """Return the same fetch for a part of its objects; which: (k,)."""
        room = self.ids[which], self.offset[which], self.length[which]
        return replace(self, ids=room[0], offset=room[1], length=room[2])


class Inflight:
    """All fetches that have started and not landed.

    Args:
        emit: takes each action.
    """

    def __init__(
        self, admission: Admission, window: Window, emit: Callable[[Action], None]
    ) -> None:
        self.objects = 0
        self.nbytes = 0
        self._emit = emit
        self._admission = admission
        self._window = window
        self._inflight: dict[int, InflightFetch] = {}
        self._last = 0
        self.generation = 0  # the current one
        self._mark = 0
        admission.busy = self.offsets

    def may_start(self, nbytes: Ints, *, urgent: bool) -> int:
        """Return how many of these fetches may start now; at least one if none is in flight."""
        part = 1.0 if urgent else 1.0 - _SPARED
        most, most_nbytes = self._window.inflight_objects, self._window.inflight_nbytes
        objects = int(part * most) - self.objects
        room = int(part * most_nbytes) - self.nbytes
        k = max(min(len(nbytes), objects, affordable(nbytes, room)), 0)
        if not self._inflight:
            return min(max(k, 1), len(nbytes))
        full = k < len(nbytes) and min(objects / most, room / most_nbytes) < part * _LANDED
        return 0 if full else k

    def may_start_for_peers(self, nbytes: Ints) -> int:
        """Return how many of these fetches may start for peers now.

        Peers have a limit of their own, so that two nodes that wait for each other both advance.
        """
        objects = 2 * self._window.inflight_objects - self.objects
        room = 2 * self._window.inflight_nbytes - self.nbytes
        return max(min(len(nbytes), objects, affordable(nbytes, room)), 0)

    def start(
        self,
        residency: Residency,
        ids: Index,
        offset: Ints,
        length: Ints,
        due: int,
        now: float,
        deadline: float,
        *,
        origin: int = SOURCE,
        generation: int | None = None,
    ) -> None:
        """Start fetches of these objects, all equally urgent.

        generation: the one in which the bytes were requested; None: the current one.
        """
        since = self.generation if generation is None else generation
        if not len(ids):
            return
        residency.move(ids, FETCHING)
        order = ids.argsort()
        ids, length = ids[order], length[order]
        # Rooms of one size are interchangeable; sorted ones allow one write for neighbours.
        offset = np.sort(offset) if residency.pool.same_size else offset[order]
        nbytes, small = residency.expected(length), ids.astype(np.int32)
        guesses = nbytes is not length
        for part in portions(nbytes, self._window):
            self._last += 1
            total = int(nbytes[part].sum())
            guessed = int(nbytes[part][length[part] < 0].sum()) if guesses else 0
            room = offset[part], length[part]
            self._inflight[self._last] = InflightFetch(
                residency,
                ids[part],
                *room,
                due,
                begun=now,
                nbytes=total,
                expected=guessed,
                generation=since,
                deadline=deadline,
                origin=origin,
            )
            self.objects += len(ids[part])
            self.nbytes += total
            self._admission.expected += guessed
            runs = residency.pool.runs(offset[part])
            self._emit(
                FetchObjects(self._last, residency.name, small[part], *room, deadline, runs, origin)
            )

    def land(self, fetch: int, objects: int) -> InflightFetch | None:
        """Remove a fetch that has ended and return it; None if it is unknown.

        Raises:
            IllegalEventError: the fetch does not have `objects` objects.
        """
        pending = self._inflight.get(fetch)
        if pending is None:
            return None
        if len(pending.ids) != objects:
            raise IllegalEventError(f"fetch {fetch} was of {len(pending.ids)} objects")
        del self._inflight[fetch]
        self.objects -= objects
        self.nbytes -= pending.nbytes
        self._admission.expected -= pending.expected
        return pending

    def mark(self) -> None:
        """Begin an event: `abort` undoes all fetches that start from now on."""
        self._mark = self._last

    def abort(self) -> None:
        """Undo the fetches since `mark`, which the shell never received, and free their rooms."""
        for number in [n for n in self._inflight if n > self._mark]:
            pending = self._inflight[number]
            placed = pending.offset != NOWHERE
            pending.residency.give_back(pending.ids[placed], pending.offset[placed])
            pending.residency.move(pending.ids, ABSENT)
            self.land(number, len(pending.ids))

    def warm(self, residency: Residency, now: float) -> None:
        """Load a dataset in order of ids, into free room only and with half the usual limits."""
        while 0 <= residency.warming < len(residency):
            stop = min(residency.warming + FETCHED_AT_ONCE, len(residency))
            ids = residency.warming + np.flatnonzero(
                residency.state[residency.warming : stop] <= SKIPPED
            )
            guess = residency.expected(residency.length[ids])
            k = self.may_start(2 * guess, urgent=False)  # half the limit of sessions
            fit = min(k, affordable(guess, self._admission.free_nbytes))
            length = residency.length[ids[:fit]]
            offset = np.full(fit, NOWHERE, np.int64)
            known = length >= 0
            offset[known] = residency.pool.alloc(length[known])
            placed = (offset != NOWHERE) | (length < 0)
            chosen, offset, length = ids[:fit][placed], offset[placed], length[placed]
            for origin, which in residency.origins(chosen, 0):
                self.start(
                    residency,
                    chosen[which],
                    offset[which],
                    length[which],
                    0,
                    now,
                    now + _WHENEVER_S,
                    origin=origin,
                )
            if fit < k or not every(placed):
                if self._admission.expected:  # a guess may hold more room than needed
                    return
                break  # no room
            if k < len(ids):
                return  # enough in flight
            residency.warming = stop
        residency.warming = -1

    def _all(self, residency: Residency) -> list[InflightFetch]:
        return [f for f in self._inflight.values() if f.residency is residency]

    def find(self, residency: Residency, object_id: int) -> InflightFetch | None:
        """Return the fetch in flight for an object, or None."""
        return next((f for f in self._all(residency) if object_id in f.ids), None)

    def cancel_orphans(self, residency: Residency) -> frozenset[int]:
        """Mark and return the fetches from the source and from peers that no session needs."""
        if residency.warming >= 0:
            return frozenset()
        fetches = self._inflight.items()
        own = ((n, f) for n, f in fetches if f.residency is residency and f.origin >= SOURCE)
        orphans = {n: f for n, f in own if not some(residency.pins[f.ids] > 0)}
        for fetch in orphans.values():
            fetch.cancelled = True
        return frozenset(orphans)

    def from_disk(self, residency: Residency) -> bool:
        """Return whether objects of a dataset are being read from disk."""
        return any(f.origin == DISK for f in self._all(residency))

    def from_peers(self, residency: Residency) -> Index:
        """Return (k,) objects of a dataset that are being fetched from peers."""
        ids = (f.ids for f in self._all(residency) if f.origin >= 0)
        return np.concatenate([np.empty(0, np.intp), *ids])

    def ids(self, residency: Residency) -> Index:
        """Return (k,) objects of a dataset that are in flight."""
        return np.concatenate([np.empty(0, np.intp), *(f.ids for f in self._all(residency))])

    def offsets(self, residency: Residency) -> tuple[Ints, Ints]:
        """Return (k,) places and (k,) lengths that fetches of a dataset write to."""
        own = self._all(residency)
        none = np.empty(0, np.int64)
        offset = np.concatenate([none, *(f.offset for f in own)])
        length = np.concatenate([none, *(f.length for f in own)])
        return offset[offset != NOWHERE], length[offset != NOWHERE]

    def check(self) -> None:
        """Raise IllegalEventError unless the sums are right."""
        inflight = self._inflight.values()
        must(self.objects == sum(len(f.ids) for f in inflight), "objects in flight")
        must(self.nbytes == sum(f.nbytes for f in inflight), "bytes in flight")
        must(self._admission.expected == sum(f.expected for f in inflight), "bytes expected")
