"""A core in a shell that checks every action, with a source, a disk and peers that can fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core_shell import CoreShell, Labels
from creel.cache.memory.pools.free_ranges import NOWHERE
from creel.daemon.core.events import (
    DISK,
    HELD,
    Action,
    AskPlan,
    CancelFetches,
    CheckVersions,
    DiskOpened,
    DropFromDisk,
    Event,
    Fetched,
    FetchObjects,
    FoundOnDisk,
    PeerAsked,
    PeerServed,
    PlanRetention,
    Progressed,
    Publish,
    ReleaseMemory,
    ServeObjects,
    SetReady,
    Spilled,
    SpillObjects,
)
from creel.daemon.core.readers.twin import Twin
from creel.daemon.core.versions import Versions
from creel.messages import Close, Truncate
from creel.policies.prefetch import Window


@dataclass
class Reader:
    """A client as the shell sees it: its plan and its shared words."""

    dataset: str
    objects: list[list[int]] = field(default_factory=list)  # by step
    done: int = 0
    ready: int = 0
    early: tuple[int, ...] = ()
    wanted: int = 0

    def may_read(self) -> list[int]:
        """Return the steps whose bytes the client may copy."""
        ready = [*range(self.done, self.ready), *(k for k in self.early if k >= self.ready)]
        return [k for k in ready if k < len(self.objects)]  # the shell truncates before the core


class Rig(CoreShell):
    """A core, an arena, and a source that can fail.

    After each event the invariants hold, and every object of a ready step that is published has its
    own bytes at its offset.
    """

    def __init__(
        self, capacity: int, window: Window | None = None, arena: Labels | None = None
    ) -> None:
        super().__init__(capacity, window, event_s=0.01)
        self.arena = arena or Labels()
        self.length: dict[str, NDArray[np.int64]] = {}
        self.size: dict[str, NDArray[np.int64]] = {}  # bytes at the source
        self.bad: dict[str, set[int]] = {}  # objects that cannot be read from the source
        self.readers: dict[int, Reader] = {}
        self.fetches: dict[int, FetchObjects] = {}
        self.landed: dict[int, int] = {}  # of unknown lengths, in this event: object -> bytes
        self.held: dict[int, dict[int, int]] = {}  # by fetch from HELD
        self.reads = 0
        self.cancelled: frozenset[int] = frozenset()  # objects that the source does not read
        self.memory: Callable[[int], int] = lambda k: k  # how many of k there is memory for
        self.copied = 0  # objects
        self.plans: list[PlanRetention] = []
        self.plans_asked: list[AskPlan] = []  # requests to peers that are not answered
        self.to_check: list[CheckVersions] = []  # questions that the storage has not answered
        self.disk: dict[str, dict[int, int]] = {}  # bytes of each object that is on disk
        self.to_disk: list[SpillObjects | DropFromDisk] = []  # the disk's orders
        self.disk_fails: str | None = None  # a dataset whose writes fail
        self.disk_room: Callable[[int], bool] = lambda nbytes: True  # noqa: ARG005
        self.disk_reads = 0
        self.asked_for: dict[int, tuple[str, NDArray[np.int32]]] = {}  # by request of a peer
        self.sending: dict[int, ServeObjects] = {}  # answers whose bytes have not left
        self.late: Callable[[], bool] = lambda: False  # whether plans are late
        self.checking = True
        self.seen: dict[tuple[int, int, int], int] = {}  # session, ready step, object -> offset

    def register(
        self,
        name: str,
        sizes: list[int],
        *,
        known: bool = True,
        bounds: NDArray[np.int64] | None = None,
        remote: NDArray[np.bool_] | None = None,
    ) -> None:
        size = np.array(sizes, np.int64)
        self.size[name] = size
        self.length[name] = size.copy() if known else np.full(len(size), -1, np.int64)
        self.bad[name] = set()
        length = self.length[name]
        if known and (size == size[0]).all():
            length = np.broadcast_to(size[0], len(size))  # read-only, as in the registry
        self.add(name, length, Versions(len(size), bounds, remote))

    def open(
        self,
        session: int,
        name: str,
        job: str = "j",
        rank: int = 0,
        world: int = 1,
        recheck: str = "never",
        twin: Twin | None = None,
    ) -> None:
        self.readers[session] = Reader(name)
        super().open(session, name, job, rank, world, recheck, twin)

    def extend(
        self, session: int, epoch: int, steps: list[list[int]], *, unplanned: bool = False
    ) -> list[Action]:
        reader = self.readers[session]
        self.steps[session] = len(reader.objects)
        reader.objects += steps
        ids = np.array([x for step in steps for x in step], np.int32)
        ends = np.cumsum([len(step) for step in steps], dtype=np.int64)
        return self.tell(session, epoch, ids, ends, unplanned=unplanned)

    def truncate(self, session: int, step: int) -> None:
        reader = self.readers[session]
        del reader.objects[max(step, reader.done) :]
        reader.wanted = min(reader.wanted, len(reader.objects))
        self.feed(Truncate("", session, step))

    def progress(self, session: int, done: int = 0, wanted: int = 0) -> list[Action]:
        reader = self.readers[session]
        reader.done = min(max(reader.done, done), len(reader.objects))
        reader.wanted = min(max(reader.wanted, wanted), len(reader.objects))
        return self.feed(Progressed(session, done, wanted))

    def close(self, session: int) -> None:
        del self.readers[session]
        self.feed(Close(session))

    def land(self, number: int) -> list[Action]:
        """Let the source, the disk or private memory answer a fetch."""
        fetch = self.fetches.pop(number)
        out = self.nbytes_read(fetch)
        self.arena.runs |= fetch.runs
        columns = fetch.ids, fetch.offset, fetch.length, out
        for x, place, length, n in zip(*(a.tolist() for a in columns), strict=True):
            if n >= 0 and place == NOWHERE:
                self.landed[x] = n
            elif n >= 0:
                self.arena.put(place, fetch.dataset, x, length)
        return self.feed(Fetched(number, out, self.versions(fetch)))

    def nbytes_read(self, fetch: FetchObjects) -> NDArray[np.int64]:
        """Return (k,) bytes of each object, as far as its origin has it and there is memory."""
        ids = fetch.ids.tolist()
        if fetch.origin == HELD:
            held = self.held.pop(fetch.fetch)
            out = np.array([held[x] for x in ids])
            out[self.memory(len(out)) :] = -1
        elif fetch.origin == DISK:
            disk = self.disk.setdefault(fetch.dataset, {})
            out = np.array([disk.get(x, -1) for x in ids], np.int64)
            out[out != fetch.length] = -1
            for x in fetch.ids[out < 0].tolist():
                disk.pop(x, None)
            self.disk_reads += int(np.count_nonzero(out >= 0))
        elif fetch.fetch in self.cancelled:
            self.cancelled -= {fetch.fetch}
            out = np.full(len(ids), -1)
        else:
            self.reads += len(ids)
            out = self.size[fetch.dataset][fetch.ids].copy()
            out[np.isin(fetch.ids, list(self.bad[fetch.dataset]))] = -1
        return out

    def versions(self, fetch: FetchObjects) -> NDArray[np.int64] | None:  # noqa: ARG002
        """Return None: the source knows no versions."""
        return None

    def write_disk(self) -> list[Action]:
        """Let the disk's thread execute its orders, up to and including the first write."""
        while self.to_disk:
            order = self.to_disk.pop(0)
            disk = self.disk.setdefault(order.dataset, {})
            if isinstance(order, SpillObjects):
                stored = self.stored(order)
                disk |= zip(order.ids[stored].tolist(), order.nbytes[stored].tolist(), strict=True)
                full = self.disk_fails is None and not stored.all()
                return self.feed(Spilled(order.spill, stored, full))
            for x in order.ids.tolist():
                disk.pop(x, None)
        return []

    def stored(self, spill: SpillObjects) -> NDArray[np.bool_]:
        """Return (k,) which objects the disk takes; all of them must still be in memory."""
        for x, place, n in zip(spill.ids, spill.place, spill.nbytes, strict=True):
            assert self.arena.holds(int(place), spill.dataset, int(x), int(n)), "it has left"
        fails = spill.dataset == self.disk_fails
        return np.array([not fails and self.disk_room(n) for n in spill.nbytes.tolist()], np.bool_)

    def open_disk(self, nbytes: int) -> None:
        """Open a disk, with the objects that are on it already."""
        self.feed(DiskOpened(nbytes, 64))
        for name, held in self.disk.items():
            ids = np.array(sorted(held), np.int32)
            sizes = np.array([held[x] for x in ids.tolist()], np.int64)
            self.feed(FoundOnDisk(name, ids, sizes))

    def peer_asks(self, request: int, name: str, ids: list[int]) -> None:
        """Let a peer ask for objects; `sending` has the answer once there is one."""
        self.asked_for[request] = name, np.array(ids, np.int32)
        self.feed(PeerAsked(request, *self.asked_for[request], wait_s=1.0))

    def sent(self, request: int) -> None:
        """Note that the bytes of an answer have left."""
        del self.sending[request], self.asked_for[request]
        self.feed(PeerServed(request))

    def feed(self, event: Event) -> list[Action]:
        actions = super().feed(event)
        self.landed.clear()
        while self.plans and not self.late():
            self.fulfil(self.plans.pop(0))
        if self.checking:
            self.core.check()
            self.look()
        return actions

    def recover(self, session: int) -> None:
        """Recover after an exception in `handle`."""
        for action in self.core.recover(session):
            self.do(action)
        self.core.check()

    def do(self, action: Action) -> None:
        if isinstance(action, FetchObjects):
            self.begin_fetch(action)
        elif isinstance(action, Publish):
            self.may_publish(action)
        elif isinstance(action, PlanRetention | AskPlan):
            asked: list[Any] = self.plans if isinstance(action, PlanRetention) else self.plans_asked
            asked.append(action)
        elif isinstance(action, CheckVersions):
            self.to_check.append(action)
        elif isinstance(action, CancelFetches):
            self.cancelled |= action.fetches
        elif isinstance(action, SpillObjects | DropFromDisk):
            self.to_disk.append(action)
        elif isinstance(action, ReleaseMemory):
            for start, nbytes in action.ranges:
                self.arena.release(start, nbytes)
        elif isinstance(action, ServeObjects):
            assert action.request not in self.sending
            self.sending[action.request] = action
        else:
            assert isinstance(action, SetReady)
            reader = self.readers[action.session]
            assert (action.ready, action.early) != (reader.ready, reader.early), "not moved"
            reader.ready, reader.early = action.ready, action.early
        self.keep(action)

    def begin_fetch(self, fetch: FetchObjects) -> None:
        """Check that no fetch starts into bytes that the table gives to another object."""
        assert fetch.fetch not in self.fetches
        assert len(set(fetch.ids.tolist())) == len(fetch.ids)
        self.fetches[fetch.fetch] = fetch
        self.unpublished(fetch)
        if fetch.origin == HELD:
            self.copied += len(fetch.ids)
            self.held[fetch.fetch] = {x: self.landed.pop(x) for x in fetch.ids.tolist()}
            assert list(self.held[fetch.fetch].values()) == fetch.length.tolist()

    def unpublished(self, fetch: FetchObjects) -> None:
        taken = []
        for name, offset in self.offset.items():
            for x in np.flatnonzero(offset != NOWHERE).tolist():
                taken += self.arena.ranges(int(offset[x]), int(self.length[name][x]))
        starts, nbytes = np.array(taken, np.int64).reshape(-1, 2).T
        runs = self.arena.runs | fetch.runs
        for place, n in zip(fetch.offset.tolist(), fetch.length.tolist(), strict=True):
            if place != NOWHERE:
                for start, size in [[place, n]] if place >= 0 else runs[place].tolist():
                    assert not ((starts < start + size) & (start < starts + nbytes)).any()

    def may_publish(self, action: Publish) -> None:
        """Check that no client may be reading an object that leaves, after each action."""
        offset = self.offset[action.dataset]
        if isinstance(action.offset, int):
            assert action.offset == NOWHERE
            before = offset[action.ids]
            assert (before != NOWHERE).all() or isinstance(action.ids, slice), "left twice"
            gone = set(range(len(offset)) if isinstance(action.ids, slice) else action.ids.tolist())
            for reader in self.readers.values():
                if reader.dataset == action.dataset:
                    steps = [reader.objects[k] for k in reader.may_read()]
                    assert gone.isdisjoint(x for step in steps for x in step), "READY is ahead"
        else:
            assert (offset[action.ids] == NOWHERE).all(), "published twice"

    def look(self) -> None:
        """Check that readers find their own bytes, which stay in place until they are done."""
        for number, answer in self.sending.items():
            name, ids = self.asked_for[number]
            for x, place, n in zip(ids, answer.place, answer.nbytes, strict=True):
                assert n < 0 or self.arena.holds(int(place), name, x, int(n)), "sent as another"
        seen = {}
        for number, reader in self.readers.items():
            assert reader.done <= reader.ready or not self.settled
            for step, x in ((s, x) for s in reader.may_read() for x in reader.objects[s]):
                at = int(self.offset[reader.dataset][x])
                if at != NOWHERE:
                    nbytes = int(self.length[reader.dataset][x])
                    assert self.arena.holds(at, reader.dataset, x, nbytes), "another's bytes"
                    seen[number, step, x] = at
                assert self.seen.get((number, step, x), at) == at, "moved under a reader"
        self.seen = seen
        assert self.held.keys() <= self.fetches.keys(), "bytes are held that nobody will fetch"
        for name, offset in self.offset.items() if self.arena.compares_all else []:
            for x in np.flatnonzero(offset != NOWHERE).tolist():
                n = int(self.length[name][x])
                assert n == self.size[name][x]
                assert self.arena.holds(int(offset[x]), name, x, n), "listed, and another's bytes"

    def settle(self, limit: int = 10_000) -> None:
        """Let the source answer all fetches."""
        while limit:
            if not self.settled:
                self.end_turn()
            elif not (self.fetches or self.to_disk):
                break
            elif self.fetches:
                self.land(next(iter(self.fetches)))
            else:
                self.write_disk()
            limit -= 1
        assert limit


def absent(rig: Rig, name: str, ids: range | list[int]) -> bool:
    return bool((rig.offset[name][list(ids)] == NOWHERE).all())
