"""A core whose shell is a test: what a daemon's shell does around the core, without a daemon.

The core's actions are of two kinds. Some write tables that readers look at: `CoreShell.keep` does
so. All others ask for something that takes time: a read, a write, a plan, an answer to a peer. They
wait in `waiting` until the test says how they end; `fulfil` ends one as a source, a disk and a
planner do that never fail. Bytes are `Labels` (who lies where), real `Bytes`, or none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from creel.cache.memory.pools.allocator import Allocator
from creel.cache.memory.pools.free_ranges import NOWHERE
from creel.cache.memory.pools.runs import HEADER, Runs, headers, pieces
from creel.daemon.core.core import Core
from creel.daemon.core.events import (
    Action,
    CancelFetches,
    Checked,
    CheckVersions,
    DatasetAdded,
    DropFromDisk,
    Event,
    Fetched,
    FetchObjects,
    PlanExtended,
    PlanRetention,
    Progressed,
    Publish,
    ReleaseMemory,
    RetentionPlanned,
    SessionOpened,
    SetReady,
    Spilled,
    SpillObjects,
)
from creel.daemon.core.readers.twin import Twin
from creel.daemon.core.versions import Versions
from creel.messages import Open
from creel.policies.prefetch import Window
from kit import default_window, lengths_of

I64 = NDArray[np.int64]
#: A version that some storage may tell.
VERSION = 5 << 40 | 1
#: Those that the daemon enters together, if several come in a turn of its loop.
_POSTPONED = Fetched | Checked | Progressed
_UNANSWERED = Publish | SetReady | ReleaseMemory | CancelFetches | DropFromDisk


class Labels:
    """An arena that knows whose bytes lie where, and stores none."""

    #: Whether also the bytes of objects that no reader holds are compared after each event.
    compares_all = False

    def __init__(self) -> None:
        self.runs: Runs = {}  # runs written last to each place
        #: By start of a run: dataset, object, bytes.
        self._owner: dict[int, tuple[str, int, int]] = {}

    def ranges(self, place: int, nbytes: int) -> list[list[int]]:
        return [[place, nbytes]] if place >= 0 else self.runs[place].tolist()

    def put(self, place: int, name: str, x: int, nbytes: int) -> None:
        """Write an object to its place."""
        for start, size in self.ranges(place, nbytes):
            for at, (_, _, n) in list(self._owner.items()):
                if at < start + size and start < at + n:
                    del self._owner[at]
            self._owner[start] = (name, x, size)

    def holds(self, place: int, name: str, x: int, nbytes: int) -> bool:
        """Whether an object's bytes are at its place."""
        ranges = self.ranges(place, nbytes)
        return all(self._owner.get(at) == (name, x, n) for at, n in ranges)

    def release(self, start: int, nbytes: int) -> None:
        """Forget the bytes of a range."""
        for at in [at for at in self._owner if start <= at < start + nbytes]:
            del self._owner[at]


class Bytes(Labels):
    """An arena with real bytes, of which those of unpinned objects are compared as well."""

    compares_all = True

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self._arena = np.zeros(nbytes, np.uint8)
        self.linked = 0  # runs with headers

    @staticmethod
    @cache
    def content(name: str, x: int, nbytes: int) -> bytes:
        return np.random.default_rng([ord(name), x]).bytes(nbytes)

    def put(self, place: int, name: str, x: int, nbytes: int) -> None:
        arena, data = self._arena.data, self.content(name, x, nbytes)
        for start, header in headers(self.runs[place], nbytes) if place < NOWHERE else []:
            arena[start : start + HEADER.size] = header
            self.linked += 1
        for piece in pieces(arena, place, nbytes) or []:
            piece[:], data = data[: len(piece)], data[len(piece) :]
        assert not data

    def holds(self, place: int, name: str, x: int, nbytes: int) -> bool:
        parts = pieces(self._arena.data, place, nbytes) or []
        return b"".join(parts) == self.content(name, x, nbytes)

    def release(self, start: int, nbytes: int) -> None:
        self._arena[start : start + nbytes] = 0


