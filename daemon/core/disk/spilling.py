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

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from creel.cache.memory.free_ranges import must
from creel.daemon.core.disk.copies import BATCH_NBYTES, BATCH_OBJECTS, DiskTier
from creel.daemon.core.events import DropFromDisk, Spilled, SpillObjects
from creel.policies.arrays import NONE, Index, joined
from creel.policies.eviction.policy import NOT_STORED, STORING
from creel.policies.prefetch import affordable

if TYPE_CHECKING:  # circular import
    from creel.daemon.core.residency import Residency


#: Nobody waits for a disk that takes longer for a batch, in seconds: 16 MB/s.
_SLOW_S = 0.25


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
        self, tier: DiskTier, residencies: dict[str, Residency], part: Callable[[Residency], float]
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
        """The disk's size is known or has changed; 0: it is lost with all that was there."""
        if not nbytes:
            for residency in self._residencies.values():
                residency.disk.lost_all()
        if not self._tier.used:
            self._tier.unit = unit
        self._tier.nbytes = nbytes
        for residency in self._residencies.values():
            residency.disk.opened()

    def start(
        self, lacking: Iterable[tuple[Residency, int]], reading: Callable[[Residency], bool]
    ) -> bool:
        """Begin to write what should be.

        Args:
            lacking: datasets that found no room in memory for what is read at a step of their
                eviction policy's clock.
            reading: whether objects of a dataset are being read from disk, whose room there may be
                taken once they are in memory.

        Returns:
            Whether nothing can be written for one of `lacking`, so that it need not wait.
        """
        if not self._tier:
            return False
        for residency in self._residencies.values():
            residency.disk.hopeless = False
            writes = not residency.disk.refused
            while writes and (left := self._left()) and self._tier.free > 0:
                ids = residency.disk.next_released(left, self._tier.free)
                if not len(ids):
                    break
                self._write(residency, ids)
        soonest: dict[Residency, int] = {}
        for residency, due in lacking:
            soonest[residency] = min(due, soonest.get(residency, due))
        for residency, due in soonest.items():
            if not residency.disk.storing:
                writable = not residency.disk.refused
                writable = writable and self._make_writable_room(residency, due, reading)
                residency.disk.hopeless = not writable
        return any(residency.disk.hopeless for residency in soonest)

    def _left(self) -> int:
        """Bytes that may be written in one go now."""
        return min(self._tier.most_writing - self._tier.writing, BATCH_NBYTES)

    def _make_writable_room(
        self, residency: Residency, due: int, reading: Callable[[Residency], bool]
    ) -> bool:
        """Write what is due last, and after `due`, so that it may leave for what is read then.

        False where nothing can be, or soon.
        """
        left = self._left()
        if left <= 0:
            return True
        ids = residency.disk.next_due_last(left, due)
        if not len(ids):
            return False
        lack = int(self._tier.rooms(residency.length[ids]).sum()) - self._tier.free
        if lack > 0:
            self._make_room(residency, lack)
        rooms = self._tier.rooms(residency.length[ids])
        ids = ids[: affordable(rooms, max(self._tier.free, 0))]
        if len(ids):
            self._write(residency, ids)
            return True
        return residency.policy.replaces and reading(residency)

    def _make_room(self, residency: Residency, nbytes: int) -> None:
        """Free about `nbytes` on disk.

        First of datasets that nobody reads, then, where this one has less than its part, of those
        that have more than theirs, last of this one's own.
        """
        enough = self._tier.free + nbytes
        others = [other for other in self._residencies.values() if other is not residency]
        for other in others:
            if not other.active and self._tier.free < enough:
                other.disk.lost_all()
        if self._excess(residency) < 0:
            for other in others:
                lack = min(enough - self._tier.free, self._excess(other))
                if other.active and lack > 0:
                    other.disk.give(lack)
        if self._tier.free < enough:
            residency.disk.make_room(enough - self._tier.free)

    def _excess(self, residency: Residency) -> int:
        """Bytes on disk beyond what a dataset may claim."""
        return residency.disk.nbytes - int(self._part(residency) * self._tier.nbytes)

    def _write(self, residency: Residency, ids: Index) -> None:
        length = residency.length[ids]
        room, nbytes = int(self._tier.rooms(length).sum()), int(length.sum())
        spill = _Spill(residency, ids, room, nbytes, self._now, set())
        residency.disk.state[ids] = STORING
        residency.disk.storing += len(ids)
        residency.pin(ids, distinct=True)
        self._tier.used += spill.room
        self._tier.writing += spill.nbytes
        self._last += 1
        self._spills[self._last] = spill
        what = ids.astype(np.int32), residency.places(ids), length, residency.versions.of(ids)
        residency.emit(SpillObjects(self._last, residency.name, *what))

    def write_rest(self) -> None:
        """Begin to write all that is in memory and not on disk, as far as there is room for it.

        Objects that nobody keeps leave the disk for kept ones; none leaves for one of its kind.
        """
        if not self._tier:
            return
        for residency in sorted(
            self._residencies.values(), key=lambda residency: not residency.active
        ):
            if residency.disk.refused:
                continue
            kept, others = residency.disk.unwritten()
            lack = int(self._tier.rooms(residency.length[kept]).sum()) - self._tier.free
            if lack > 0:
                residency.disk.drop_idle(lack)
            ids = np.append(kept, others)
            ids = ids[
                : affordable(self._tier.rooms(residency.length[ids]), max(self._tier.free, 0))
            ]
            while len(ids):
                k = max(min(affordable(residency.length[ids], BATCH_NBYTES), BATCH_OBJECTS), 1)
                self._write(residency, ids[:k])
                ids = ids[k:]

    def cancel(self, residency: Residency, ids: Index) -> None:
        """These objects leave memory although some may be being written: that will be of no use."""
        if not residency.disk.storing:
            return
        for spill in (s for s in self._spills.values() if s.residency is residency):
            gone = np.isin(spill.ids, ids)
            gone[gone] = residency.disk.state[spill.ids[gone]] == STORING
            if gone.any():
                spill.void.update(spill.ids[gone].tolist())
                self._release(residency, spill.ids[gone])
                # Carried out after this spill, and before another one of these objects.
                residency.emit(DropFromDisk(residency.name, spill.ids[gone].astype(np.int32)))

    def _release(self, residency: Residency, ids: Index) -> None:
        residency.disk.state[ids] = NOT_STORED
        residency.disk.storing -= len(ids)
        residency.unpin(ids, distinct=True)

    def landed(self, e: Spilled) -> None:
        """A spill ended."""
        spill = self._spills.pop(e.spill, None)
        if spill is None:
            return
        self._landed = self._now
        residency = spill.residency
        self._tier.used -= spill.room
        self._tier.writing -= spill.nbytes
        void = np.array([i in spill.void for i in spill.ids.tolist()], np.bool_)
        ids, stored = spill.ids[~void], e.stored[~void]
        self._release(residency, ids)
        residency.disk.found(ids[stored])
        if e.full:  # however large it was said to be
            self._tier.nbytes = min(self._tier.nbytes, self._tier.used)
        elif not stored.all():  # the next write would fare no better, and readers wait for it
            residency.disk.refused = True
        residency.counts["spilled"] += int(np.count_nonzero(stored))
        residency.counts["spilled_nbytes"] += int(residency.length[ids[stored]].sum())
        ids = ids[residency.pins[ids] == 0]
        if len(ids):
            residency.policy.released(ids)

    def ids(self, residency: Residency) -> Index:
        """(k,) objects of a dataset that are being written."""
        own = [
            s.ids[[i not in s.void for i in s.ids.tolist()]]
            for s in self._spills.values()
            if s.residency is residency
        ]
        return joined([NONE, *own])

    def check(self) -> None:
        """Raise IllegalEventError unless the sums are right."""
        spills = self._spills.values()
        must(self._tier.writing == sum(s.nbytes for s in spills), "bytes being written")
        held = sum(residency.disk.nbytes for residency in self._residencies.values())
        must(self._tier.used == held + sum(s.room for s in spills), "rooms on disk")
        for residency in self._residencies.values():
            residency.disk.check(self.ids(residency))
