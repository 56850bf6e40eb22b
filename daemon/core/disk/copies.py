"""What the node's disk has of each dataset, what is written to it, and what leaves it. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from creel.cache.disk.records import room_nbytes
from creel.cache.memory.free_ranges import must
from creel.daemon.core.disk.search import Predicate, Walk
from creel.daemon.core.events import DropFromDisk
from creel.policies.arrays import NONE, Index, Ints, Mask, unique
from creel.policies.cluster.homes import FOR_PEERS
from creel.policies.eviction.policy import FETCHING, NOT_STORED, OVERDUE, RESIDENT, STORED, STORING
from creel.policies.prefetch import affordable

if TYPE_CHECKING:  # circular import
    from creel.daemon.core.residency import Residency


#: Most bytes being written, as a share of the memory, and in all: they cannot leave meanwhile.
_WRITING_SHARE, _WRITING_NBYTES = 1 / 16, 64 << 20
#: Most objects and bytes of one `SpillObjects`: some ms of a disk.
BATCH_OBJECTS, BATCH_NBYTES = 256, 4 << 20
#: Most objects that wait to be written; of more, the oldest are forgotten.
_WAITING_OBJECTS = 1 << 16


class DiskTier:
    """The node's disk: how large it is, and what is being written. `nbytes` 0: there is none."""

    def __init__(self, memory: int) -> None:
        """memory: bytes of the arena."""
        self.nbytes = 0
        self.unit = 1
        self.used = 0  # bytes of all rooms, those being written to included
        self.most_writing = most_writing(memory)
        self.writing = 0  # bytes of objects
        self.slow = False  # whether a write takes too long to wait for it

    def __bool__(self) -> bool:
        return self.nbytes > 0

    @property
    def free(self) -> int:
        return self.nbytes - self.used

    def rooms(self, nbytes: Ints) -> Ints:
        """(k,) bytes that objects of these sizes take up."""
        return room_nbytes(nbytes, self.unit)

    def capacity(self, part: float, mean: float) -> int:
        """Bytes of objects of mean size `mean` that this part of the disk holds for retention."""
        return object_nbytes(part * self.nbytes, self.unit, self.most_writing, mean)


def most_writing(memory: int) -> int:
    """Most bytes that are written to disk at a time, given the bytes of memory."""
    return int(min(_WRITING_SHARE * memory, _WRITING_NBYTES))


def object_nbytes(disk: float, unit: int, writing: int, mean: float) -> int:
    """Bytes of objects of mean size `mean` that a disk holds beside the memory.

    Args:
        disk: bytes; unit: of which records take whole ones.
        writing: bytes that are on their way, which are in both memory and disk.
    """
    room = int(room_nbytes(np.array([int(mean)]), unit)[0])
    return max(int(disk * mean / room) - 2 * writing, 0)