class CoreShell:
    """A core, the tables that it shares with readers, and a clock that the test sets.

    Attributes:
        now: seconds; the core gets it with the next event.
        event_s: seconds that pass with each event.
        offset: by dataset, (n,) places as the location table has them.
        ready: by session, READY as its shared words have it.
        steps: by session, how many it was told of.
        waiting: actions that nothing has answered, oldest first.
        postpones: whether an event is only entered, as those of a turn of the daemon's loop are.
    """

    def __init__(self, capacity: int, window: Window | None = None, event_s: float = 0.0) -> None:
        self.core = Core(Allocator(capacity), window or default_window())
        self.now, self.event_s = 0.0, event_s
        self.offset: dict[str, I64] = {}
        self.ready: dict[int, SetReady] = {}
        self.waiting: deque[Action] = deque()
        self.steps: dict[int, int] = {}
        self.postpones: Callable[[], bool] = lambda: False
        self.settled = True  # whether the core has acted on the last event

    def add(
        self, name: str, length: I64, versions: Versions | None = None, begins_with: str = ""
    ) -> None:
        """Add a dataset with objects of these lengths, (n,), -1: unknown; see `DatasetAdded`."""
        self.offset[name] = np.full(len(length), NOWHERE, np.int64)
        shared = self.offset[name].view()
        shared.flags.writeable = False  # only actions say what to write there
        versions = versions or Versions(len(length))
        self.feed(DatasetAdded(name, shared, length, lengths_of(length), versions, begins_with))

    def open(
        self,
        session: int,
        name: str,
        job: str = "j",
        rank: int = 0,
        world: int = 1,
        recheck: Any = "never",
        twin: Twin | None = None,
    ) -> None:
        """Open a session; see `SessionOpened`."""
        self.ready[session], self.steps[session] = SetReady(session, 0, 0), 0
        self.feed(SessionOpened(session, Open(name, job, rank, world, recheck), twin))

    def tell(
        self,
        session: int,
        epoch: int,
        ids: NDArray[np.int32],
        ends: I64,
        *,
        unplanned: bool = False,
    ) -> list[Action]:
        """Append steps to a session's plan; see `PlanExtended`."""
        first = self.steps[session]
        self.steps[session] += len(ends)
        return self.feed(PlanExtended(session, epoch, first, ids, ends, unplanned))

    def feed(self, event: Event) -> list[Action]:
        """Let the core handle an event, and do what it says."""
        self.now += self.event_s
        self.settled = not (isinstance(event, _POSTPONED) and self.postpones())
        actions = self.core.handle(event, self.now, settles=self.settled)
        for action in actions:
            self.do(action)
        return actions

    def end_turn(self) -> None:
        """Let the core act on what was only entered."""
        self.settled = True
        for action in self.core.settle(self.now):
            self.do(action)

    def do(self, action: Action) -> None:
        """Execute one action."""
        if not self.keep(action):
            self.waiting.append(action)

    def keep(self, action: Action) -> bool:
        """Write what readers look at; return whether the action asks for no answer."""
        if isinstance(action, Publish):
            self.offset[action.dataset][action.ids] = action.offset
        elif isinstance(action, SetReady):
            self.ready[action.session] = action
        return isinstance(action, _UNANSWERED)

    def settle(self, limit: int = 10_000) -> None:
        """Answer until nothing is asked any more."""
        while self.waiting:
            limit -= 1
            assert limit, "one action leads to another without end"
            self.fulfil(self.waiting.popleft())

    def fulfil(self, action: Action) -> None:
        """End what an action asks for."""
        if isinstance(action, FetchObjects):
            self.feed(
                Fetched(
                    action.fetch,
                    self.nbytes_read(action),
                    self.versions(action),
                    self.asked_at(action),
                )
            )
        elif isinstance(action, SpillObjects):
            self.feed(Spilled(action.spill, self.stored(action)))
        elif isinstance(action, CheckVersions):
            self.feed(Checked(action.check, self.checked(action)))
        else:
            assert isinstance(action, PlanRetention), action
            kept = action.boundary.plan()
            self.feed(RetentionPlanned(action.dataset, action.boundary, kept))

    def nbytes_read(self, fetch: FetchObjects) -> I64:
        """Return (k,) bytes that a fetch brought of each object, or -1."""
        return fetch.length.copy()

    def versions(self, fetch: FetchObjects) -> I64 | None:
        """Return (k,) versions of the objects read."""
        return np.full(len(fetch.ids), VERSION)

    def asked_at(self, fetch: FetchObjects) -> NDArray[np.float64] | None:  # noqa: ARG002
        """Return (k,) when the storage was asked for these versions."""
        return None

    def stored(self, spill: SpillObjects) -> NDArray[np.bool_]:
        """Return (k,) whether each object is on disk."""
        return np.ones(len(spill.ids), np.bool_)

    def checked(self, check: CheckVersions) -> I64:
        """Return (k,) versions of the files asked for."""
        return np.full(len(check.files), VERSION)
