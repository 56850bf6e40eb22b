"""Events that the core handles and actions that it returns: plain data. Pure."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from creel.cache.memory.pools.allocator import Lengths
from creel.cache.memory.pools.offsets import Places
from creel.cache.memory.pools.runs import Runs
from creel.daemon.core.readers.twin import Twin
from creel.daemon.core.versions import Versions
from creel.messages import Begin, Close, Open, Truncate
from creel.policies.arrays import Floats, Ids, Ints, Mask
from creel.policies.cluster import boundary
from creel.policies.cluster.job_order import JobOrder, SampleObjects
from creel.policies.cluster.shared_plan import SharedPlan
from creel.policies.eviction.context import PlanningTask

#: Origins of a fetch: the dataset's storage; private memory of the shell, which holds objects read
#: with unknown lengths; the node's disk. Origins of 0 and above are numbers of peers.
SOURCE, HELD, DISK = boundary.SOURCE, -2, -3

# --- events -----------------------------------------------------------------------------------


class BaseEvent(msgspec.Struct, frozen=True, eq=False):
    """Base class of events that no message is; creating one takes 90 ns, a frozen dataclass 540.

    Events compare by identity, as most of them hold arrays.
    """


class DatasetAdded(BaseEvent, frozen=True):
    """A dataset is registered; `offset` and `length` are columns of its location table.

    Only the shell writes to `offset`, a live view, when it executes `Publish`; all offsets are
    NOWHERE at first. Only the core writes to `length`, which `lengths` summarizes. `versions` holds
    the versions of the files, none of them known yet. `begins_with`: a dataset whose residents it
    may take over (`DatasetGrew`), so that its memory is divided alike. `page`: how it was divided
    by the last daemon, as in `Allocator.pool`.
    """

    dataset: str
    offset: Places
    length: Ints
    lengths: Lengths
    versions: Versions
    begins_with: str = ""
    page: int = 0


class DatasetGrew(BaseEvent, frozen=True):
    """A dataset takes over the residents of another one, which is all that it begins with.

    The other one, `old`, has no readers. It may have transfers under way: they end first.
    """

    dataset: str
    old: str


class SessionOpened(BaseEvent, frozen=True):
    """A session begins, as a client has asked for it; `twin`: what it keeps decoded."""

    session: int
    asked: Open
    twin: Twin | None = None


class PlanExtended(BaseEvent, frozen=True):
    """A session's plan continues; see `messages.Extend` (already checked against the manifest)."""

    session: int
    epoch: int
    step: int
    objects: Ids
    ends: Ints
    unplanned: bool


class EpochDealt(BaseEvent, frozen=True):
    """How an epoch is dealt to all ranks of a session's job, and the nodes they run on."""

    session: int
    epoch: int
    order: JobOrder
    view: boundary.ClusterView


class SamplesTold(BaseEvent, frozen=True):
    """A session's job rehearses: from now on it reads these objects and no others."""

    session: int
    samples: SampleObjects


class EpochFollowed(BaseEvent, frozen=True):
    """A session's job runs on these nodes, not all of which know the order of all ranks."""

    session: int
    view: boundary.ClusterView


class ClusterChanged(BaseEvent, frozen=True):
    """Nodes of a cluster are silent, or answer again; `view` None: this node has left it."""

    cluster: str
    view: boundary.ClusterView | None


class PlanShared(BaseEvent, frozen=True):
    """The answer to an `AskPlan`: which node holds each object; `plan` None: the peer has none."""

    dataset: str
    seed: int
    plan: SharedPlan | None


class PlanDoubted(BaseEvent, frozen=True):
    """Peers have another plan for the epoch of this order (`seed`); see `PlanDigest`."""

    dataset: str
    seed: int


class PlanAsked(BaseEvent, frozen=True):
    """A peer asks for the plan of an epoch; `SharePlan` is the answer. `request` is unique."""

    request: int
    dataset: str
    seed: int


class Progressed(BaseEvent, frozen=True):
    """Shared words have changed: steps < `done` are finished, a reader waits for `wanted` - 1.

    Both are a client's words, and may be any number.
    """

    session: int
    done: int
    wanted: int


class Fetched(BaseEvent, frozen=True):
    """FetchObjects `fetch` has ended: (k,) `nbytes` read, -1 where an object could not be read.

    For objects of unknown length (offset NOWHERE), the shell holds the bytes until the actions of
    this event are executed; these may fetch them from HELD. `version` (k,): version of each file,
    as in `cache/storage/version.py`; None if unknown. `asked` (k,): earliest time, by this node's
    clock, at which this node or a peer asked the storage for that version; 0: unknown.
    """

    fetch: int
    nbytes: Ints
    version: Ints | None = None
    asked: Floats | None = None


class Checked(BaseEvent, frozen=True):
    """CheckVersions `check` has ended: (k,) the current `version` of each of its files."""

    check: int
    version: Ints


class RetentionPlanned(BaseEvent, frozen=True):
    """The answer to a `PlanRetention`: the objects that are kept over the end of an epoch."""

    dataset: str
    boundary: PlanningTask
    kept: object


class PeerAsked(BaseEvent, frozen=True):
    """A peer asks for objects; `ServeObjects` is the answer. `request` is unique.

    The answer may take `wait_s` seconds if objects must be read from disk or source first.
    """

    request: int
    dataset: str
    ids: Ids
    wait_s: float


class PeerServed(BaseEvent, frozen=True):
    """The bytes of a `ServeObjects` have been sent, or never will be."""

    request: int


