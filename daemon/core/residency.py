"""Residency: the core's tables of one dataset's objects. Pure."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from creel.cache.memory.pools.allocator import Allocator, Lengths
from creel.cache.memory.pools.free_ranges import NOWHERE, must
from creel.cache.memory.pools.pool import ObjectPool
from creel.cache.memory.pools.runs import chained
from creel.daemon.core.cluster.departed import Departed
from creel.daemon.core.disk.copies import DiskCopies, DiskTier
from creel.daemon.core.events import DISK, SOURCE, Action, DatasetAdded, Publish
from creel.errors import IllegalEventError
from creel.policies.arrays import Index, Ints, Mask, every, some
from creel.policies.cluster.first_readers import FirstReaders
from creel.policies.eviction.policy import (
    ABSENT,
    FAILED,
    FETCHING,
    OVERDUE,
    RESIDENT,
    SKIPPED,
    STORED,
    EvictionPolicy,
    NoEviction,
)
from creel.policies.prefetch import Latency, SourceRate

ONE = np.int32(1)
#: Counters of reads that found a resident, a fetch in flight for another session, or neither.
COUNTED = ("hits", "joined", "misses")
#: What a state may follow: a fetch begins again where another origin lacked the object, and is
#: undone after an event that failed. The table in docs/states.md says which event does what.
_FOLLOWS = {
    ABSENT: (RESIDENT, FETCHING, OVERDUE),
    SKIPPED: (ABSENT, SKIPPED, FAILED),
    FAILED: (ABSENT, SKIPPED, FAILED, FETCHING, OVERDUE),
    FETCHING: (ABSENT, SKIPPED, FAILED, FETCHING, OVERDUE),
    RESIDENT: (FETCHING, OVERDUE),
    OVERDUE: (FETCHING,),
}
#: (to, from) whether an object in the second state may become one in the first.
_BECOMES = np.array([[old in _FOLLOWS[to] for old in range(6)] for to in range(6)])
#: Guessed length while none is known: about an ImageNet file.
_GUESS_NBYTES = 128 << 10
#: Size of the region taken from another dataset at once: a part (1/n) of the space, and the most
#: bytes.
_REGION_SHARE = 64
_REGION_NBYTES = 64 << 20

#: An epoch that no plan is about: the plans of this node's ranks do not say where to read an object
#: then. Homes do, in any epoch.
NO_EPOCH = -2

#: Objects and bytes read from storage, and failed objects. Objects and bytes that peers sent, and
#: objects that they lacked. Objects and bytes sent to peers, and objects refused. Objects and bytes
#: read from disk, objects that it lacked, and objects and bytes written to it.
_COUNTED = (
    *("reads", "read_nbytes", "failed", "peer_reads", "peer_nbytes", "peer_misses"),
    *("served", "served_nbytes", "refused"),
    *("disk_reads", "disk_nbytes", "disk_misses", "spilled", "spilled_nbytes"),
)


class Residency:
    """The objects of one dataset: a struct of arrays, and their pool in the arena.

    Only these methods write the arrays: `move` the states, `pin` and `unpin` the pins (after a
    failure also `rebuild`), `set_lengths` and `clear_lengths` the lengths. The places in `offset`,
    which clients see, are written by the shell, when it executes the `Publish` of `landed` and
    `vacate`.

    Attributes:
        policy: who says which objects leave; only `DatasetReaders` writes it.
        first_readers: who reads objects first, once a job rehearses; as `policy`.
        sessions: how many ranks' streams read the dataset; as `policy`.
        served: the objects pinned for each peer request; `Serving` writes it.
        heads: datasets to take over, once nothing of them is under way, and the time until which
            their objects are awaited; `Core` writes it.
        warming: the next object to load for `Warm`, or -1.
    """

    def __init__(
        self,
        added: DatasetAdded,
        space: Allocator,
        emit: Callable[[Action], None],
        tier: DiskTier,
        page: int = 0,
    ) -> None:
        """Create empty tables, without work or memory per object: pages are zeroed on first write.

        Args:
            added: names it, and has the columns of its location table.
            emit: takes each action.
            tier: the node's disk.
            page: as in `Allocator.pool`.
        """
        n, lengths = len(added.offset), added.lengths
        self.versions = added.versions
        self.first_readers: FirstReaders | None = None
        #: The dataset's key.
        self.name = added.dataset
        self.offset = added.offset
        self.emit = emit
        #: Objects (ascending) that this event publishes, and their places; not in `offset` yet.
        self.fresh: list[tuple[Index, Ints]] = []
        self.length = added.length
        #: The allocator of the arena.
        self.space = space
        #: The copies of its objects on disk.
        self.disk = DiskCopies(self, tier)
        #: (n,) what is known of each object.
        self.state = np.zeros(n, np.uint8)
        #: (n,) how many readers hold each object.
        self.pins = np.zeros(n, np.int32)
        #: Where its objects lie in the arena.
        self.pool: ObjectPool = space.pool(lengths, page)
        self.policy: EvictionPolicy = NoEviction(self.state, self.pins, [])
        #: How long its source takes to answer.
        self.latency = Latency()
        #: Objects and bytes that the source delivers in a second.
        self.source_rate = SourceRate()
        self.served: dict[int, Index] = {}
        self.heads: dict[Residency, float] = {}
        #: What has left lately, of which copies may be in use.
        self.departed = Departed(self.pool)
        self.warming = -1
        self.sessions = 0
        #: (n,) whether a length comes from the manifest, not from the last read; None: all do.
        self.listed = _listed(added.length, lengths)
        self._known = lengths.known  # how many lengths are known
        self._known_nbytes = lengths.nbytes  # their sum
        #: Counters since the start, by name.
        self.counts = dict.fromkeys((*COUNTED, *_COUNTED), 0)
        why = (
            *("due_later", "other_dataset", "dropped", "stalled"),
            *("changed", "on_disk", "returned", "decoded"),
        )
        #: Objects that left, by reason.
        self.evicted = dict.fromkeys(why, 0)
        #: How many objects are in memory.
        self.resident = 0
        #: Their bytes.
        self.resident_nbytes = 0

    def __len__(self) -> int:
        return len(self.offset)

    @property
    def active(self) -> bool:
        """Whether any session reads the dataset."""
        return self.sessions > 0

    def expected(self, length: Ints) -> Ints:
        """Return the lengths with a guess in place of unknown ones."""
        unknown = length < 0
        return np.where(unknown, self.guess, length) if some(unknown) else length

    @property
    def guess(self) -> int:
        """Bytes of the room for an object of unknown length, assuming the mean length."""
        return int(self.pool.rounded(np.array([int(self.mean)]))[0])

    @property
    def mean(self) -> float:
        """Mean bytes of the objects of known length; a guess while there is none."""
        if not self._known:
            return max(min(_GUESS_NBYTES, self.space.nbytes / _REGION_SHARE), 1.0)
        return max(self._known_nbytes / self._known, 1.0)

    @property
    def nbytes(self) -> float:
        """Bytes of the whole dataset, where unknown lengths count as the mean."""
        return self.mean * len(self)

    def move(self, ids: Index, to: int) -> None:
        """Change the state of objects: the only place where that happens. Ids may repeat.

        Raises:
            IllegalEventError: an object's state does not become that one; nothing was changed.
        """
        allowed = _BECOMES[to, self.state[ids]]
        if not every(allowed):
            state = int(self.state[ids][~allowed][0])
            raise IllegalEventError(f"an object in state {state} does not become {to}")
        self.state[ids] = to

    def pin(self, ids: Index, *, distinct: bool = False) -> None:
        """Add a pin to each object; ids may repeat unless `distinct`."""
        if distinct:
            self.pins[ids] += ONE
        else:
            np.add.at(self.pins, ids, ONE)

    def unpin(self, ids: Index, *, distinct: bool = False) -> None:
        """Remove a pin from each object; call `release` for those that may be evicted then."""
        if distinct:
            self.pins[ids] -= ONE
        else:
            np.subtract.at(self.pins, ids, ONE)

    def release(self, ids: Index) -> None:
        """Tell the disk tier and the eviction policy which of `ids` are unpinned residents."""
        unpinned = (self.pins[ids] == 0) & (self.state[ids] == RESIDENT)
        if some(unpinned):
            ids = ids if every(unpinned) else ids[unpinned]
            self.disk.released(ids)
            self.policy.released(ids)

    def set_lengths(self, ids: Index, nbytes: Ints) -> None:
        new = self.length[ids] < 0
        self._known += int(new.sum())
        self._known_nbytes += int(nbytes[new].sum())
        self.length[ids] = nbytes

    def clear_lengths(self, ids: Index) -> None:
        """Forget wrong lengths; records of a fixed pool keep their common length."""
        if not self.pool.same_size:
            self._known -= len(ids)
            self._known_nbytes -= int(self.length[ids].sum())
            self.length[ids] = -1

    def outdate(self, ids: Index) -> None:
        """Evict objects (distinct, resident, used by no session) of files that have changed."""
        self.disk.lost(ids)
        sent = np.isin(ids, np.concatenate([ids[:0], *self.served.values()]))
        self.evict(ids[~sent], "changed")
        if some(sent):
            self._depart(ids[sent])
        if self.listed is not None:
            self.clear_lengths(ids[~self.listed[ids]])

    def _depart(self, ids: Index) -> None:
        """Evict objects that are being sent to peers; free their rooms once they are sent."""
        requests = set()
        for request, served in self.served.items():
            gone = np.isin(served, ids)
            if some(gone):
                requests.add(request)
                self.unpin(served[gone])
                self.served[request] = served[~gone]
        nbytes = self.length[ids]
        self.departed.add(requests, self.vacate(ids, "changed"), nbytes)

    def found_on_disk(self, ids: Index, nbytes: Ints) -> None:
        """Enter objects found on disk; drop those whose length differs from the manifest's."""
        if self.pool.same_size:
            good = nbytes == self.pool.record
        else:
            good = (self.length[ids] < 0) | (self.length[ids] == nbytes)
            self.set_lengths(ids[good], nbytes[good])
        self.disk.enter(ids)
        self.disk.lost(ids[~good])

    def residents_of(self, files: NDArray[np.int32]) -> Index:
        """Return (k,) resident objects of these files."""
        bounds = map(self.versions.objects, files.tolist())
        residents = [a + np.flatnonzero(self.state[a:b] == RESIDENT) for a, b in bounds]
        return np.concatenate([np.empty(0, np.intp), *residents])

    def give_back(self, ids: Index, place: Ints) -> int:
        """Free these places; return the bytes of their rooms."""
        return self.pool.free(place, self.length[ids])

    def places(self, ids: Index) -> Ints:
        """Return (k,) places of residents, including those that this event publishes."""
        place = self.offset[ids]
        for fresh, where in self.fresh:
            at = np.minimum(fresh.searchsorted(ids), len(fresh) - 1)
            place = np.where(fresh[at] == ids, where[at], place)
        return place

    def evict(self, ids: Index, why: str) -> int:
        """Evict objects (distinct, resident, unpinned); return the bytes freed."""
        return self.give_back(ids, self.vacate(ids, why)) if len(ids) else 0

    def vacate(self, ids: Index, why: str) -> Ints:
        """Evict objects but keep their places allocated; return (k,) these places.

        why: "": they go on as residents of another dataset.
        """
        place = self.places(ids)
        self.emit(Publish(self.name, ids.astype(np.int32), NOWHERE))
        self.move(ids, ABSENT)
        self.resident -= len(ids)
        self.resident_nbytes -= int(self.length[ids].sum())
        if why:
            self.evicted[why] += len(ids)
        return place

    def evict_all(self) -> None:
        """Evict all objects of a dataset without readers and fetches in flight."""
        if not self.pool.clear():
            self.evict(self.unpinned(), "dropped")
        elif self.resident:
            self.emit(Publish(self.name, slice(None), NOWHERE))
            self.evicted["dropped"] += self.resident

    def learn_readers(self, old: Residency) -> None:
        """Learn who has read first the objects of a dataset that this one begins with."""
        if old.first_readers is not None:
            self.first_readers = self.first_readers or FirstReaders(self.name, len(self))
            self.first_readers.inherit(old.first_readers)

    def take_over(self, old: Residency) -> None:
        """Take over the residents of a dataset without readers that this one begins with.

        What is here already, or is of another version, leaves memory. Does nothing if objects lie
        in other pieces there.
        """
        if (self.pool.record, self.pool.page) != (old.pool.record, old.pool.page):
            return
        n = len(old)
        same = self.versions.inherit(old.versions)
        unread = (self.length[:n] < 0) & (self.state[:n] == ABSENT)  # nobody brings its length
        learnt = np.flatnonzero(unread & (old.length >= 0))
        if len(learnt):
            self.set_lengths(learnt, old.length[learnt])
        ids = np.flatnonzero((old.state == RESIDENT) & (self.state[:n] == ABSENT))
        ids = ids[same[old.versions.files(ids)] & (self.length[ids] == old.length[ids])]
        place = old.vacate(ids, "")
        old.evict(old.unpinned(), "dropped")
        self.pool.take_over(old.pool)
        self.move(ids, FETCHING)
        self.landed(ids, place)

    def landed(self, ids: Index, place: Ints) -> bool:
        """Make objects (ascending) that have arrived resident; return whether some are unpinned."""
        if len(ids):
            self.emit(Publish(self.name, ids.astype(np.int32), place))
            self.fresh.append((ids, place))
        self.move(ids, RESIDENT)
        self.resident += len(ids)
        self.resident_nbytes += int(self.length[ids].sum())
        unwanted = bool(np.count_nonzero(self.pins[ids]) < len(ids))
        if unwanted:
            self.release(ids)
        return unwanted

    def snapshot(self) -> dict[str, float | str]:
        """Return counters and sizes for `creel stats`."""
        return {
            "objects": len(self),
            "nbytes": self.nbytes,
            "resident_objects": self.resident,
            "resident_nbytes": self.resident_nbytes,
            "used_nbytes": self.pool.used,
            "disk_objects": self.disk.objects,
            "disk_used_nbytes": self.disk.nbytes,
            "policy": self.policy.name,
            "fetch_latency_s": self.latency.seconds,
            **self.counted(),
        }

    def counted(self) -> dict[str, int]:
        """Return the counters that never decrease, by name."""
        return {**self.counts, **{f"evicted_{why}": n for why, n in self.evicted.items()}}

    def fail(self, ids: Index) -> None:
        """Fail objects without room; readers will read them directly."""
        self.move(ids, FAILED)
        self.counts["failed"] += len(ids)

    def awaited(self, ids: Index, epoch: int, clock: int) -> Mask | None:
        """Return (k,) whether the peer that holds each object in `epoch` will get it only later."""
        later = self.policy.awaited(ids, epoch, clock)
        return later & (self.disk.state[ids] != STORED) if later is not None else None

    def arriving(self, ids: Index, now: float) -> Mask | None:
        """Return (k,) whether each absent object is about to be taken over; None: none is.

        Objects that are on their way to one of the `heads` count, too.
        """
        heads = [old for old, until in self.heads.items() if now < until]
        if not heads:
            return None
        arriving = np.zeros(len(ids), np.bool_)
        for old in heads:
            inside = np.flatnonzero(ids < len(old))
            state = old.state[ids[inside]]
            arriving[inside] |= (state == RESIDENT) | (state == FETCHING)
        return arriving & (self.state[ids] < FETCHING)

    def origins(self, ids: Index, epoch: int) -> list[tuple[int, slice | Index]]:
        """Group objects (k,) by the origin to fetch them from in `epoch`: (origin, positions)."""
        holder = self.policy.holders(ids, epoch)
        if self.disk.objects:
            stored = self.disk.state[ids] == STORED
            holder = np.where(stored, DISK, SOURCE if holder is None else holder)
        if holder is None:
            return [(SOURCE, slice(None))]
        return [(int(node), np.flatnonzero(holder == node)) for node in np.unique(holder)]

    def unpinned(self) -> Index:
        """Return (k,) residents that are not pinned."""
        return np.flatnonzero((self.state == RESIDENT) & (self.pins == 0))

    def evict_region(self, nbytes: int, busy: Ints, why: str) -> int:
        """Evict one region of the space, for another use; return the bytes freed.

        Args:
            nbytes: bytes wanted; a fixed pool gives a whole slab back to the space.
            busy: (k,) places that fetches in flight write to, which cannot leave.
        """
        ids = np.flatnonzero(self.state == RESIDENT)
        at = self.places(ids)
        ids, at = ids[at != NOWHERE], at[at != NOWHERE]  # the shell has yet to write the others
        if not len(ids):
            return 0
        place, places = self._regions(at, nbytes)
        stuck = np.bincount(place[self.pins[ids] > 0], minlength=places)
        stuck += np.bincount(self._regions(busy, nbytes)[0], minlength=places)
        held = np.bincount(place, minlength=places)
        wanted = np.bincount(place[self.policy.wanted(ids)], minlength=places)
        score = np.where((held == 0) | (stuck > 0), np.inf, wanted)
        best = int(score.argmin())
        if not np.isfinite(score[best]):
            if self.pool.same_size:
                return 0
            best = int((held - stuck).argmax())  # in a paged pool, a part of a region is of use
        inside = ids[(place == best) & (self.pins[ids] == 0)]
        return self.evict(inside, why)

    def _regions(self, offset: Ints, nbytes: int) -> tuple[Index, int]:
        if self.pool.same_size:
            starts = self.pool.ranges()[0]
            return starts.searchsorted(offset, side="right") - 1, len(starts)
        size = max(nbytes, min(self.space.nbytes // _REGION_SHARE, _REGION_NBYTES), 1)
        first = np.where(offset < NOWHERE, chained(offset), offset)
        return first // size, self.space.nbytes // size + 1

    def rebuild(self, in_flight: Index, storing: Index, pinned: NDArray[np.int32]) -> None:
        """Rebuild states and pins.

        Args:
            in_flight, storing: objects in flight, and objects being written to disk.
            pinned: (n,) the pins of sessions; changed.
        """
        self.move(np.flatnonzero(self.state == FETCHING), ABSENT)
        self.move(in_flight, FETCHING)
        self.served = {r: ids[self.state[ids] != ABSENT] for r, ids in self.served.items()}
        self._add_held(pinned, storing)
        self.pins[:] = pinned

    def _add_held(self, pins: NDArray[np.int32], storing: Index) -> None:
        """Add the pins of peer requests and of writes to disk to (n,) those of sessions."""
        for ids in self.served.values():
            np.add.at(pins, ids, ONE)
        pins[storing] += ONE

    def check(self, in_flight: Index, storing: Index, pinned: NDArray[np.int32]) -> None:
        """Raise IllegalEventError unless states, pins, offsets and sums are consistent.

        Args: as `rebuild`.
        """
        self._add_held(pinned, storing)
        must(bool((pinned == self.pins).all()), "pins and their holders differ")
        must(not (self.pins[self.state == ABSENT] > 0).any(), "a pinned object was evicted")
        resident, known = self.state == RESIDENT, self.length >= 0
        must(bool(((self.offset[:] != NOWHERE) == resident).all()), "offsets and residents differ")
        must(bool(known[resident].all()), "a resident of unknown length")
        must(int(resident.sum()) == self.resident, "residents are miscounted")
        must(int(self.length[resident].sum()) == self.resident_nbytes, "resident bytes")
        fetching = np.flatnonzero(self.state == FETCHING)
        coming = np.append(fetching, np.flatnonzero(self.state == OVERDUE))
        must(
            np.array_equal(np.sort(coming), np.sort(in_flight)),
            "states and fetches in flight differ",
        )
        must(int(known.sum()) == self._known, "known lengths are miscounted")
        must(int(self.length[known].sum()) == self._known_nbytes, "known bytes")


def _listed(length: Ints, lengths: Lengths) -> Mask | None:
    if lengths.known == lengths.objects:
        return None
    return length >= 0 if lengths.known else np.broadcast_to(np.False_, len(length))
