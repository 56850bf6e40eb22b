"""The core does what the tables of states and events in docs/states.md say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_rig import Rig

from creel.cache.memory.pools.allocator import Allocator, Lengths
from creel.cache.memory.pools.free_ranges import NOWHERE
from creel.daemon.core.disk.copies import DiskTier
from creel.daemon.core.events import (
    Checked,
    DatasetAdded,
    Dropped,
    Fetched,
    PlanExtended,
    Progressed,
    SessionOpened,
    Tick,
    Unregistered,
)
from creel.daemon.core.residency import Residency
from creel.errors import IllegalEventError, MalformedError
from creel.messages import Close, Open, Truncate
from creel.policies.eviction.policy import ABSENT, FAILED, FETCHING, OVERDUE, RESIDENT, SKIPPED

DOCS = Path(__file__).parents[3] / "docs" / "states.md"


def table(corner: str) -> dict[tuple[str, str], str]:
    """Return (state, event) -> result according to the page."""
    lines = DOCS.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {corner} |"))
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    header, _, *body = rows
    return {
        (state, row[0]): cell
        for row in body
        for state, cell in zip(header[1:], row[1:], strict=True)
    }


class One(Rig):
    """Room for one object; object 0 of dataset "d" is watched. Session 1 is its first reader's."""

    def __init__(self) -> None:
        super().__init__(100)
        self.register("d", [100] * 3)

    def fetch(self) -> int:
        """Return the number of the fetch of object 0, or of one that was never started."""
        return next((n for n, f in self.fetches.items() if 0 in f.ids), 99)

    def answer(self, *nbytes: int) -> None:
        """Feed Fetched as the shell does; a fetch that is not known has no effect."""
        if self.fetch() == 99:
            self.feed(Fetched(99, np.array(nbytes)))
        else:
            self.land(self.fetch())


# --- objects ----------------------------------------------------------------------------------


def in_flight() -> One:
    rig = One()
    rig.open(1, "d")
    rig.extend(1, 0, [[0]])
    return rig


def failed() -> One:
    rig = in_flight()
    unreadable(rig)
    return rig


def overdue() -> One:
    rig = in_flight()
    late(rig)
    return rig


def pinned() -> One:
    rig = in_flight()
    rig.answer(100)
    return rig


def kept() -> One:
    rig = pinned()
    rig.progress(1, 1)
    rig.close(1)
    return rig


OBJECTS: dict[str, Callable[[], One]] = {
    "absent": One,
    "in flight": in_flight,
    "overdue": overdue,
    "failed": failed,
    "pinned": pinned,
    "kept": kept,
}


def planned(rig: One) -> None:
    rig.open(2, "d", job="k")
    rig.extend(2, 0, [[0]])


def changed(rig: One) -> None:
    rig.open(2, "d", job="k", recheck="open")
    rig.extend(2, 0, [[0]])
    for check in rig.to_check:
        rig.feed(Checked(check.check, np.array([7])))


def unreadable(rig: One) -> None:
    rig.bad["d"] = {0}
    rig.answer(-1)


def miscounted(rig: One) -> None:
    rig.feed(Fetched(rig.fetch(), np.array([100, 100])))


def late(rig: One) -> None:
    if 1 in rig.readers:
        rig.progress(1, 0, 1)
    rig.now += 60
    rig.feed(Tick())


def read(rig: One) -> None:
    if 1 in rig.readers:
        rig.progress(1, 1)


def crowded(rig: One) -> None:
    rig.open(3, "d", job="l")
    rig.extend(3, 0, [[1]])
    rig.progress(3, 0, 1)


OBJECT_EVENTS: dict[str, Callable[[One], object]] = {
    "planned": planned,
    "planned, changed": changed,
    "arrives": lambda rig: rig.answer(100),
    "cannot be read": unreadable,
    "arrives with another": miscounted,
    "waited for too long": late,
    "read": read,
    "its room is needed": crowded,
    "dropped": lambda rig: rig.feed(Dropped("d")),
    "forgotten": lambda rig: rig.feed(Unregistered("d")),
}


def state_of_object(rig: One) -> str:
    """Return the state of object 0, as a shell and its clients see it."""
    if not rig.core.snapshot()["datasets"]:
        return "forgotten"
    ready = any(r.ready > r.done for n, r in rig.readers.items() if n != 3)
    if rig.fetch() != 99:
        return "overdue" if ready else "in flight"
    if rig.offset["d"][0] == NOWHERE:
        return "failed" if ready else "absent"
    rig.feed(Dropped("d"))
    return "pinned" if rig.offset["d"][0] != NOWHERE else "kept"


def test_the_table_of_objects_has_all_states_and_events() -> None:
    assert set(table("event of an object")) == {(s, e) for s in OBJECTS for e in OBJECT_EVENTS}


