"""The disk tier: which residents are written to disk, and what leaves the disk for them. Pure.

Memory and disk together hold what retention keeps. While the disk has room, whatever is kept is
written to it as soon as it was read: a resident that is on disk, too, can leave memory at any time
without loss, and all that was written outlives the daemon. Once the disk is full, residents are
written only where memory needs room, those due last first, in the room of what nobody keeps, and of
what memory holds and is due soonest: so every object is in one place only, and memory has what is
due next.

A reader waits for a write that makes room, a few ms. It does not wait for a disk that is too slow,
or hangs: what that cannot take in time is lost, and read again from the source.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from creel.cache.disk.records import room_nbytes
from creel.cache.memory.free_ranges import must
from creel.daemon.core.events import DropFromDisk, SpillObjects
from creel.policies.eviction import (
    FETCHING,
    NOT_STORED,
    OVERDUE,
    RESIDENT,
    STORED,
    STORING,
)
from creel.policies.eviction_policy import NONE, joined
from creel.policies.masks import unique
from creel.policies.prefetch import affordable

if TYPE_CHECKING:  # circular import
    from creel.daemon.core.residency import Residency

Index = NDArray[np.intp]
Sizes = NDArray[np.int64]

#: Most bytes being written, as a share of the memory, and in all: they cannot leave meanwhile.
_WRITING_SHARE, _WRITING_NBYTES = 1 / 16, 64 << 20
#: Most objects and bytes of one `SpillObjects`: some ms of a disk.
_BATCH_OBJECTS, _BATCH_NBYTES = 256, 4 << 20
#: Nobody waits for a disk that takes longer for a batch, in seconds: 16 MB/s.
_SLOW_S = 0.25
#: Most objects that wait to be written; of more, the oldest are forgotten.
_WAITING_OBJECTS = 1 << 16
#: Objects looked at together, and how often in one call, in search of some kind of object; of those
#: found, the part (1/n) that is due last is used, and at least so many.
_CHUNK, _CHUNKS = 1 << 16, 4
_BEST_PART, _BEST = 4, 64
#: After so many changes a search that found nothing is repeated; sooner where it is cheap.
_CHANGES = 256

#: (k,) or a slice -> (k,) whether each object is of some kind.
_Kind = Callable[[Index | slice], NDArray[np.bool_]]


class DiskTier:
    """The node's disk: how large it is, and what is being written. `nbytes` 0: there is none."""

    def __init__(self, memory: int) -> None:
        """memory: bytes of the arena."""
        self.nbytes = 0
        self.unit = 1
        self.used = 0  # bytes of all rooms, those being written to included
        self.most_writing = int(min(_WRITING_SHARE * memory, _WRITING_NBYTES))
        self.writing = 0  # bytes of objects
        self.slow = False  # whether a write takes too long to wait for it

    def __bool__(self) -> bool:
        """Whether there is a disk."""
        return self.nbytes > 0

    @property
    def free(self) -> int:
        """Bytes that no record takes."""
        return self.nbytes - self.used

    def rooms(self, nbytes: Sizes) -> Sizes:
        """(k,) bytes that objects of these sizes take up."""
        return room_nbytes(nbytes, self.unit)

    def capacity(self, part: float, mean: float) -> int:
        """Bytes of objects of mean size `mean` that this part of the disk holds for retention."""
        if not self:
            return 0
        room = int(self.rooms(np.array([int(mean)]))[0])
        # What is on its way is in both memory and disk.
        return max(int(part * self.nbytes * mean / room) - 2 * self.most_writing, 0)


