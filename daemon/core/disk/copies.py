"""The objects of each dataset on the node's disk: which are written, and which leave. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from creel.cache.disk.records import room_nbytes
from creel.cache.memory.pools.free_ranges import must
from creel.daemon.core.disk.search import Predicate, Walk
from creel.daemon.core.events import Action, DropFromDisk
from creel.daemon.core.versions import Versions
from creel.policies.arrays import NONE, Index, Ints, Mask, unique
from creel.policies.cluster.homes import FOR_PEERS
from creel.policies.eviction.policy import (
    FETCHING,
    NOT_STORED,
    OVERDUE,
    RESIDENT,
    STORED,
    STORING,
    EvictionPolicy,
)
from creel.policies.prefetch import affordable

#: Most bytes being written, as a share of the memory and in total, as they are pinned meanwhile.
_WRITING_SHARE, _WRITING_NBYTES = 1 / 16, 64 << 20
#: Most objects and bytes of one `SpillObjects`, which takes a disk a few ms.
BATCH_OBJECTS, BATCH_NBYTES = 256, 4 << 20
#: Most objects that wait to be written; beyond that, the oldest are forgotten.
_WAITING_OBJECTS = 1 << 16


class DiskTier:
    """The node's disk: its size and the bytes being written. `nbytes` is 0 if there is no disk."""

    def __init__(self, memory: int) -> None:
        """memory: bytes of the arena."""
        self.nbytes = 0
        self.unit = 1
        self.used = 0  # bytes of all rooms, including those being written to
        self.most_writing = most_writing(memory)
        self.writing = 0  # bytes of the objects being written
        self.slow = False  # whether writes take so long that readers do not wait for them

    def __bool__(self) -> bool:
        return self.nbytes > 0

    @property
    def free(self) -> int:
        return self.nbytes - self.used

    def rooms(self, nbytes: Ints) -> Ints:
        """Return (k,) bytes that objects of these sizes take up on disk."""
        return room_nbytes(nbytes, self.unit)

    def capacity(self, part: float, mean: float) -> int:
        """Return the bytes of objects of size `mean` that a fraction `part` of the disk retains."""
        return object_nbytes(part * self.nbytes, self.unit, self.most_writing, mean)


def most_writing(memory: int) -> int:
    """Return the most bytes that are written to disk at a time, given the bytes of memory."""
    return int(min(_WRITING_SHARE * memory, _WRITING_NBYTES))


def object_nbytes(disk: float, unit: int, writing: int, mean: float) -> int:
    """Return the bytes of objects of size `mean` that a disk holds in addition to memory.

    Args:
        disk: bytes of the disk.
        unit: bytes; records take whole units.
        writing: most bytes being written, which are both in memory and on disk.
    """
    room = int(room_nbytes(np.array([int(mean)]), unit)[0])
    return max(int(disk * mean / room) - 2 * writing, 0)


class InMemory(Protocol):
    """What the copies need to know of their dataset in memory (`Residency`)."""

    name: str
    versions: Versions
    policy: EvictionPolicy
    state: NDArray[np.uint8]
    pins: NDArray[np.int32]
    length: Ints

    def __len__(self) -> int:
        """Return the number of objects."""
        ...

    @property
    def mean(self) -> float:
        """Mean bytes of an object, as far as known."""
        ...

    @property
    def emit(self) -> Callable[[Action], None]:
        """Takes each action."""
        ...