@pytest.mark.parametrize("event", OBJECT_EVENTS)
@pytest.mark.parametrize("state", OBJECTS)
def test_each_event_does_to_an_object_what_the_table_says(state: str, event: str) -> None:
    rig, comes = OBJECTS[state](), table("event of an object")[state, event]
    if comes == "illegal":
        with pytest.raises(IllegalEventError):
            OBJECT_EVENTS[event](rig)
        rig.core.check()
    else:
        OBJECT_EVENTS[event](rig)
    same = comes in {"illegal", "ignored", "-"}
    assert state_of_object(rig) == (state if same else comes)


@pytest.mark.parametrize("state", OBJECTS)
def test_the_states_of_objects_are_told_apart(state: str) -> None:
    assert state_of_object(OBJECTS[state]()) == state


# --- sessions ---------------------------------------------------------------------------------


def idle() -> One:
    rig = One()
    rig.open(1, "d")
    return rig


SESSIONS: dict[str, Callable[[], One]] = {
    "unknown": One,
    "idle": idle,
    "waiting": in_flight,
    "ready": pinned,
}


def extended(rig: One, ahead: int) -> None:
    """Extend the plan by a step that reads object 0, `ahead` steps beyond its end."""
    reader = rig.readers.get(1)
    at = ahead + (len(reader.objects) if reader else 0)
    ids, ends = np.zeros(1, np.int32), np.ones(1, np.int64)
    if reader and not ahead:
        reader.objects.append([0])
    rig.feed(PlanExtended(1, 0, at, ids, ends, unplanned=False))


def truncated(rig: One) -> None:
    if 1 in rig.readers:
        rig.truncate(1, 0)
    else:
        rig.feed(Truncate("", 1, 0))


def done(rig: One) -> None:
    if 1 in rig.readers:
        rig.progress(1, 1)
    else:
        rig.feed(Progressed(1, 1, 0))


def closed(rig: One) -> None:
    rig.readers.pop(1, None)
    rig.feed(Close(1))


def opened(rig: One) -> None:
    rig.feed(SessionOpened(1, Open("d", "j", 0, 1, "never")))
    idle_reader = idle().readers[1]
    rig.readers.setdefault(1, idle_reader)


SESSION_EVENTS: dict[str, Callable[[One], object]] = {
    "opened": opened,
    "extended": lambda rig: extended(rig, 0),
    "extended elsewhere": lambda rig: extended(rig, 1),
    "its objects arrive": lambda rig: rig.answer(100),
    "done": done,
    "truncated": truncated,
    "closed": closed,
}


def state_of_session(rig: One) -> str:
    if not rig.core.snapshot()["sessions"]:
        return "unknown"
    reader = rig.readers[1]
    if reader.done == len(reader.objects):
        return "idle"
    return "ready" if reader.ready > reader.done else "waiting"


def test_the_table_of_sessions_has_all_states_and_events() -> None:
    assert set(table("event of a session")) == {(s, e) for s in SESSIONS for e in SESSION_EVENTS}


@pytest.mark.parametrize("event", SESSION_EVENTS)
@pytest.mark.parametrize("state", SESSIONS)
def test_each_event_does_to_a_session_what_the_table_says(state: str, event: str) -> None:
    rig, comes = SESSIONS[state](), table("event of a session")[state, event]
    wrong = {"illegal": IllegalEventError, "malformed": MalformedError}.get(comes)
    before = rig.core.snapshot()["sessions"]
    if wrong is not None:
        with pytest.raises(wrong):
            SESSION_EVENTS[event](rig)
        rig.core.check()
    else:
        SESSION_EVENTS[event](rig)
    same = comes in {"illegal", "malformed", "ignored", "-"}
    assert state_of_session(rig) == (state if same else comes)
    if same:
        assert rig.core.snapshot()["sessions"] == before


@pytest.mark.parametrize("old", range(6))
@pytest.mark.parametrize("new", range(6))
def test_a_state_follows_only_the_states_that_it_may(old: int, new: int) -> None:
    """Between the table's states; SKIPPED behaves as absent, OVERDUE as in flight."""
    unused: Any = None
    added = DatasetAdded(
        "d", np.full(3, NOWHERE), np.full(3, 9), Lengths.of(np.array([9]), np.array([3])), unused
    )
    held = Residency(added, Allocator(100), unused, DiskTier(100))
    held.state[:2] = old
    may = {
        ABSENT: {RESIDENT, FETCHING, OVERDUE},
        SKIPPED: {ABSENT, SKIPPED, FAILED},
        FAILED: {ABSENT, SKIPPED, FAILED, FETCHING, OVERDUE},
        FETCHING: {ABSENT, SKIPPED, FAILED, FETCHING, OVERDUE},
        RESIDENT: {FETCHING, OVERDUE},
        OVERDUE: {FETCHING},
    }
    if old in may[new]:
        held.move(np.arange(2), new)
        assert held.state.tolist() == [new, new, ABSENT]
    else:
        with pytest.raises(IllegalEventError, match=f"in state {old} does not become {new}"):
            held.move(np.arange(2), new)
        assert held.state.tolist() == [old, old, ABSENT]