class DiskOpened(BaseEvent, frozen=True):
    """The node's disk holds `nbytes` in units of `unit`; 0: it is lost with all its objects."""

    nbytes: int
    unit: int


class FoundOnDisk(BaseEvent, frozen=True):
    """Objects on disk of a dataset that was just added; (k,) `nbytes` of each."""

    dataset: str
    ids: Ids
    nbytes: Ints


class Spilled(BaseEvent, frozen=True):
    """A `SpillObjects` has ended: (k,) whether each object is on disk now.

    `full`: whether some objects were not stored because the disk has no room.
    """

    spill: int
    stored: Mask
    full: bool = False


class Warm(BaseEvent, frozen=True):
    """Load a dataset before any session reads it, as far as there is room; `stop`: no further."""

    dataset: str
    stop: bool = False


class Dropped(BaseEvent, frozen=True):
    """Evict a dataset's unpinned residents."""

    dataset: str


class MemoryShort(BaseEvent, frozen=True):
    """Other processes need `nbytes` of the memory that objects occupy."""

    nbytes: int


class MemoryFree(BaseEvent, frozen=True):
    """`nbytes` of the memory that was given back may be used again."""

    nbytes: int


class Unregistered(BaseEvent, frozen=True):
    """Forget a dataset without readers and fetches in flight (`Core.busy`).

    The core does not touch the dataset's columns after this event.
    """

    dataset: str


class Tick(BaseEvent, frozen=True):
    """Time has passed and nothing else has happened."""


#: Three messages of clients are events as they come, checked by the sockets.
Event: TypeAlias = BaseEvent | Begin | Truncate | Close

# --- actions ----------------------------------------------------------------------------------


class Action(msgspec.Struct, frozen=True, eq=False):
    """Base class of actions, which the core tells the shell to execute."""


class ReleaseMemory(Action, frozen=True):
    """Give the memory of these ranges, (start, bytes) each, back to the system."""

    ranges: list[tuple[int, int]]


class FetchObjects(Action, frozen=True):
    """Read these objects from `origin`: length[i] bytes of ids[i] to the place offset[i].

    `origin` is SOURCE, HELD, DISK, or the number of a peer; disk and peers may lack an object (-1
    bytes). `runs` has the runs of places that consist of several; the shell writes their headers.
    Where offset[i] is NOWHERE, the length is unknown: the shell reads the object into private
    memory and reports its size. Objects are in order of urgency; `deadline` (s, monotonic) is the
    time at which the first is needed.
    """

    fetch: int
    dataset: str
    ids: Ids
    offset: Ints
    length: Ints
    deadline: float
    runs: Runs = {}
    origin: int = SOURCE


class CancelFetches(Action, frozen=True):
    """Do not read the remaining objects of these fetches from the source: no reader needs them.

    The shell still reports `Fetched`, with -1 bytes for objects that it did not read.
    """

    dataset: str
    fetches: frozenset[int]


class ServeObjects(Action, frozen=True):
    """Send a peer the objects it asked for; `PeerServed` reports when their bytes have been sent.

    (k,) each: `place` in the arena, NOWHERE for objects that are not resident; `nbytes`; `version`
    of the file; `age`: most seconds since the storage was asked for that version, inf if unknown.
    """

    request: int
    place: Ints
    nbytes: Ints
    version: Ints
    age: Floats


class AskPlan(Action, frozen=True):
    """Ask the peer that is this origin for its plan; `PlanShared` is always the answer.

    `seed` is of the order of the epoch that the plan is about.
    """

    dataset: str
    origin: int
    seed: int


class SharePlan(Action, frozen=True):
    """Send a peer the plan it asked for; `plan` None: this node does not know it."""

    request: int
    plan: SharedPlan | None


class SpillObjects(Action, frozen=True):
    """Write residents to disk; `Spilled` is the answer.

    (k,) each: `place` in the arena, where the bytes stay until then; `nbytes`; `version` of the
    file.
    """

    spill: int
    dataset: str
    ids: Ids
    place: Ints
    nbytes: Ints
    version: Ints


class DropFromDisk(Action, frozen=True):
    """Remove objects from the disk; the shell executes all actions for the disk in order."""

    dataset: str
    ids: Ids


class Publish(Action, frozen=True):
    """Write the places of objects to the location table: table.offset[ids] = offset.

    The bytes of an object are at its place before the place is published. Where an object leaves
    (NOWHERE), this action follows the lowering of READY for each session that may read the object,
    and precedes any action that may overwrite its bytes. `ids` slice(None) stands for all objects.
    """

    dataset: str
    ids: Ids | slice
    offset: Ints | int


class CheckVersions(Action, frozen=True):
    """Ask the storage for the versions of these files; `Checked` is the answer."""

    check: int
    dataset: str
    files: Ids
    deadline: float


class PlanRetention(Action, frozen=True):
    """Compute `boundary.plan()` outside the loop; `RetentionPlanned` brings the result.

    The computation may read the dataset's columns, which change meanwhile.
    """

    dataset: str
    boundary: PlanningTask


class SetReady(Action, frozen=True, eq=True):
    """Publish READY = `ready` and the `early` steps; answer waits for steps that are ready.

    `early`: steps after READY, ascending, whose objects are resident although an object of step
    READY is not. If READY decreases or an early step is dropped, this action precedes any action
    that may overwrite the bytes of those steps.
    """

    session: int
    ready: int
    failed: int
    early: tuple[int, ...] = ()