class DiskCopies:
    """The objects of one dataset on disk.

    Attributes:
        state: (n,) NOT_STORED, STORING or STORED; one byte per object if there is a disk.
        hopeless: whether memory needs room that no write can make.
        refused: whether a write failed, not for lack of room, so that nothing more is written.
    """

    def __init__(self, residency: InMemory, tier: DiskTier) -> None:
        n = len(residency)
        self.state: NDArray[np.uint8] = np.broadcast_to(np.uint8(NOT_STORED), n)
        self.objects = 0  # how many have a copy
        self.nbytes = 0  # bytes of rooms
        self.storing = 0  # number of objects being written
        self.hopeless = self.refused = False
        self._residency = residency
        self._tier = tier
        self._loose: deque[Index] = deque()  # released objects that wait to be written
        self._waiting = 0  # number of objects in `_loose`
        self._walks = [Walk(n) for _ in range(5)]  # searches for objects:
        # victims with a copy, residents to write, copies nobody reads, those in memory too, any.
        self._clean, self._dirty, self._idle, self._twice, self._any = self._walks
        self.opened()

    def opened(self) -> None:
        """Allocate the states once the disk has been opened."""
        if self._tier and not self.state.flags.writeable:
            self.state = np.zeros(len(self.state), np.uint8)

    @property
    def column(self) -> NDArray[np.uint8] | None:
        """The states of the objects, or None without a disk."""
        return self.state if self._tier else None

    # --- changes of state ------------------------------------------------------------------------

    def enter(self, ids: Index) -> None:
        """Enter objects of known length that are on disk from now on."""
        if not self._tier:
            return
        self.state[ids] = STORED
        self._count(ids, 1)
        self.changed(len(ids))

    def lost(self, ids: Index) -> None:
        """Remove those of `ids` that are on disk: they are missing there, or of no use."""
        ids = ids[self.state[ids] == STORED]
        if len(ids):
            self._residency.emit(DropFromDisk(self._residency.name, ids.astype(np.int32)))
            self.state[ids] = NOT_STORED
            self._count(ids, -1)
            self.changed(len(ids))

    def changed(self, objects: int) -> None:
        """Note that this many objects changed state, so that walks may find objects again."""
        for walk in self._walks:
            walk.changes += objects

    def lost_files(self, files: NDArray[np.int32]) -> None:
        """Remove the objects of files that have changed from the disk."""
        for first, last in map(self._residency.versions.objects, files.tolist()):
            self.lost(first + np.flatnonzero(self.state[first:last] == STORED))

    def lost_all(self) -> None:
        """Remove all objects from the disk."""
        self.lost(np.flatnonzero(self.state == STORED))

    def completes(self, resident: int) -> bool:
        """Return whether the disk and `resident` objects in memory are (nearly) all objects."""
        return self.objects > 0 and self.objects + resident >= len(self.state)

    def closed(self) -> None:
        """Stop counting a dataset that is removed from the core; its objects stay on disk."""
        self._tier.used -= self.nbytes

    def _count(self, ids: Index, sign: int) -> None:
        nbytes = int(self._tier.rooms(self._residency.length[ids]).sum())
        self.objects += sign * len(ids)
        self.nbytes += sign * nbytes
        self._tier.used += sign * nbytes

    # --- objects that may leave memory -----------------------------------------------------------

    def clean(self, k: int, step: int) -> Index:
        """Return up to k residents that are on disk and due after `step`, those due last first.

        For a peer's request (`FOR_PEERS`), any resident on disk that no reader needs now.
        """
        residency = self._residency

        def matches(at: Index | slice) -> Mask:
            mask: Mask = (residency.state[at] == RESIDENT) & (self.state[at] == STORED)
            mask &= residency.pins[at] == 0
            return mask

        return self._clean.take(
            k, matches, self._residency.policy.due, None if step == FOR_PEERS else step
        )

    def released(self, ids: Index) -> None:
        """Queue residents that are no longer pinned, to be written to disk."""
        if not self._tier:
            return
        self.changed(len(ids))
        self._loose.append(ids)
        self._waiting += len(ids)
        while self._waiting > _WAITING_OBJECTS:
            self._waiting -= len(self._loose.popleft())

    # --- objects to write ------------------------------------------------------------------------

    def next_released(self, nbytes: int, room: int) -> Index:
        """Return released objects to write, oldest first: at most `nbytes`, and within `room`."""
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
        """Return up to `nbytes` of objects to write so that they may leave memory, due last first.

        Only objects due after `step` are written: `clean` evicts no others for that step.
        """
        ids = self._dirty.take(BATCH_OBJECTS, self._writable, self._residency.policy.due, step)
        if len(ids):
            ids = ids[self._residency.policy.keeps(ids)]
        return ids[: self._fitting(ids, nbytes, 1 << 62)]

    def _writable(self, at: Index | slice) -> Mask:
        """Return (k,) whether each object is resident, unpinned, not on disk, of a known version.

        An object without a version could not be checked for changes after a restart.
        """
        residency = self._residency
        mask: Mask = (residency.state[at] == RESIDENT) & (self.state[at] == NOT_STORED)
        mask &= residency.pins[at] == 0
        where = np.flatnonzero(mask)
        mask[where] = residency.versions.held(self._ids(at)[where]) > 0
        return mask

    def _ids(self, at: Index | slice) -> Index:
        """Return (k,) ids of the objects that a predicate is called with."""
        return np.arange(*at.indices(len(self.state))) if isinstance(at, slice) else at

    def _fitting(self, ids: Index, nbytes: int, room: int) -> int:
        """Return how many of the first objects are at most `nbytes` and fit into `room`."""
        length = self._residency.length[ids]
        k = affordable(length, nbytes)
        if not k and not self._tier.writing:
            k = 1
        return min(k, affordable(self._tier.rooms(length), max(room, 0)), BATCH_OBJECTS)

    # --- objects that leave the disk -------------------------------------------------------------

    def make_room(self, nbytes: int) -> None:
        """Free about `nbytes` on disk: objects not kept, then residents, those due next first."""
        residency = self._residency
        if not residency.policy.replaces:
            return

        def twice(at: Index | slice) -> Mask:
            mask: Mask = (self.state[at] == STORED) & (residency.state[at] == RESIDENT)
            return mask

        freed = self.drop_idle(nbytes)
        self._leave(nbytes - freed, self._twice, twice, lambda ids: -residency.policy.due(ids))

    def drop_idle(self, nbytes: int) -> int:
        """Remove about `nbytes` of objects that the policy does not keep; return bytes freed."""
        policy = self._residency.policy
        if not policy.replaces:
            return 0

        def idle(at: Index | slice) -> Mask:
            mask = self._settled(at)
            where = np.flatnonzero(mask)
            mask[where] = ~policy.keeps(self._ids(at)[where])
            return mask

        return self._leave(nbytes, self._idle, idle, self._residency.policy.due)

    def unwritten(self) -> tuple[Index, Index]:
        """Return residents to write at the daemon's end: kept ones, and others; due next first.

        Pinned residents are included, as nothing leaves memory any more.
        """
        residency = self._residency
        ids = np.flatnonzero((residency.state == RESIDENT) & (self.state == NOT_STORED))
        ids = ids[residency.versions.held(ids) > 0]
        ids = ids[residency.policy.due(ids).argsort(kind="stable")]
        kept = residency.policy.keeps(ids)
        return ids[kept], ids[~kept]

    def give(self, nbytes: int) -> None:
        """Remove about `nbytes` of the objects due last from the disk, for another dataset."""
        self._leave(nbytes, self._any, self._settled, self._residency.policy.due)

    def _settled(self, at: Index | slice) -> Mask:
        """Return (k,) whether each object is on disk and not being read from there."""
        state = self._residency.state[at]
        coming = (state == FETCHING) | (state == OVERDUE)
        mask: Mask = (self.state[at] == STORED) & ~coming
        return mask

    def _leave(
        self, nbytes: int, walk: Walk, matches: Predicate, due: Callable[[Index], Ints]
    ) -> int:
        """Remove about `nbytes` of objects that match from the disk; return the bytes freed."""
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
        must(np.array_equal(here, np.sort(storing)), "states and writes in progress differ")
        must(len(here) == self.storing, "objects being written are miscounted")
        must(
            bool((residency.state[here] == RESIDENT).all()),
            "an object being written is not in memory",
        )