class DiskCopies:
    """What the disk has of one dataset.

    Attributes:
        state: (n,) NOT_STORED, STORING or STORED; one byte per object, where there is a disk.
        hopeless: whether memory needs room, and nothing can be written to make it.
    """

    def __init__(self, residency: Residency, tier: DiskTier) -> None:
        n = len(residency)
        self.state: NDArray[np.uint8] = np.broadcast_to(np.uint8(NOT_STORED), n)
        self.objects = 0
        self.nbytes = 0  # of rooms
        self.storing = 0  # objects being written
        self.hopeless = False
        self._h = residency
        self._tier = tier
        self._loose: deque[Index] = deque()  # released, and not looked at yet
        self._waiting = 0  # objects in there
        self._walks = [_Walk(n) for _ in range(5)]
        self._clean, self._dirty, self._idle, self._twice, self._any = self._walks
        self.opened()

    def opened(self) -> None:
        """There is a disk now, or perhaps not."""
        if self._tier and not self.state.flags.writeable:
            self.state = np.zeros(len(self.state), np.uint8)

    @property
    def column(self) -> NDArray[np.uint8] | None:
        """The states, where there is a disk."""
        return self.state if self._tier else None

    # --- what is on disk -------------------------------------------------------------------------

    def found(self, ids: Index) -> None:
        """Objects, not on disk so far, are there; their lengths are known."""
        if not self._tier:
            return
        self.state[ids] = STORED
        self._count(ids, 1)
        self.changed(len(ids))

    def lost(self, ids: Index) -> None:
        """Objects that are on disk, as far as known, are not, or are of no use there."""
        ids = ids[self.state[ids] == STORED]
        if len(ids):
            self._h.emit(DropFromDisk(self._h.name, ids.astype(np.int32)))
            self.state[ids] = NOT_STORED
            self._count(ids, -1)
            self.changed(len(ids))

    def changed(self, objects: int) -> None:
        """So many objects are of another kind than before: what was not to be found may be now."""
        for walk in self._walks:
            walk.changes += objects

    def lost_files(self, files: NDArray[np.int32]) -> None:
        """These files have changed."""
        for first, last in map(self._h.versions.objects, files.tolist()):
            self.lost(first + np.flatnonzero(self.state[first:last] == STORED))

    def lost_all(self) -> None:
        """Nothing is on disk any more."""
        self.lost(np.flatnonzero(self.state == STORED))

    def completes(self, resident: int) -> bool:
        """Whether memory, with so many residents, and disk hold (nearly) all objects."""
        return self.objects > 0 and self.objects + resident >= len(self.state)

    def closed(self) -> None:
        """The dataset is removed; what is on disk stays there."""
        self._tier.used -= self.nbytes

    def _count(self, ids: Index, sign: int) -> None:
        nbytes = int(self._tier.rooms(self._h.length[ids]).sum())
        self.objects += sign * len(ids)
        self.nbytes += sign * nbytes
        self._tier.used += sign * nbytes

    # --- who may leave memory --------------------------------------------------------------------

    def clean(self, k: int, step: int) -> Index:
        """Up to k residents that are on disk, too, due after `step`, those due last first."""
        h = self._h

        def kind(at: Index | slice) -> NDArray[np.bool_]:
            found: NDArray[np.bool_] = (h.life[at] == RESIDENT) & (self.state[at] == STORED)
            found &= h.pins[at] == 0
            return found

        return self._clean.take(k, kind, self._due, step)

    def _due(self, ids: Index) -> NDArray[np.int64]:
        """(k,) each object's next use, on the policy's clock."""
        policy = self._h.policy
        return np.zeros(len(ids), np.int64) if policy is None else policy.due(ids)

    def released(self, ids: Index) -> None:
        """Residents are no longer pinned."""
        if not self._tier:
            return
        self.changed(len(ids))
        self._loose.append(ids)
        self._waiting += len(ids)
        while self._waiting > _WAITING_OBJECTS:
            self._waiting -= len(self._loose.popleft())

    # --- who is written --------------------------------------------------------------------------

    def next_released(self, nbytes: int, room: int) -> Index:
        """Objects to write while the disk has `room`, `nbytes` at most: those read first."""
        policy = self._h.policy
        while self._loose:
            ids = self._loose.popleft()
            self._waiting -= len(ids)
            ids = unique(ids[self._writable(ids)])
            if policy is not None and len(ids):
                ids = ids[policy.keeps(ids)]
            k = self._fitting(ids, nbytes, room)
            if k < len(ids):
                self._loose.appendleft(ids[k:])
                self._waiting += len(ids) - k
            if k or len(ids):
                return ids[:k]
        return NONE

    def next_due_last(self, nbytes: int) -> Index:
        """Objects to write so that they may leave memory, `nbytes` at most: those due last."""
        policy = self._h.policy
        ids = self._dirty.take(_BATCH_OBJECTS, self._writable, self._due)
        if policy is not None and len(ids):
            ids = ids[policy.keeps(ids)]
        return ids[: self._fitting(ids, nbytes, 1 << 62)]

    def _writable(self, at: Index | slice) -> NDArray[np.bool_]:
        """(k,) whether each is resident, may leave, is not on disk, and its version is known.

        What a storage without versions gave would be served after a restart whatever became of it.
        """
        h = self._h
        found: NDArray[np.bool_] = (h.life[at] == RESIDENT) & (self.state[at] == NOT_STORED)
        found &= h.pins[at] == 0
        ids = at if not isinstance(at, slice) else np.arange(*at.indices(len(h)))
        where = np.flatnonzero(found)
        found[where] = h.versions.version[h.versions.files(ids[where])] > 0
        return found

    def _fitting(self, ids: Index, nbytes: int, room: int) -> int:
        """How many objects, from the first on, are `nbytes` at most and fit into `room`."""
        length = self._h.length[ids]
        k = affordable(length, nbytes)
        if not k and not self._tier.writing:
            k = 1
        return min(k, affordable(self._tier.rooms(length), max(room, 0)), _BATCH_OBJECTS)

    # --- who leaves the disk ---------------------------------------------------------------------

    def make_room(self, nbytes: int) -> None:
        """Remove what nobody keeps, then what memory holds and is due soonest, from the disk."""
        h, policy = self._h, self._h.policy
        if policy is None or not policy.replaces:
            return

        def idle(at: Index | slice) -> NDArray[np.bool_]:
            found = self._settled(at)
            ids = at if not isinstance(at, slice) else np.arange(*at.indices(len(h)))
            where = np.flatnonzero(found)
            found[where] = ~policy.keeps(ids[where])
            return found

        def twice(at: Index | slice) -> NDArray[np.bool_]:
            found: NDArray[np.bool_] = (self.state[at] == STORED) & (h.life[at] == RESIDENT)
            return found

        freed = self._leave(nbytes, self._idle, idle, self._due)
        self._leave(nbytes - freed, self._twice, twice, lambda ids: -self._due(ids))

    def give(self, nbytes: int) -> None:
        """Remove about `nbytes` from the disk for another dataset: what is due last."""
        self._leave(nbytes, self._any, self._settled, self._due)

    def _settled(self, at: Index | slice) -> NDArray[np.bool_]:
        """(k,) whether each is on disk, and not being read from there."""
        life = self._h.life[at]
        coming = (life == FETCHING) | (life == OVERDUE)
        found: NDArray[np.bool_] = (self.state[at] == STORED) & ~coming
        return found

    def _leave(
        self, nbytes: int, walk: _Walk, kind: _Kind, due: Callable[[Index], NDArray[np.int64]]
    ) -> int:
        """Remove objects of a kind from the disk; bytes freed."""
        if nbytes <= 0:
            return 0
        before, room = self._tier.free, int(self._tier.rooms(np.array([int(self._h.mean)]))[0])
        self.lost(walk.take(-(-nbytes // max(room, 1)) + 1, kind, due))
        return self._tier.free - before

    def check(self, storing: Index) -> None:
        """Raise IllegalEventError unless states and sums are right; `storing`: being written."""
        h = self._h
        stored = np.flatnonzero(self.state == STORED)
        must(len(stored) == self.objects, "objects on disk are miscounted")
        must(bool((h.length[stored] >= 0).all()), "an object of unknown length is on disk")
        must(int(self._tier.rooms(h.length[stored]).sum()) == self.nbytes, "bytes on disk")
        here = np.flatnonzero(self.state == STORING)
        must(np.array_equal(here, np.sort(storing)), "being written, and not, or twice")
        must(len(here) == self.storing, "what is being written is miscounted")
        must(bool((h.life[here] == RESIDENT).all()), "what is being written is not in memory")


class _Walk:
    """Finds objects of some kind, chunk by chunk of all: of each chunk, those due last first.

    Where none was found in all chunks, it looks again once `changes` objects may have become such.
    """

    def __init__(self, objects: int) -> None:
        self.changes = 0
        self._empty = 0  # chunks in a row in which there was none
        self._objects = objects
        self._hand = 0
        self._found = NONE

    def take(
        self,
        k: int,
        kind: _Kind,
        due: Callable[[Index], NDArray[np.int64]],
        above: int | None = None,
    ) -> Index:
        """Up to k distinct objects that are of this kind now; only those due after `above`."""
        out = []
        for _ in range(_CHUNKS + 1):
            while k > 0 and len(self._found):
                head, self._found = np.split(self._found, [2 * k + 64])
                head = head[kind(head)]
                good = head if above is None else head[due(head) > above]
                out.append(good[:k])
                k -= len(out[-1])
                self._found = np.concatenate([good[len(out[-1]) :], self._found])
            if k <= 0 or not self._look(kind, due):
                break
        return np.unique(joined(out)) if len(out) > 1 else joined(out)

    def _look(self, kind: _Kind, due: Callable[[Index], NDArray[np.int64]]) -> bool:
        """Look into the next chunk; False where it is known that there is none in any."""
        if self._empty * _CHUNK >= self._objects:
            if self.changes < min(_CHANGES, 1 + self._objects // 1024):
                return False
            self._empty = 0
        if not self._empty:
            self.changes = 0
        stop = min(self._hand + _CHUNK, self._objects)
        ids = self._hand + np.flatnonzero(kind(slice(self._hand, stop)))
        self._hand = stop if stop < self._objects else 0
        order = np.argsort(due(ids), kind="stable")[::-1]
        self._found = ids[order[: max(len(ids) // _BEST_PART, _BEST)]]
        self._empty = 0 if len(ids) else self._empty + 1
        return True


@dataclass(frozen=True, slots=True, eq=False)
class _Spill:
    """Objects being written, and the room that was taken for them."""

    residency: Residency
    ids: Index
    room: int
    nbytes: int
    begun: float
    void: set[int]  # objects of changed files: not to be kept


class Spilling:
    """All that is being written to disk.

    Args:
        tier: the disk; residencies: all datasets, a live view.
        part: the part of the node's memory and disk that a dataset may claim.
    """

    def __init__(
        self,
        tier: DiskTier,
        residencies: dict[str, Residency],
        part: Callable[[Residency], float],
    ) -> None:
        self._tier = tier
        self._part = part
        self._residencies = residencies
        self._spills: dict[int, _Spill] = {}
        self._last = 0
        self._now = 0.0
        self._landed = 0.0  # when the disk was done with a batch last

    def look(self, now: float) -> None:
        """Begin an event."""
        self._now = now
        queued = min((s.begun for s in self._spills.values()), default=now)
        self._tier.slow = now - max(queued, self._landed) > _SLOW_S

    def opened(self, nbytes: int, unit: int) -> None:
        """The disk has so many bytes now; where it is lost, nothing is there any more."""
        if not nbytes:
            for h in self._residencies.values():
                h.disk.lost_all()
        if not self._tier.used:
            self._tier.unit = unit
        self._tier.nbytes = nbytes
        for h in self._residencies.values():
            h.disk.opened()

    def start(self, lacking: Collection[Residency], reading: Callable[[Residency], bool]) -> bool:
        """Begin to write what should be.

        Args:
            lacking: datasets that found no room in memory.
            reading: whether objects of a dataset are being read from disk, whose room there may be
                taken once they are in memory.

        Returns:
            Whether nothing can be written for one of them, so that it need not wait.
        """
        if not self._tier:
            return False
        for h in self._residencies.values():
            h.disk.hopeless = False
            while (left := self._left()) and self._tier.free > 0:
                ids = h.disk.next_released(left, self._tier.free)
                if not len(ids):
                    break
                self._write(h, ids)
        for h in lacking:
            if not h.disk.storing:
                h.disk.hopeless = not self._make_writable_room(h, reading)
        return any(h.disk.hopeless for h in lacking)

    def _left(self) -> int:
        """Bytes that may be written in one go now."""
        return min(self._tier.most_writing - self._tier.writing, _BATCH_NBYTES)

    def _make_writable_room(self, h: Residency, reading: Callable[[Residency], bool]) -> bool:
        """Write what is due last, so that it may leave; False where nothing can be, or soon."""
        left = self._left()
        if left <= 0:
            return True
        ids = h.disk.next_due_last(left)
        if not len(ids):
            return False
        lack = int(self._tier.rooms(h.length[ids]).sum()) - self._tier.free
        if lack > 0:
            self._make_room(h, lack)
        rooms = self._tier.rooms(h.length[ids])
        ids = ids[: affordable(rooms, max(self._tier.free, 0))]
        if len(ids):
            self._write(h, ids)
            return True
        return h.policy is not None and h.policy.replaces and reading(h)

    def _make_room(self, h: Residency, nbytes: int) -> None:
        """Free about `nbytes` on disk.

        First of datasets that nobody reads, then, where this one has less than its part, of those
        that have more than theirs, last of this one's own.
        """
        enough = self._tier.free + nbytes
        others = [other for other in self._residencies.values() if other is not h]
        for other in others:
            if not other.active and self._tier.free < enough:
                other.disk.lost_all()
        if self._excess(h) < 0:
            for other in others:
                lack = min(enough - self._tier.free, self._excess(other))
                if other.active and lack > 0:
                    other.disk.give(lack)
        if self._tier.free < enough:
            h.disk.make_room(enough - self._tier.free)

    def _excess(self, h: Residency) -> int:
        """Bytes on disk beyond what a dataset may claim."""
        return h.disk.nbytes - int(self._part(h) * self._tier.nbytes)

    def _write(self, h: Residency, ids: Index) -> None:
        length = h.length[ids]
        room, nbytes = int(self._tier.rooms(length).sum()), int(length.sum())
        spill = _Spill(h, ids, room, nbytes, self._now, set())
        h.disk.state[ids] = STORING
        h.disk.storing += len(ids)
        h.pin(ids, distinct=True)
        self._tier.used += spill.room
        self._tier.writing += spill.nbytes
        self._last += 1
        self._spills[self._last] = spill
        version = h.versions.version[h.versions.files(ids)]
        what = ids.astype(np.int32), h.places(ids), length, version
        h.emit(SpillObjects(self._last, h.name, *what))

    def cancel(self, h: Residency, ids: Index) -> None:
        """These objects leave memory although some may be being written: that will be of no use."""
        if not h.disk.storing:
            return
        for spill in (s for s in self._spills.values() if s.residency is h):
            gone = np.isin(spill.ids, ids)
            gone[gone] = h.disk.state[spill.ids[gone]] == STORING
            if gone.any():
                spill.void.update(spill.ids[gone].tolist())
                self._release(h, spill.ids[gone])
                # Carried out after this spill, and before another one of these objects.
                h.emit(DropFromDisk(h.name, spill.ids[gone].astype(np.int32)))

    def _release(self, h: Residency, ids: Index) -> None:
        h.disk.state[ids] = NOT_STORED
        h.disk.storing -= len(ids)
        h.unpin(ids, distinct=True)

    def landed(self, number: int, stored: NDArray[np.bool_]) -> None:
        """A spill ended: (k,) whether each object is on disk now."""
        spill = self._spills.pop(number, None)
        if spill is None:
            return
        self._landed = self._now
        h = spill.residency
        self._tier.used -= spill.room
        self._tier.writing -= spill.nbytes
        void = np.array([i in spill.void for i in spill.ids.tolist()], np.bool_)
        ids, stored = spill.ids[~void], stored[~void]
        self._release(h, ids)
        h.disk.found(ids[stored])
        if not stored.all():  # it is full, however large it was said to be
            self._tier.nbytes = min(self._tier.nbytes, self._tier.used)
        h.counts["spilled"] += int(np.count_nonzero(stored))
        h.counts["spilled_nbytes"] += int(h.length[ids[stored]].sum())
        ids = ids[h.pins[ids] == 0]
        if h.policy is not None and len(ids):
            h.policy.released(ids)

    def ids(self, h: Residency) -> Index:
        """(k,) objects of a dataset that are being written."""
        own = [
            s.ids[[i not in s.void for i in s.ids.tolist()]]
            for s in self._spills.values()
            if s.residency is h
        ]
        return joined([NONE, *own])

    def check(self) -> None:
        """Raise IllegalEventError unless the sums are right."""
        spills = self._spills.values()
        must(self._tier.writing == sum(s.nbytes for s in spills), "bytes being written")
        held = sum(h.disk.nbytes for h in self._residencies.values())
        must(self._tier.used == held + sum(s.room for s in spills), "rooms on disk")
        for h in self._residencies.values():
            h.disk.check(self.ids(h))