class DiskCopies:
    """What the disk has of one dataset.

    Attributes:
        state: (n,) NOT_STORED, STORING or STORED; one byte per object, where there is a disk.
        hopeless: whether memory needs room, and nothing can be written to make it.
        refused: whether a write failed, and not for lack of room: nothing more is written.
    """

    def __init__(self, residency: Residency, tier: DiskTier) -> None:
        n = len(residency)
        self.state: NDArray[np.uint8] = np.broadcast_to(np.uint8(NOT_STORED), n)
        self.objects = 0
        self.nbytes = 0  # of rooms
        self.storing = 0  # objects being written
        self.hopeless = self.refused = False
        self._residency = residency
        self._tier = tier
        self._loose: deque[Index] = deque()  # released, and not looked at yet
        self._waiting = 0  # objects in there
        self._walks = [Walk(n) for _ in range(5)]
        self._clean, self._dirty, self._idle, self._twice, self._any = self._walks
        self.opened()

    def opened(self) -> None:
        """The disk was opened or lost."""
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
            self._residency.emit(DropFromDisk(self._residency.name, ids.astype(np.int32)))
            self.state[ids] = NOT_STORED
            self._count(ids, -1)
            self.changed(len(ids))

    def changed(self, objects: int) -> None:
        """Note that `objects` changed state: walks that found nothing may find some now."""
        for walk in self._walks:
            walk.changes += objects

    def lost_files(self, files: NDArray[np.int32]) -> None:
        """These files have changed."""
        for first, last in map(self._residency.versions.objects, files.tolist()):
            self.lost(first + np.flatnonzero(self.state[first:last] == STORED))

    def lost_all(self) -> None:
        """Nothing is on disk any more."""
        self.lost(np.flatnonzero(self.state == STORED))

    def completes(self, resident: int) -> bool:
        """Whether memory, given its number of residents, and disk hold (nearly) all objects."""
        return self.objects > 0 and self.objects + resident >= len(self.state)

    def closed(self) -> None:
        """The dataset is removed; what is on disk stays there."""
        self._tier.used -= self.nbytes

    def _count(self, ids: Index, sign: int) -> None:
        nbytes = int(self._tier.rooms(self._residency.length[ids]).sum())
        self.objects += sign * len(ids)
        self.nbytes += sign * nbytes
        self._tier.used += sign * nbytes

    # --- who may leave memory --------------------------------------------------------------------

    def clean(self, k: int, step: int) -> Index:
        """Up to k residents that are on disk, too, due after `step`, those due last first.

        For peers whatever no reader needs now: it comes back from disk.
        """
        residency = self._residency

        def matches(at: Index | slice) -> Mask:
            found: Mask = (residency.state[at] == RESIDENT) & (self.state[at] == STORED)
            found &= residency.pins[at] == 0
            return found

        return self._clean.take(
            k, matches, self._residency.policy.due, None if step == FOR_PEERS else step
        )

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
        while self._loose:
            ids = self._loose.popleft()
            self._waiting -= len(ids)
            ids = unique(ids[self._writable(ids)])
            if len(ids):
                ids = ids[self._residency.policy.keeps(ids)]
            k = self._fitting(ids, nbytes, room)
            if k < len(ids):
                self._loose.appendleft(ids[k:])
                self._waiting += len(ids) - k
            if k or len(ids):
                return ids[:k]
        return NONE

    def next_due_last(self, nbytes: int, step: int) -> Index:
        """Objects to write so that they may leave memory, `nbytes` at most: those due last.

        Only what is due after `step`, as `clean` asks for: nothing else makes room for that step.
        """
        ids = self._dirty.take(BATCH_OBJECTS, self._writable, self._residency.policy.due, step)
        if len(ids):
            ids = ids[self._residency.policy.keeps(ids)]
        return ids[: self._fitting(ids, nbytes, 1 << 62)]

    def _writable(self, at: Index | slice) -> Mask:
        """(k,) whether each is resident, may leave, is not on disk, and its version is known.

        What a storage without versions gave would be served after a restart whatever became of it.
        """
        residency = self._residency
        found: Mask = (residency.state[at] == RESIDENT) & (self.state[at] == NOT_STORED)
        found &= residency.pins[at] == 0
        where = np.flatnonzero(found)
        found[where] = residency.versions.of(self._ids(at)[where]) > 0
        return found

    def _ids(self, at: Index | slice) -> Index:
        """(k,) ids of the objects that a predicate is asked about."""
        return np.arange(*at.indices(len(self.state))) if isinstance(at, slice) else at

    def _fitting(self, ids: Index, nbytes: int, room: int) -> int:
        """How many objects, from the first on, are `nbytes` at most and fit into `room`."""
        length = self._residency.length[ids]
        k = affordable(length, nbytes)
        if not k and not self._tier.writing:
            k = 1
        return min(k, affordable(self._tier.rooms(length), max(room, 0)), BATCH_OBJECTS)

    # --- who leaves the disk ---------------------------------------------------------------------

    def make_room(self, nbytes: int) -> None:
        """Remove what nobody keeps, then what memory holds and is due soonest, from the disk."""
        residency = self._residency
        if not residency.policy.replaces:
            return

        def twice(at: Index | slice) -> Mask:
            found: Mask = (self.state[at] == STORED) & (residency.state[at] == RESIDENT)
            return found

        freed = self.drop_idle(nbytes)
        self._leave(nbytes - freed, self._twice, twice, lambda ids: -residency.policy.due(ids))

    def drop_idle(self, nbytes: int) -> int:
        """Remove up to about `nbytes` that nobody keeps from the disk; bytes freed."""
        policy = self._residency.policy
        if not policy.replaces:
            return 0

        def idle(at: Index | slice) -> Mask:
            found = self._settled(at)
            where = np.flatnonzero(found)
            found[where] = ~policy.keeps(self._ids(at)[where])
            return found

        return self._leave(nbytes, self._idle, idle, self._residency.policy.due)

    def unwritten(self) -> tuple[Index, Index]:
        """Residents that are not on disk, and may be: those kept, and the others; due next first.

        Also pinned ones: for the daemon's end, when nothing leaves memory any more.
        """
        residency = self._residency
        ids = np.flatnonzero((residency.state == RESIDENT) & (self.state == NOT_STORED))
        ids = ids[residency.versions.of(ids) > 0]
        ids = ids[residency.policy.due(ids).argsort(kind="stable")]
        kept = residency.policy.keeps(ids)
        return ids[kept], ids[~kept]

    def give(self, nbytes: int) -> None:
        """Remove about `nbytes` from the disk for another dataset: what is due last."""
        self._leave(nbytes, self._any, self._settled, self._residency.policy.due)

    def _settled(self, at: Index | slice) -> Mask:
        """(k,) whether each is on disk, and not being read from there."""
        state = self._residency.state[at]
        coming = (state == FETCHING) | (state == OVERDUE)
        found: Mask = (self.state[at] == STORED) & ~coming
        return found

    def _leave(
        self, nbytes: int, walk: Walk, matches: Predicate, due: Callable[[Index], Ints]
    ) -> int:
        """Remove objects of a kind from the disk; bytes freed."""
        if nbytes <= 0:
            return 0
        before = self._tier.free
        room = int(self._tier.rooms(np.array([int(self._residency.mean)]))[0])
        self.lost(walk.take(-(-nbytes // max(room, 1)) + 1, matches, due))
        return self._tier.free - before

    def check(self, storing: Index) -> None:
        """Raise IllegalEventError unless states and sums are right; `storing`: being written."""
        residency = self._residency
        stored = np.flatnonzero(self.state == STORED)
        must(len(stored) == self.objects, "objects on disk are miscounted")
        must(bool((residency.length[stored] >= 0).all()), "an object of unknown length is on disk")
        must(int(self._tier.rooms(residency.length[stored]).sum()) == self.nbytes, "bytes on disk")
        here = np.flatnonzero(self.state == STORING)
        must(np.array_equal(here, np.sort(storing)), "being written, and not, or twice")
        must(len(here) == self.storing, "what is being written is miscounted")
        must(
            bool((residency.state[here] == RESIDENT).all()),
            "what is being written is not in memory",
        )
