"""What a node holds of one dataset: the tables of the core. Pure.

Struct of arrays; the core is their one writer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from creel.cache.extents import ABSENT as NOWHERE
from creel.cache.extents import must
from creel.cache.space import FixedPool, Lengths, PagedPool, Space
from creel.daemon.owners import Owners
from creel.daemon.sessions import COUNTED, Group, Session
from creel.daemon.versions import Versions
from creel.policies.masks import every, some
from creel.policies.prefetch import Latency, Service, Window
from creel.policies.retain import (
    ABSENT,
    FAILED,
    FETCHING,
    OVERDUE,
    RESIDENT,
    EpochKeeper,
    FarKeeper,
    Keeper,
    RecentKeeper,
)
from creel.policies.uses import Uses

Index = NDArray[np.intp]
Sizes = NDArray[np.int64]

ONE = np.int32(1)
_POLICIES: dict[type, str] = {EpochKeeper: "epoch", FarKeeper: "far", RecentKeeper: "recent"}
#: Before any length is known: about an ImageNet file.
_GUESS_NBYTES = 128 << 10
#: Repeats up to this share of an epoch's reads are padding (DistributedSampler), no replacement.
_PADDING = 0.01
#: A region is taken from another dataset at once: this share of the space, but no more bytes.
_REGION_SHARE = 64
_REGION_NBYTES = 64 << 20
_CRUMB = 0.1  # of the mean: with a larger one residents grow, with a smaller one they shrink


class Holding:
    """One dataset: its objects' state, its share of the space, its jobs."""

    def __init__(
        self,
        name: str,
        offset: Sizes,
        length: Sizes,
        lengths: Lengths,
        space: Space,
        versions: Versions | None = None,
    ) -> None:
        """No work per object, and no memory: zeros are given page by page, as they are written to.

        Args:
            offset: (n,) NOWHERE.
            length: (n,) bytes, or -1 where nobody knows; `lengths` is what they come to.
            versions: of its files; None: each object is a local file.
        """
        n = len(offset)
        self.versions = versions or Versions(n)
        self.name = name
        self.offset = offset
        self.length = length
        self.space = space
        self.life = np.zeros(n, np.uint8)
        self.pins = np.zeros(n, np.int32)
        room = np.zeros(n, np.int64)
        self.pool: FixedPool | PagedPool = space.pool(lengths)
        # bytes each takes up, from when it is placed until it leaves; a record takes its length
        self.room = length if isinstance(self.pool, FixedPool) else room
        self.owners = Owners(space.nbytes, self.pool) if isinstance(self.pool, PagedPool) else None
        self.groups: list[Group] = []
        self.keeper: Keeper | None = None
        self.latency = Latency()
        self.service = Service()
        self.warming = -1  # next object to load for `Warm`, or -1
        self.news = 0  # planned reads since the keeper last sorted all residents
        #: Which lengths the manifest says (None: all); the others are what was read last.
        self.listed = _listed(length, lengths)
        self._known = lengths.known
        self._known_nbytes = lengths.nbytes
        self.counts = dict.fromkeys((*COUNTED, "reads", "read_nbytes", "failed"), 0)
        why = ("due_later", "other_dataset", "dropped", "stalled", "changed")
        self.evicted = dict.fromkeys(why, 0)
        self.resident = 0
        self.resident_nbytes = 0

    def __len__(self) -> int:
        return len(self.offset)

    def expected(self, length: Sizes) -> Sizes:
        """The same lengths, with the mean where one is unknown."""
        strange = length < 0
        return np.where(strange, int(self.mean), length) if some(strange) else length

    @property
    def mean(self) -> float:
        """Bytes of an object, as far as known."""
        if not self._known:
            return max(min(_GUESS_NBYTES, self.space.nbytes / _REGION_SHARE), 1.0)
        return max(self._known_nbytes / self._known, 1.0)

    @property
    def nbytes(self) -> float:
        """Bytes of the whole dataset, unknown lengths guessed."""
        return self.mean * len(self)

    @property
    def active(self) -> bool:
        """Whether anybody reads it."""
        return any(g.sessions for g in self.groups)

    # --- objects -------------------------------------------------------------------------------

    def pin(self, ids: Index, *, distinct: bool = False) -> None:
        """One more reader for each (an object may come twice, unless they are `distinct`)."""
        if distinct:
            self.pins[ids] += ONE
        else:
            np.add.at(self.pins, ids, ONE)

    def unpin(self, ids: Index, *, distinct: bool = False) -> None:
        """One reader less for each; whatever nobody has pinned then may leave."""
        if distinct:
            self.pins[ids] -= ONE
        else:
            np.subtract.at(self.pins, ids, ONE)

    def release(self, ids: Index) -> None:
        """Tell the keeper of those among `ids` that are resident and unpinned."""
        if self.keeper is not None and not self.keeper.stale:
            loose = (self.pins[ids] == 0) & (self.life[ids] == RESIDENT)
            if some(loose):
                self.keeper.released(ids if every(loose) else ids[loose])

    def learn(self, ids: Index, nbytes: Sizes) -> None:
        """These lengths are now known."""
        new = self.length[ids] < 0
        self._known += int(new.sum())
        self._known_nbytes += int(nbytes[new].sum())
        self.length[ids] = nbytes

    def unlearn(self, ids: Index) -> None:
        """The lengths of these objects were wrong. (A fixed pool's records have but one length.)"""
        if isinstance(self.pool, PagedPool):
            self._known -= len(ids)
            self._known_nbytes -= int(self.length[ids].sum())
            self.length[ids] = -1

    def outdate(self, ids: Index) -> None:
        """These (distinct, resident, unpinned) are of files that have changed since."""
        self.evict(ids, "changed")
        if self.listed is not None:
            self.unlearn(ids[~self.listed[ids]])

    def residents_of(self, files: NDArray[np.int32]) -> Index:
        """(k,) resident objects of some files."""
        bounds = map(self.versions.objects, files.tolist())
        found = [a + np.flatnonzero(self.life[a:b] == RESIDENT) for a, b in bounds]
        return np.concatenate([np.empty(0, np.intp), *found])

    def place(self, ids: Index, nbytes: Sizes) -> Sizes:
        """(k,) offsets for objects of these sizes in free room; NOWHERE where there is none."""
        if isinstance(self.pool, FixedPool):
            return self.pool.alloc(nbytes)
        offset, self.room[ids] = self.pool.settle(nbytes, self.crumb)
        return offset

    def give_back(self, ids: Index, offset: Sizes) -> None:
        """These places are free again."""
        self.pool.free(offset, self.room[ids])

    def inherit(self, ids: Index, wants: Sizes, victims: Index) -> Sizes:
        """(k,) offsets: these objects take the rooms of those who leave, or as much as they want.

        wants: (k,) whole grains, no more than the victims' rooms.
        """
        rooms = self.room[victims]
        offset = self.vacate(victims, "due_later")
        large = rooms - wants >= self.crumb
        if some(large) and isinstance(self.pool, PagedPool):
            self.pool.shrink(offset[large], rooms[large], wants[large])
            rooms[large] = wants[large]
        self.room[ids] = rooms
        return offset

    @property
    def crumb(self) -> int:
        """A hole of fewer bytes is not worth keeping apart (nearly all images are larger)."""
        return int(self.mean * _CRUMB)

    def publish(self, ids: Index, offset: Sizes, *, seen: bool) -> None:
        """These objects lie there now; `seen`: and clients are told so."""
        if seen:
            self.offset[ids] = offset
        if self.owners is not None:
            self.owners.put(ids, offset)
        self.life[ids] = RESIDENT
        self.resident += len(ids)
        self.resident_nbytes += int(self.length[ids].sum())

    def hide(self, ids: Index, offset: Sizes) -> None:
        """These residents are being moved there; the shell publishes them after that."""
        self.offset[ids] = NOWHERE
        if self.owners is not None:
            self.owners.put(ids, offset)

    def evict(self, ids: Index, why: str) -> int:
        """These (distinct, resident, unpinned) leave; returns their bytes."""
        if not len(ids):
            return 0
        nbytes = self.room[ids]
        self.pool.free(self.vacate(ids, why), nbytes)
        return int(nbytes.sum())

    def evict_all(self) -> None:
        """All leave, and for good: nobody reads them, nothing is under way."""
        if isinstance(self.pool, FixedPool):
            if self.resident:
                self.offset[:] = NOWHERE
            self.evicted["dropped"] += self.resident
            self.pool.clear()
        elif self.resident:
            self.evict(self.loose(), "dropped")

    def lose(self, ids: Index, offset: Sizes) -> None:
        """These residents, which nobody was told of, never got to their places."""
        self.resident -= len(ids)
        self.resident_nbytes -= int(self.length[ids].sum())
        self.give_back(ids, offset)
        self.fail(ids)

    def vacate(self, ids: Index, why: str) -> Sizes:
        """Like `evict`, but their places are not given back: (k,) offsets for others."""
        offset = self.offset[ids]
        self.offset[ids] = NOWHERE
        self.life[ids] = ABSENT
        self.resident -= len(ids)
        self.resident_nbytes -= int(self.length[ids].sum())
        self.evicted[why] += len(ids)
        return offset

    def landed(self, ids: Index, offset: Sizes, *, seen: bool = True) -> bool:
        """These objects arrived; whether nobody wants some of them any more."""
        self.publish(ids, offset, seen=seen)
        unwanted = bool(np.count_nonzero(self.pins[ids]) < len(ids))
        if unwanted:
            self.release(ids)
        return unwanted

    def count(self, session: Session, life: NDArray[np.uint8], misses: int) -> None:
        """Reads of a session by what was found: resident, under way for another, or absent."""
        hits = int(np.count_nonzero(life == RESIDENT))
        for name, n in zip(COUNTED, (hits, len(life) - hits - misses, misses), strict=True):
            self.counts[name] += n
            setattr(session, name, getattr(session, name) + n)

    def snapshot(self) -> dict[str, float | str]:
        """For `creel stats`."""
        return {
            "objects": len(self),
            "nbytes": self.nbytes,
            "resident_objects": self.resident,
            "resident_nbytes": self.resident_nbytes,
            "used_nbytes": self.pool.used,
            "policy": _POLICIES.get(type(self.keeper), "none"),
            "fetch_latency_s": self.latency.seconds,
            **self.counted(),
        }

    def counted(self) -> dict[str, int]:
        """All that only grows, by name."""
        return {**self.counts, **{f"evicted_{why}": n for why, n in self.evicted.items()}}

    def fail(self, ids: Index) -> None:
        """There is no room for these: their readers go to the source."""
        self.life[ids] = FAILED
        self.counts["failed"] += len(ids)

    def loose(self) -> Index:
        """(k,) residents that nobody has pinned."""
        return np.flatnonzero((self.life == RESIDENT) & (self.pins == 0))

    def evict_region(self, need: int, busy: Sizes, why: str) -> int:
        """Empty one stretch of the space, for another dataset or a large object; bytes freed.

        Args:
            need: bytes wanted; a fixed pool gives a whole slab, which goes back to the space.
            busy: (k,) offsets of fetches under way, which cannot leave.
        """
        ids = np.flatnonzero(self.offset != NOWHERE)  # what is being moved is nowhere for now
        if not len(ids):
            return 0
        place, places = self._places(self.offset[ids], need)
        stuck = np.bincount(place[self.pins[ids] > 0], minlength=places)
        stuck += np.bincount(self._places(busy, need)[0], minlength=places)
        held = np.bincount(place, minlength=places)
        wanted = np.bincount(place[self._wanted(ids)], minlength=places)
        score = np.where((held == 0) | (stuck > 0), np.inf, wanted)
        best = int(score.argmin())
        if not np.isfinite(score[best]):
            if isinstance(self.pool, FixedPool):
                return 0
            best = int((held - stuck).argmax())  # in pages, a part of a region is of use, too
        inside = ids[(place == best) & (self.pins[ids] == 0)]
        return self.evict(inside, why)

    def _places(self, offset: Sizes, need: int) -> tuple[Index, int]:
        if isinstance(self.pool, FixedPool):
            starts = self.pool.ranges()[0]
            return starts.searchsorted(offset, side="right") - 1, len(starts)
        size = max(need, min(self.space.nbytes // _REGION_SHARE, _REGION_NBYTES), 1)
        return offset // size, self.space.nbytes // size + 1

    def _wanted(self, ids: Index) -> NDArray[np.bool_]:
        """Which are read again in the present epoch."""
        out = np.zeros(len(ids), np.bool_)
        if isinstance(self.keeper, EpochKeeper):
            uses = self.keeper.uses
            out = uses.due[ids] < uses.start(self.keeper.epoch + 1)
        return out

    # --- jobs ----------------------------------------------------------------------------------

    def join(
        self,
        number: int,
        job: str,
        rank: int,
        world: int,
        now: float,
        recheck: str = "never",
        generation: int = 0,
    ) -> Session:
        """A session of this rank; with the other ranks of its job where they are here."""
        for group in self.groups:
            if group.job == job and group.world == world and rank not in group.sessions:
                break
        else:
            group = Group(job, world, Uses(len(self)))
            self.groups.append(group)
        session = Session(number, self, group, rank, now, recheck, generation)
        group.sessions[rank] = session
        return session

    def leave(self, session: Session) -> None:
        """The session is over, and with the last one of a group the group."""
        group = session.group
        del group.sessions[session.rank]
        if not group.sessions:
            self.groups.remove(group)

    def choose_keeper(self, window: Window) -> None:
        """Take the keeper that suits the plans; keep the present one where it still does."""
        groups = [g for g in self.groups if g.planned()]
        if not groups:
            if not self.groups:
                self.keeper = None
            return
        uses = [g.uses for g in groups]
        if all(s.blind for g in groups for s in g.sessions.values()):
            if not isinstance(self.keeper, RecentKeeper):
                self.keeper = RecentKeeper(self.life, self.pins, uses)
            self.keeper.all_uses = uses
            return
        if len(groups) == 1 and _is_permutation(groups[0]):
            if isinstance(self.keeper, EpochKeeper) and self.keeper.uses is uses[0]:
                return
            size = self.length if window.opens_dominate else None
            alike = window.opens_dominate or isinstance(self.pool, FixedPool)
            room = None if alike else self.room
            self.keeper = EpochKeeper(self.life, self.pins, uses[0], size, room)
            first = next(iter(groups[0].sessions.values()))
            self.keeper.epoch = first.stream.epoch(first.done)[0] + first.epoch_shift
            self.keeper.known = groups[0].known()
        elif not isinstance(self.keeper, FarKeeper) or self.keeper.all_uses != uses:
            self.keeper = FarKeeper(self.life, self.pins, uses, lambda: _clocks(groups))

    def rebuild(self, under_way: Index, window: Window) -> None:
        """Make pins, states, keeper and next uses anew from the plans and what is under way."""
        self.groups = [g for g in self.groups if g.sessions]
        self.pins[:] = 0
        for s in (s for group in self.groups for s in group.sessions.values()):
            np.add.at(self.pins, s.stream.objects(s.at, s.front), ONE)
        self.life[self.life == FETCHING] = ABSENT
        self.life[under_way] = FETCHING
        for group in self.groups:
            group.replan()
        self.keeper = None
        self.choose_keeper(window)

    def check(self, under_way: Index) -> None:
        """Raise IllegalEventError unless state, pins, offsets and sums agree."""
        pins = np.zeros(len(self), np.int64)
        for s in (s for group in self.groups for s in group.sessions.values()):
            must(0 <= s.done <= s.ready <= s.stream.end, f"session {s.id}: steps out of order")
            must(s.at == s.stream.start(s.done), f"session {s.id}: at is not where done begins")
            must(s.at <= s.checked <= s.front <= s.stream.stop, f"session {s.id}: front")
            np.add.at(pins, s.stream.objects(s.at, s.front), 1)
        must(bool((pins == self.pins).all()), "pins are not what the sessions hold")
        must(not (self.pins[self.life == ABSENT] > 0).any(), "a pinned object was evicted")
        resident, known = self.life == RESIDENT, self.length >= 0
        must(bool(((self.offset >= 0) == resident).all()), "published is not resident")
        must(bool(known[resident].all()), "a resident of unknown length")
        must(bool((self.room >= self.length)[resident].all()), "a resident without enough room")
        must(int(resident.sum()) == self.resident, "residents are miscounted")
        must(int(self.length[resident].sum()) == self.resident_nbytes, "resident bytes")
        fetching = np.flatnonzero(self.life == FETCHING)
        coming = np.append(fetching, np.flatnonzero(self.life == OVERDUE))
        must(
            np.array_equal(np.sort(coming), np.sort(under_way)),
            "fetching is not under way, or twice",
        )
        must(int(known.sum()) == self._known, "known lengths are miscounted")
        must(int(self.length[known].sum()) == self._known_nbytes, "known bytes")


def _listed(length: Sizes, lengths: Lengths) -> NDArray[np.bool_] | None:
    if lengths.known == lengths.objects:
        return None
    return length >= 0 if lengths.known else np.broadcast_to(np.False_, len(length))


def _is_permutation(group: Group) -> bool:
    repeats, reads = group.uses.repeats()
    return repeats <= max(_PADDING * reads, group.world)


def _clocks(groups: list[Group]) -> list[tuple[float, float]]:
    """Lines that put the groups' steps on one clock: the first one's steps."""
    lead = groups[0]
    out = []
    for group in groups:
        ours, theirs = lead.step_s(), group.step_s()
        rate = theirs / ours if ours and theirs else 1.0
        out.append((rate, lead.clock() - rate * group.clock()))
    return out
