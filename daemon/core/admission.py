"""Admission: evicts objects to make room for fetches. Pure.

Each dataset has a share of the memory (`Admission.share`). Inside the share, the dataset's eviction
policy (`policies/eviction`) chooses the victims. Datasets above their share make room for others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import IntEnum

import numpy as np

from creel.cache.memory.pools.allocator import Allocator
from creel.cache.memory.pools.free_ranges import NOWHERE
from creel.daemon.core.disk.copies import DiskTier
from creel.daemon.core.residency import Residency
from creel.policies.arrays import NONE, Index, Ints, Mask, some

#: Rounds of eviction for objects without room: the free bytes may lie in the slabs of other pools.
_ROUNDS = 4


class Urgency(IntEnum):
    """Which objects may be evicted for a fetch; each level includes the levels before it.

    AHEAD: objects that the eviction policy releases, or that are on disk; else the fetch waits.
    SOON: also objects that the policy would keep, if the fetch would have to wait for the disk.
    STALLED: all unpinned objects, because a reader waits and has nothing else to read.
    """

    AHEAD = 0
    SOON = 1
    STALLED = 2


class Admission:
    """Allocates the arena's space to all datasets.

    A dataset's share of the memory is its part of the bytes of all datasets that have readers.
    Datasets without readers have no share. Any dataset may use free room beyond its share.
    """

    def __init__(self, space: Allocator) -> None:
        self.space = space
        self.disk = DiskTier(space.nbytes)
        self.residencies: dict[str, Residency] = {}
        self.expected = 0  # bytes in flight whose length is a guess
        self._active_nbytes = 0.0  # bytes of all datasets that have readers; 0: to be summed up
        #: Returns the offsets and lengths that a dataset's fetches in flight write to; set by
        #: `Inflight`.
        self.busy: Callable[[Residency], tuple[Ints, Ints]]

    def share(self, residency: Residency) -> float:
        """Return the bytes of memory that a dataset may claim."""
        if not residency.active:
            return 0.0
        if not self._active_nbytes:
            active = [x.nbytes for x in self.residencies.values() if x.active]
            self._active_nbytes = max(sum(active), 1.0)
        return self.space.usable * residency.nbytes / self._active_nbytes

    def changed(self) -> None:
        """Sum up the datasets anew for the next `share`: readers or lengths may have changed.

        Called a few times for each event, while each event asks for the share of each dataset.
        """
        self._active_nbytes = 0.0

    def fraction(self, residency: Residency) -> float:
        """Return the dataset's share as a fraction of the memory; the same holds for the disk."""
        return self.share(residency) / max(self.space.usable, 1)

    def missing(self, residency: Residency) -> float:
        """Return the fraction of the dataset that does not fit into its share."""
        return max(1.0 - self.share(residency) / max(residency.nbytes, 1.0), 0.0)

    @property
    def free_nbytes(self) -> int:
        """Free bytes, less those expected by fetches of unknown length."""
        return self.space.free_bytes - self.expected

    def place(self, residency: Residency, sizes: Ints, due: int, urgency: Urgency) -> Ints:
        """Return (k,) places for objects of these sizes; NOWHERE (-1) where there is no room.

        Evicts objects as far as `urgency` allows. `due` is the step that reads the new objects, on
        the eviction policy's clock.
        """
        if residency.pool.same_size:
            return self._swap(residency, sizes, due, urgency)
        out = np.full(len(sizes), NOWHERE, np.int64)
        lack = np.arange(len(sizes))
        free = self.free_nbytes
        for _ in range(_ROUNDS):
            short = int(residency.pool.rounded(sizes[lack]).sum()) - free
            freed = self._make_room(residency, short, due, urgency) if short > 0 else 0
            fits = lack
            if self.expected:  # leave room for fetches in flight whose lengths are guesses
                fits = lack[residency.pool.rounded(sizes[lack]).cumsum() <= self.free_nbytes]
            out[fits] = residency.pool.alloc(sizes[fits])
            lack = lack[out[lack] == NOWHERE]
            if not len(lack) or (short > 0 and not freed):
                break
            free = 0  # the free bytes lie in slabs of other pools
        return out

    def _swap(self, residency: Residency, sizes: Ints, due: int, urgency: Urgency) -> Ints:
        """Do as `place` for records of one size: new objects take the places of evicted ones."""
        out = np.full(len(sizes), NOWHERE, np.int64)
        k = min(len(sizes), max(self.free_nbytes, 0) // residency.pool.record)
        if k:
            out[:k] = residency.pool.alloc(sizes[:k])
            k = int(np.count_nonzero(out != NOWHERE))
        if k < len(sizes) and self._claim(residency, (len(sizes) - k) * residency.pool.record):
            out[k:] = residency.pool.alloc(sizes[k:])
            k = int(np.count_nonzero(out != NOWHERE))
        while k < len(sizes):
            ids, why = self._victims(residency, len(sizes) - k, due, urgency)
            if not len(ids):
                break
            out[k : k + len(ids)] = residency.vacate(ids, why)
            k += len(ids)
        return out

    def withhold(self, nbytes: int) -> list[tuple[int, int]]:
        """Take `nbytes` that objects occupy, and all free space, out of use; return the ranges.

        Free space comes on top, as it may never have been written: it takes no memory yet.
        """
        short = self.space.free_bytes + nbytes
        full = [residency for residency in self.residencies.values() if residency.pool.used]
        for residency in sorted(full, key=lambda x: -x.pool.used):
            while (lack := short - self.space.free_bytes) > 0:
                if not residency.evict_region(lack, self.busy(residency)[0], "returned"):
                    break
        return self.space.withhold(short)

    def room(
        self, residency: Residency, length: Ints, due: int, urgency: Urgency
    ) -> tuple[Ints, Mask]:
        """Return (k,) places (NOWHERE for unknown lengths) and (k,) whether there is no room."""
        unknown = length < 0
        if not some(unknown):
            offset = self.place(residency, length, due, urgency)
            return offset, offset == NOWHERE
        offset = np.full(len(length), NOWHERE, np.int64)
        offset[~unknown] = self.place(residency, length[~unknown], due, urgency)
        lack = offset == NOWHERE
        where = np.flatnonzero(unknown)
        short = len(where) * residency.guess - self.free_nbytes
        if short > 0:
            self._make_room(residency, short, due, urgency)
        lack[where[: max(self.free_nbytes, 0) // residency.guess]] = False
        return offset, lack

    def _make_room(self, residency: Residency, nbytes: int, due: int, urgency: Urgency) -> int:
        """Evict objects of about `nbytes`; return the bytes freed."""
        freed = self._claim(residency, nbytes)
        while freed < nbytes:
            k = math.ceil((nbytes - freed) / residency.mean)
            ids, why = self._victims(residency, k, due, urgency)
            if not len(ids):
                break
            freed += residency.evict(ids, why)
        return freed

    def _victims(
        self, residency: Residency, k: int, due: int, urgency: Urgency
    ) -> tuple[Index, str]:
        """Return up to k objects that may leave memory, and the reason; none if no more may."""
        policy = residency.policy
        sources = [(policy.victims, "due_later")]
        forced = urgency is Urgency.STALLED
        if self.disk:
            waits = self.waits(residency)
            lost = [] if waits else sources
            sources = [(policy.unneeded, "due_later"), (residency.disk.clean, "on_disk"), *lost]
            forced = urgency > Urgency.AHEAD and not waits
        if forced:
            sources.append((policy.forced_victims, "stalled"))
        for victims, why in sources:
            ids = victims(k, due)
            if len(ids):
                return ids, why
        return NONE, ""

    def waits(self, residency: Residency) -> bool:
        """Return whether to wait until objects are on disk, which allows them to leave memory."""
        if not self.disk or self.disk.slow or residency.disk.hopeless:
            return False
        replaces = residency.policy.replaces
        return replaces or residency.disk.storing > 0 or self.disk.free >= residency.mean

    def _claim(self, residency: Residency, nbytes: int) -> int:
        """Evict from datasets above their share for one within its own; return the bytes freed."""
        if len(self.residencies) == 1 or residency.pool.used + nbytes > self.share(residency):
            return 0
        freed = 0
        others = [x for x in self.residencies.values() if x is not residency]
        above = [(other.pool.used - self.share(other), other) for other in others]
        for excess, other in sorted(above, key=lambda x: -x[0]):
            taken = 0
            while freed + taken < nbytes and taken < excess:
                got = other.evict_region(nbytes - freed, self.busy(other)[0], "other_dataset")
                if not got:
                    break
                taken += got
            freed += taken
        return freed
