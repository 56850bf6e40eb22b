"""Admission: makes room for what is to be fetched, at the expense of what is evicted. Pure.

Each dataset has a share of the memory (`Admission.share`). Inside it the dataset's eviction policy
(`policies/eviction`) says which objects leave; across datasets those above their share give way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import IntEnum

import numpy as np

from creel.cache.memory.allocator import Allocator
from creel.cache.memory.free_ranges import NOWHERE
from creel.daemon.core.disk.copies import DiskTier
from creel.daemon.core.residency import Residency
from creel.policies.arrays import NONE, Index, Ints, Mask, some

#: Rounds of eviction for objects that find no room, as what is free is in other pools' slabs.
_ROUNDS = 4


class Urgency(IntEnum):
    """What may be evicted for a fetch; each level allows what the ones before it do.

    AHEAD: what the eviction policy lets go, or what is on disk; otherwise the fetch waits.
    SOON: also what the policy would keep, rather than wait for the disk.
    STALLED: a reader waits and has nothing else to read: whatever is not pinned.
    """

    AHEAD = 0
    SOON = 1
    STALLED = 2


class Admission:
    """The space and the residencies of all datasets in it.

    A dataset's share of the memory is its share of all bytes being read; datasets without readers
    have none. The share limits a dataset only against others: it may take any free room.
    """

    def __init__(self, space: Allocator) -> None:
        self.space = space
        self.disk = DiskTier(space.nbytes)
        self.residencies: dict[str, Residency] = {}
        self.expected = 0  # bytes in flight whose length is a guess
        #: Offsets and lengths that fetches in flight for a dataset write to; set by `Inflight`.
        self.busy: Callable[[Residency], tuple[Ints, Ints]]

    def share(self, residency: Residency) -> float:
        """Bytes that this dataset may claim."""
        if not residency.active:
            return 0.0
        total = sum(residency.nbytes for residency in self.residencies.values() if residency.active)
        return self.space.nbytes * residency.nbytes / max(total, 1.0)

    def part(self, residency: Residency) -> float:
        """The dataset's share of the memory, and so of the disk, as a part of it."""
        return self.share(residency) / max(self.space.nbytes, 1)

    def missing(self, residency: Residency) -> float:
        """Return the part of the dataset that does not fit its share: 1 - f."""
        return max(1.0 - self.share(residency) / max(residency.nbytes, 1.0), 0.0)

    @property
    def free_nbytes(self) -> int:
        """Bytes that are neither held nor expected."""
        return self.space.free_bytes - self.expected

    def place(self, residency: Residency, sizes: Ints, due: int, urgency: Urgency) -> Ints:
        """(k,) places for objects of these sizes; NOWHERE (-1) where no room can be made.

        Evicts what `urgency` allows. `due`: the step that reads them, on the eviction policy's
        clock.
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
            if self.expected:  # leave that free for what is in flight, and whose length is a guess
                fits = lack[residency.pool.rounded(sizes[lack]).cumsum() <= self.free_nbytes]
            out[fits] = residency.pool.alloc(sizes[fits])
            lack = lack[out[lack] == NOWHERE]
            if not len(lack) or (short > 0 and not freed):
                break
            free = 0  # what there is lies in other pools' slabs
        return out

    def _swap(self, residency: Residency, sizes: Ints, due: int, urgency: Urgency) -> Ints:
        """`place` for equal records: new objects take the places of evicted ones."""
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

    def room(
        self, residency: Residency, length: Ints, due: int, urgency: Urgency
    ) -> tuple[Ints, Mask]:
        """(k,) offsets (NOWHERE where the length is unknown), and (k,) whether there is no room."""
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
        """Evict about `nbytes`; return the bytes freed."""
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
        """Up to k objects of the dataset that may leave memory, and why; none: no more."""
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
        """Whether to wait until objects are written to disk, so that they may leave memory."""
        if not self.disk or self.disk.slow or residency.disk.hopeless:
            return False
        replaces = residency.policy.replaces
        return replaces or residency.disk.storing > 0 or self.disk.free >= residency.mean

    def _claim(self, residency: Residency, nbytes: int) -> int:
        """Evict from datasets above their share if this one stays within its own; bytes freed."""
        if len(self.residencies) == 1 or residency.pool.used + nbytes > self.share(residency):
            return 0
        freed = 0
        others = [x for x in self.residencies.values() if x is not residency]
        above = [(other.pool.used - self.share(other), other) for other in others]
        for excess, other in sorted(above, key=lambda x: -x[0]):
            taken = 0
            while freed + taken < nbytes and taken < excess:
                got = other.evict_region(nbytes - freed, self.busy(other)[0])
                if not got:
                    break
                taken += got
            freed += taken
        return freed
