"""A core without a daemon around it, and random events for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from creel.cache.memory.pools.allocator import SYSTEM_PAGE, Allocator
from creel.cache.memory.pools.free_ranges import NOWHERE
from creel.cache.memory.pools.runs import HEADER, Runs, headers, pieces
from creel.daemon.core.core import Core
from creel.daemon.core.events import (
    DISK,
    HELD,
    Action,
    AskPlan,
    CancelFetches,
    DatasetAdded,
    DiskOpened,
    DropFromDisk,
    Dropped,
    Event,
    Fetched,
    FetchObjects,
    FoundOnDisk,
    MemoryFree,
    MemoryShort,
    PeerAsked,
    PeerServed,
    PlanExtended,
    PlanRetention,
    PlanTruncated,
    Progressed,
    Publish,
    ReleaseMemory,
    RetentionPlanned,
    ServeObjects,
    SessionClosed,
    SessionOpened,
    SetReady,
    Spilled,
    SpillObjects,
    Tick,
    Unregistered,
    Warm,
)
from creel.daemon.core.versions import Versions
from creel.policies.prefetch import Window
from kit import default_window, lengths_of


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


class Rig:
    """A core, a model of the arena (offset -> whose bytes), and a source that can fail.

    After each event the invariants hold, and every object of a ready step that is published has its
    own bytes at its offset.
    """

    def __init__(self, capacity: int, window: Window | None = None) -> None:
        self.core = Core(Allocator(capacity), window or default_window())
        self.now = 0.0
        self.offset: dict[str, NDArray[np.int64]] = {}
        self.length: dict[str, NDArray[np.int64]] = {}
        self.size: dict[str, NDArray[np.int64]] = {}  # bytes at the source
        self.bad: dict[str, set[int]] = {}  # objects that cannot be read from the source
        self.readers: dict[int, Reader] = {}
        self.fetches: dict[int, FetchObjects] = {}
        self.landed: dict[int, int] = {}  # of unknown lengths, in this event: object -> bytes
        self.held: dict[int, dict[int, int]] = {}  # by fetch from HELD
        self.bytes: dict[
            int, tuple[str, int, int]
        ] = {}  # of a run: start -> dataset, object, bytes
        self.runs: Runs = {}  # runs written last to each place
        self.reads = 0
        self.cancelled: frozenset[int] = frozenset()  # objects that the source does not read
        self.memory: Callable[[int], int] = lambda k: k  # how many of k there is memory for
        self.stored = 0  # objects copied
        self.plans: list[PlanRetention] = []
        self.plans_asked: list[AskPlan] = []  # requests to peers that are not answered
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
        self.offset[name] = np.full(len(size), -1, np.int64)
        self.length[name] = size.copy() if known else np.full(len(size), -1, np.int64)
        self.bad[name] = set()
        length = self.length[name]
        if known and (size == size[0]).all():
            length = np.broadcast_to(size[0], len(size))  # read-only, as in the registry
        versions = Versions(len(size), bounds, remote)
        shared = self.offset[name].view()
        shared.flags.writeable = False  # only actions say what to write there
        self.feed(DatasetAdded(name, shared, length, lengths_of(length), versions))

    def open(
        self,
        session: int,
        name: str,
        job: str = "j",
        rank: int = 0,
        world: int = 1,
        recheck: str = "never",
    ) -> None:
        self.readers[session] = Reader(name)
        self.feed(SessionOpened(session, name, job, rank, world, recheck))

    def extend(
        self, session: int, epoch: int, steps: list[list[int]], *, unplanned: bool = False
    ) -> list[Action]:
        reader = self.readers[session]
        first = len(reader.objects)
        reader.objects += steps
        ids = np.array([x for step in steps for x in step], np.int32)
        ends = np.cumsum([len(step) for step in steps], dtype=np.int64)
        return self.feed(PlanExtended(session, epoch, first, ids, ends, unplanned))

    def truncate(self, session: int, step: int) -> None:
        reader = self.readers[session]
        del reader.objects[max(step, reader.done) :]
        reader.wanted = min(reader.wanted, len(reader.objects))
        self.feed(PlanTruncated(session, step))

    def progress(self, session: int, done: int = 0, wanted: int = 0) -> list[Action]:
        reader = self.readers[session]
        reader.done = min(max(reader.done, done), len(reader.objects))
        reader.wanted = min(max(reader.wanted, wanted), len(reader.objects))
        return self.feed(Progressed(session, done, wanted))

    def close(self, session: int) -> None:
        del self.readers[session]
        self.feed(SessionClosed(session))

    def land(self, number: int) -> list[Action]:
        """Let the source answer a fetch."""
        fetch = self.fetches.pop(number)
        name = fetch.dataset
        if fetch.origin == HELD:
            return self.copy(fetch)
        if fetch.origin == DISK:
            return self.read_disk(fetch)
        out = self.size[name][fetch.ids].copy()
        if number in self.cancelled:
            self.cancelled -= {number}
            return self.feed(Fetched(number, np.full(len(out), -1), self.versions(fetch)))
        self.reads += len(out)
        for i, x in enumerate(fetch.ids.tolist()):
            if x in self.bad[name]:
                out[i] = -1
            elif fetch.offset[i] == NOWHERE:
                self.landed[x] = int(out[i])
            else:
                self.runs |= fetch.runs
                self.put(int(fetch.offset[i]), name, x, int(fetch.length[i]))
        return self.feed(Fetched(number, out, self.versions(fetch)))

    def copy(self, fetch: FetchObjects) -> list[Action]:
        """Copy objects held in private memory, as far as there is room."""
        held = self.held.pop(fetch.fetch)
        out = np.array([held[x] for x in fetch.ids.tolist()])
        out[self.memory(len(out)) :] = -1
        self.runs |= fetch.runs
        for x, at, n in zip(fetch.ids.tolist(), fetch.offset.tolist(), out.tolist(), strict=True):
            if n >= 0:
                self.put(at, fetch.dataset, x, n)
        return self.feed(Fetched(fetch.fetch, out, self.versions(fetch)))

    def read_disk(self, fetch: FetchObjects) -> list[Action]:
        """Let the disk answer a fetch; it may not have an object any more."""
        disk, self.runs = self.disk.setdefault(fetch.dataset, {}), self.runs | fetch.runs
        out = np.array([disk.get(x, -1) for x in fetch.ids.tolist()], np.int64)
        out[out != fetch.length] = -1
        self.disk_reads += int(np.count_nonzero(out >= 0))
        for x, at, n in zip(fetch.ids.tolist(), fetch.offset.tolist(), out.tolist(), strict=True):
            if n >= 0:
                self.put(at, fetch.dataset, x, n)
            else:
                disk.pop(x, None)
        return self.feed(Fetched(fetch.fetch, out, self.versions(fetch)))

    def write_disk(self) -> list[Action]:
        """Let the disk's thread execute its orders, up to and including the first write."""
        while self.to_disk:
            order = self.to_disk.pop(0)
            disk = self.disk.setdefault(order.dataset, {})
            if isinstance(order, DropFromDisk):
                for x in order.ids.tolist():
                    disk.pop(x, None)
                continue
            stored = np.zeros(len(order.ids), np.bool_)
            objects = zip(
                *(a.tolist() for a in (order.ids, order.place, order.nbytes)), strict=True
            )
            for i, (x, place, nbytes) in enumerate(objects):
                assert all(
                    self.bytes[at] == (order.dataset, x, n) for at, n in self.ranges(place, nbytes)
                ), "what is being written has left"
                stored[i] = self.disk_room(nbytes) and order.dataset != self.disk_fails
                if stored[i]:
                    disk[x] = nbytes
            full = self.disk_fails is None and not stored.all()
            return self.feed(Spilled(order.spill, stored, full))
        return []

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

    def versions(self, fetch: FetchObjects) -> NDArray[np.int64] | None:  # noqa: ARG002
        """Return the versions of the objects read."""
        return None

    def put(self, place: int, name: str, x: int, nbytes: int) -> None:
        """Write an object to its place."""
        for start, size in self.ranges(place, nbytes):
            self.write(start, name, x, size)

    def ranges(self, place: int, nbytes: int) -> list[list[int]]:
        return [[place, nbytes]] if place >= 0 else self.runs[place].tolist()

    def write(self, offset: int, name: str, x: int, nbytes: int) -> None:
        for at, (_, _, n) in list(self.bytes.items()):
            if at < offset + nbytes and offset < at + n:
                del self.bytes[at]
        self.bytes[offset] = (name, x, nbytes)

    def feed(self, event: Event) -> list[Action]:
        self.now += 0.01
        actions = self.core.handle(event, self.now)
        for action in actions:
            self.do(action)
        self.landed.clear()
        while self.plans and not self.late():
            self.plan()
        if self.checking:
            self.core.check()
            self.look()
        return actions

    def recover(self, session: int) -> None:
        """Recover after an exception in `handle`."""
        for action in self.core.recover(session):
            self.do(action)
        self.core.check()

    def plan(self) -> None:
        """Let the planner answer the oldest question."""
        asked = self.plans.pop(0)
        self.feed(RetentionPlanned(asked.dataset, asked.boundary, asked.boundary.plan()))

    def do(self, action: Action) -> None:
        if isinstance(action, FetchObjects):
            assert action.fetch not in self.fetches
            assert len(set(action.ids.tolist())) == len(action.ids)
            self.fetches[action.fetch] = action
            self.unpublished(action)
            if action.origin == HELD:
                self.stored += len(action.ids)
                self.held[action.fetch] = {x: self.landed.pop(x) for x in action.ids.tolist()}
                assert list(self.held[action.fetch].values()) == action.length.tolist()
        elif isinstance(action, Publish):
            self.publish(action)
        elif isinstance(action, PlanRetention | AskPlan):
            asked: list[Any] = self.plans if isinstance(action, PlanRetention) else self.plans_asked
            asked.append(action)
        elif isinstance(action, CancelFetches):
            self.cancelled |= action.fetches
        elif isinstance(action, SpillObjects | DropFromDisk):
            self.to_disk.append(action)
        elif isinstance(action, ReleaseMemory):
            for start, nbytes in action.ranges:
                self.release(start, nbytes)
        elif isinstance(action, ServeObjects):
            assert action.request not in self.sending
            self.sending[action.request] = action
        else:
            assert isinstance(action, SetReady)
            reader = self.readers[action.session]
            assert (action.ready, action.early) != (reader.ready, reader.early), "not moved"
            reader.ready, reader.early = action.ready, action.early

    def release(self, start: int, nbytes: int) -> None:
        """Forget the bytes of a range."""
        for at in [at for at in self.bytes if start <= at < start + nbytes]:
            del self.bytes[at]

    def publish(self, action: Publish) -> None:
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
        offset[action.ids] = action.offset

    def unpublished(self, fetch: FetchObjects) -> None:
        """Check that no fetch starts into bytes that the table gives to another object."""
        taken = []
        for name, offset in self.offset.items():
            for x in np.flatnonzero(offset != NOWHERE).tolist():
                taken += self.ranges(int(offset[x]), int(self.length[name][x]))
        starts, nbytes = np.array(taken, np.int64).reshape(-1, 2).T
        runs = self.runs | fetch.runs
        for place, n in zip(fetch.offset.tolist(), fetch.length.tolist(), strict=True):
            if place != NOWHERE:
                for start, size in [[place, n]] if place >= 0 else runs[place].tolist():
                    assert not ((starts < start + size) & (start < starts + nbytes)).any()

    def look(self) -> None:
        """Check that readers find their own bytes, which stay in place until they are done."""
        for number, answer in self.sending.items():
            name, ids = self.asked_for[number]
            for x, place, n in zip(ids, answer.place, answer.nbytes, strict=True):
                if n >= 0:
                    ranges = self.ranges(int(place), int(n))
                    assert all(self.bytes[a] == (name, x, k) for a, k in ranges), "sent as another"
        seen = {}
        for number, reader in self.readers.items():
            assert reader.done <= reader.ready
            for step, x in ((s, x) for s in reader.may_read() for x in reader.objects[s]):
                at = int(self.offset[reader.dataset][x])
                if at != NOWHERE:
                    ranges = self.ranges(at, int(self.length[reader.dataset][x]))
                    assert all(self.bytes[a] == (reader.dataset, x, n) for a, n in ranges)
                    seen[number, step, x] = at
                assert self.seen.get((number, step, x), at) == at, "moved under a reader"
        self.seen = seen
        assert self.held.keys() <= self.fetches.keys(), "bytes are held that nobody will fetch"

    def settle(self, limit: int = 10_000) -> None:
        """Let the source answer all fetches."""
        while (self.fetches or self.to_disk) and limit:
            if self.fetches:
                self.land(next(iter(self.fetches)))
            else:
                self.write_disk()
            limit -= 1
        assert limit


