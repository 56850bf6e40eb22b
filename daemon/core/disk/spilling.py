"""The disk tier: which residents are written to disk, and which objects leave it for them. Pure.

Memory and disk together hold the objects that retention keeps. While the disk has room, each kept
object is written as soon as it was read: a resident with a copy on disk can leave memory without
loss, and the copy outlives the daemon. Once the disk is full, residents are written only when
memory needs room, those due last first. They replace objects on disk that are not kept, then copies
of the residents due soonest. Each object is then in one place, and memory has those due next.

A reader waits a few ms for a write that makes room. It does not wait for a disk that is too slow or
hangs: objects that are not written in time are evicted, and read again from the source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from creel.cache.memory.pools.free_ranges import must
from creel.daemon.core.disk.copies import BATCH_NBYTES, BATCH_OBJECTS, DiskTier
from creel.daemon.core.events import DropFromDisk, Spilled, SpillObjects
from creel.daemon.core.residency import Residency
from creel.policies.arrays import NONE, Index, joined
from creel.policies.eviction.policy import NOT_STORED, STORING
from creel.policies.prefetch import affordable

#: Seconds for one batch, above which nobody waits for the disk: 16 MB/s.
_SLOW_S = 0.25


@dataclass(frozen=True, slots=True, eq=False)
class _Spill:
    """Objects being written, and the room allocated for them."""

    residency: Residency
    ids: Index
    room: int
    nbytes: int
    begun: float
    void: set[int]  # objects whose files have changed, which are not to be kept


class Spilling:
    """All objects that are being written to disk.

    Args:
        tier: the disk.
        residencies: all datasets, a live view.
        part: returns the fraction of the node's memory and disk that a dataset may claim.
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
        self._landed = 0.0  # when the disk last finished a batch

    def begin_event(self, now: float) -> None:
        """Begin an event: note the time, and whether the disk is too slow."""
        self._now = now
        queued = min((s.begun for s in self._spills.values()), default=now)
        self._tier.slow = now - max(queued, self._landed) > _SLOW_S

    def opened(self, nbytes: int, unit: int) -> None:
        """Set the disk's size in bytes; 0: the disk is lost with all its objects."""
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
        """Start writes: of released objects, and of objects that memory needs to evict.

        Args:
            lacking: datasets without room in memory for objects that are due at a step of their
                eviction policy's clock.
            reading: returns whether objects of a dataset are being read from disk; their room on
                disk can be reused once they are in memory.

        Returns:
            Whether nothing can be written for one of `lacking`, which then need not wait.
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
        """Return the bytes that may be written in one batch now."""
        return min(self._tier.most_writing - self._tier.writing, BATCH_NBYTES)

    def _make_writable_room(
        self, residency: Residency, due: int, reading: Callable[[Residency], bool]
    ) -> bool:
        """Write objects due last and after `due`, so that they may leave memory for that step.

        Returns False if nothing can be written, now or soon.
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

        Datasets without readers lose their objects first. If this dataset is below its share,
        datasets above theirs are next. Objects of this dataset leave last.
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
        """Return a dataset's bytes on disk in excess of its share; negative below the share."""
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
        residency.emit(
            SpillObjects(
                self._last,
                residency.name,
                ids.astype(np.int32),
                residency.places(ids),
                length,
                residency.versions.held(ids),
            )
        )

    def write_rest(self) -> None:
        """Start to write all residents that are not on disk, as far as there is room.

        Kept objects replace objects on disk that are not kept; no other object leaves the disk.
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
        """Discard the writes in progress of objects that leave memory."""
        if not residency.disk.storing:
            return
        for spill in (s for s in self._spills.values() if s.residency is residency):
            gone = np.isin(spill.ids, ids)
            gone[gone] = residency.disk.state[spill.ids[gone]] == STORING
            if gone.any():
                spill.void.update(spill.ids[gone].tolist())
                self._release(residency, spill.ids[gone])
                # The shell drops these after this spill, and before it writes them again.
                residency.emit(DropFromDisk(residency.name, spill.ids[gone].astype(np.int32)))

    def _release(self, residency: Residency, ids: Index) -> None:
        residency.disk.state[ids] = NOT_STORED
        residency.disk.storing -= len(ids)
        residency.unpin(ids, distinct=True)

    def landed(self, e: Spilled) -> None:
        """Enter the result of a spill that has ended."""
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
        residency.disk.enter(ids[stored])
        if e.full:  # the disk is smaller than it reported
            self._tier.nbytes = min(self._tier.nbytes, self._tier.used)
        elif not stored.all():  # the next write would fail as well, while readers wait for it
            residency.disk.refused = True
        residency.counts["spilled"] += int(np.count_nonzero(stored))
        residency.counts["spilled_nbytes"] += int(residency.length[ids[stored]].sum())
        ids = ids[residency.pins[ids] == 0]
        if len(ids):
            residency.policy.released(ids)

    def ids(self, residency: Residency) -> Index:
        """Return (k,) objects of a dataset that are being written."""
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