def absent(rig: Rig, name: str, ids: range | list[int]) -> bool:
    return bool((rig.offset[name][list(ids)] == NOWHERE).all())


class Chaos:
    """Random events for a rig."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = np.random.default_rng(seed)
        self.sizes: dict[str, int] = {}
        capacity = int(rng.integers(300, 20_000))
        tight = rng.random() < 0.3
        window = default_window(
            inflight_objects=int(rng.integers(2, 200)),
            inflight_nbytes=int(rng.integers(200, 20_000)),
            fetch_objects=int(rng.integers(1, 20)),
            min_steps=int(rng.integers(1, 8)),
        )
        self.rig = Rig(capacity // (10 if tight else 1), window)
        self.unplanned = float(rng.choice([0.0, 0.2, 1.0], p=[0.6, 0.2, 0.2]))
        self.epoch: dict[int, int] = {}
        self.next = 1
        for name in "abc"[: rng.integers(1, 4)]:
            n = int(rng.integers(1, 120))
            kind = rng.integers(0, 4)
            lengths = np.full(n, 100) if kind == 0 else rng.integers(0, 400, n)
            self.sizes[name] = n
            self.rig.register(name, lengths.tolist(), known=bool(kind < 2))
            self.rig.bad[name] = set(rng.integers(0, n, n // 20).tolist())
        if seed % 3 == 0:
            self.rig.memory = self.some
        if seed % 2:
            self.rig.late = lambda: bool(rng.random() < 0.9)

    def some(self, k: int) -> int:
        """Return how many of k objects the machine has memory for."""
        return int(self.rng.integers(0, k + 1)) if self.rng.random() < 0.3 else k

    def turn(self) -> None:
        rng, rig = self.rng, self.rig
        open_ = list(rig.readers)
        what = rng.random()
        if what < 0.45 and rig.fetches:
            rig.land(int(rng.choice(list(rig.fetches))))
        elif what < 0.5 and len(open_) < 5:
            self.open()
        elif what < 0.6 and open_:
            self.extend(int(rng.choice(open_)))
        elif what < 0.9 and open_:
            self.progress(int(rng.choice(open_)))
        elif what < 0.92 and open_:
            s = int(rng.choice(open_))
            rig.truncate(s, int(rng.integers(0, len(rig.readers[s].objects) + 2)))
        elif what < 0.93 and open_:
            rig.close(int(rng.choice(open_)))
        elif what < 0.95:
            rig.feed(Warm(str(rng.choice(list(self.sizes)))))
        elif what < 0.96:
            rig.feed(Dropped(str(rng.choice(list(self.sizes)))))
        elif what < 0.97:
            self.renew(str(rng.choice(list(self.sizes))))
        else:
            change = int(rng.integers(1, 3 * SYSTEM_PAGE))
            rig.feed([Tick(), Tick(), MemoryShort(change), MemoryFree(change)][rng.integers(4)])

    def renew(self, name: str) -> None:
        """Remove a dataset without readers, and register it again."""
        rig = self.rig
        if not rig.core.busy(name):
            size, bad = rig.size[name], rig.bad[name]
            rig.feed(Unregistered(name))
            rig.register(name, size.tolist(), known=bool(self.rng.random() < 0.5))
            rig.bad[name] = bad

    def open(self) -> None:
        rng = self.rng
        name = str(rng.choice(list(self.sizes)))
        job = str(rng.choice(["j", "k"]))
        self.rig.open(self.next, name, job, int(rng.integers(0, 3)), 3)
        self.epoch[self.next] = 0
        self.next += 1

    def extend(self, session: int) -> None:
        rng, reader = self.rng, self.rig.readers[session]
        n = self.sizes[reader.dataset]
        ids = rng.permutation(n) if rng.random() < 0.7 else rng.integers(0, n, n)
        batch = int(rng.integers(1, 20))
        cuts = [ids[i : i + batch].tolist() for i in range(0, len(ids), batch)]
        if rng.random() < 0.1:
            cuts.insert(0, [])
        if rng.random() < self.unplanned:
            self.rig.extend(session, self.epoch[session], cuts[:1], unplanned=True)
            return
        self.rig.extend(session, self.epoch[session], cuts)
        self.epoch[session] += rng.random() < 0.8

    def progress(self, session: int) -> None:
        rng, reader = self.rng, self.rig.readers[session]
        done = reader.done
        if rng.random() < 0.7:
            done = int(rng.integers(reader.done, max(reader.ready, reader.done) + 1))
        elif rng.random() < 0.1:
            done = int(rng.integers(-5, len(reader.objects) + 5))  # hostile, or read directly
        wanted = 0
        if rng.random() < 0.3:
            wanted = reader.ready + int(rng.integers(1, 4))
        elif rng.random() < 0.05:
            wanted = 1 << 60
        self.rig.progress(session, done, wanted)

    def finish(self) -> None:
        """Let all sessions read to the end, at most 10 steps more: none may hang."""
        rig = self.rig
        for n, reader in rig.readers.items():
            if len(reader.objects) > reader.done + 10:
                rig.truncate(n, reader.done + 10)
        for _ in range(20_000):
            left = [n for n, r in rig.readers.items() if r.done < len(r.objects)]
            if not left:
                return
            for n in left:
                reader = rig.readers[n]
                rig.progress(n, reader.ready, reader.ready + 1)
            if rig.fetches:
                rig.land(next(iter(rig.fetches)))
            rig.write_disk()
        raise AssertionError(f"stuck: {rig.readers}")


class Bytes(Rig):
    """A rig whose arena holds real bytes: a reader's bytes are compared with the source's."""

    def __init__(self, capacity: int, window: Window | None = None) -> None:
        super().__init__(capacity, window)
        self.arena = np.zeros(capacity, np.uint8)
        self.linked = 0

    @staticmethod
    @cache
    def content(name: str, x: int, nbytes: int) -> bytes:
        return np.random.default_rng([ord(name), x]).bytes(nbytes)

    def put(self, place: int, name: str, x: int, nbytes: int) -> None:
        arena, data = self.arena.data, self.content(name, x, nbytes)
        for start, header in headers(self.runs[place], nbytes) if place < NOWHERE else []:
            arena[start : start + HEADER.size] = header
            self.linked += 1
        for piece in pieces(arena, place, nbytes) or []:
            piece[:], data = data[: len(piece)], data[len(piece) :]
        assert not data

    def release(self, start: int, nbytes: int) -> None:
        self.arena[start : start + nbytes] = 0

    def look(self) -> None:
        """Check that unpinned objects also have their own bytes while they are listed."""
        for name, offset in self.offset.items():
            for x in np.flatnonzero(offset != NOWHERE).tolist():
                at, n = int(offset[x]), int(self.length[name][x])
                assert n == self.size[name][x]
                found = pieces(self.arena.data, at, n)
                assert b"".join(found or []) == self.content(name, x, n)
        seen = {
            (number, step, x): int(self.offset[reader.dataset][x])
            for number, reader in self.readers.items()
            for step in range(reader.done, reader.ready)
            for x in reader.objects[step]
            if self.offset[reader.dataset][x] != NOWHERE
        }
        assert all(self.seen.get(key, at) == at for key, at in seen.items()), "moved when pinned"
        self.seen = seen


class Images(Chaos):
    """Random events with sizes that vary like those of images, and with little memory."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = np.random.default_rng(seed)
        sizes = {
            name: np.maximum(rng.lognormal(6.5, 0.9, int(rng.integers(40, 120))), 1).astype(int)
            for name in "ab"[: rng.integers(1, 3)]
        }
        total = int(sum(s.sum() for s in sizes.values()))
        capacity = int(total * rng.uniform(0.25, 0.8))
        self.rig: Bytes = Bytes(capacity, default_window(fetch_objects=8, min_steps=3))
        self.sizes = {name: len(s) for name, s in sizes.items()}
        self.epoch, self.next, self.unplanned = {}, 1, 0.2 * (seed % 2)
        for name, s in sizes.items():
            self.rig.register(name, s.tolist(), known=bool(rng.random() < 0.6))
            self.rig.bad[name] = set(rng.integers(0, len(s), 2).tolist())
            if rng.random() < 0.5 and self.rig.length[name][0] >= 0:
                self.rig.size[name][::17] += 5  # changed since they were listed
        if seed % 3 == 0:
            self.rig.memory = self.some
