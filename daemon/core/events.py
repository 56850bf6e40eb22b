"""Events of a node's core and the actions it returns: plain data. Pure."""

from __future__ import annotations

import msgspec

from creel.cache.memory.allocator import Lengths
from creel.cache.memory.offsets import Places
from creel.cache.memory.runs import Runs
from creel.daemon.core.versions import Versions
from creel.policies.arrays import Floats, Ids, Ints, Mask
from creel.policies.cluster import boundary
from creel.policies.cluster.agreement import SharedPlan
from creel.policies.cluster.job_order import JobOrder
from creel.policies.cluster.jobs import PlanningTask, RetentionPlan

#: The origin of a fetch: the dataset's storage; what the shell holds in private memory since a
#: fetch of unknown lengths; the node's disk. Other origins are numbers of peers.
SOURCE, HELD, DISK = boundary.SOURCE, -2, -3

# --- events -----------------------------------------------------------------------------------


class Event(msgspec.Struct, frozen=True, eq=False):
    """Base of what the shell tells the core; made in 90 ns, a frozen dataclass takes 540.

    Most hold arrays: two are equal only if they are the same object.
    """


class DatasetAdded(Event, frozen=True):
    """A dataset is registered; `offset` and `length` are columns of its location table.

    The core never writes to `offset`, a live view: the shell does, as `Publish` says. All offsets
    are NOWHERE. `length` is the core's to write; `lengths` summarizes it; `versions` has those of
    the files, none known yet.
    """

    dataset: str
    offset: Places
    length: Ints
    lengths: Lengths
    versions: Versions


class SessionOpened(Event, frozen=True):
    """A session begins: rank `rank` of `world` of job `job` will read from `dataset`.

    `recheck`: when file versions are checked again; see `messages.Open`.
    """

    session: int
    dataset: str
    job: str
    rank: int
    world: int
    recheck: str


class PlanExtended(Event, frozen=True):
    """A session's plan continues; see `messages.Extend` (already checked against the manifest)."""

    session: int
    epoch: int
    step: int
    objects: Ids
    ends: Ints
    unplanned: bool


class EpochDealt(Event, frozen=True):
    """How an epoch of a session is dealt to all ranks of its job, and the nodes they run on."""

    session: int
    epoch: int
    order: JobOrder
    view: boundary.ClusterView


class EpochFollowed(Event, frozen=True):
    """The ranks of a session's job run on these nodes, which do not all know how they read."""

    session: int
    view: boundary.ClusterView


class ClusterChanged(Event, frozen=True):
    """Nodes of a cluster left or came back; None: this node has left it."""

    cluster: str
    view: boundary.ClusterView | None


class PlanShared(Event, frozen=True):
    """The answer to an `AskPlan`: where a peer says that objects lie."""

    dataset: str
    plan: SharedPlan


class PlanDoubted(Event, frozen=True):
    """Peers say that objects lie elsewhere in the epoch of this order; see `PlanDigest`."""

    dataset: str
    seed: int


class PlanAsked(Event, frozen=True):
    """A peer asks where objects lie; `SharePlan` is the answer. `request` is unique."""

    request: int
    dataset: str
    seed: int


class EpochBegan(Event, frozen=True):
    """A session's epoch begins now: what was known of its files may be out of date."""

    session: int
    epoch: int


class PlanTruncated(Event, frozen=True):
    """A session's plan is void from `step` on."""

    session: int
    step: int


class Progressed(Event, frozen=True):
    """Shared words changed: steps < `done` are finished, a reader waits for step `wanted`-1."""

    session: int
    done: int
    wanted: int


class SessionClosed(Event, frozen=True):
    """A session ended or its client died."""

    session: int


class Fetched(Event, frozen=True):
    """FetchObjects `fetch` ended: (k,) `nbytes` really read, -1 where the object could not be read.

    Where the action's offset was NOWHERE (length unknown) the shell holds the bytes until the
    actions of this event are done: they may fetch them from HELD. `version` (k,): of the file each
    was read from, as in `cache/storage/version.py`; None where unknown. `asked` (k,): when, at the
    earliest and by this node's clock, this node or a peer asked the storage for it; 0: unknown.
    """

    fetch: int
    nbytes: Ints
    version: Ints | None = None
    asked: Floats | None = None


class Checked(Event, frozen=True):
    """CheckVersions `check` ended: (k,) `version` of its files as the storage has them now."""

    check: int
    version: Ints


class RetentionPlanned(Event, frozen=True):
    """The answer to a `PlanRetention`: which objects are kept over the end of an epoch."""

    dataset: str
    boundary: PlanningTask
    kept: RetentionPlan


class PeerAsked(Event, frozen=True):
    """A peer asks for objects; `ServeObjects` is the answer. `request` is unique.

    The answer may take `wait_s` seconds, where objects are to be read from disk.
    """

    request: int
    dataset: str
    ids: Ids
    wait_s: float


class PeerServed(Event, frozen=True):
    """The bytes of a `ServeObjects` have left, or never will."""

    request: int


class DiskOpened(Event, frozen=True):
    """The node's disk holds `nbytes` in units of `unit`; 0: it is lost, with all that was there."""

    nbytes: int
    unit: int


class FoundOnDisk(Event, frozen=True):
    """Objects of a dataset, added just now, that are on disk; (k,) `nbytes` of each."""

    dataset: str
    ids: Ids
    nbytes: Ints


class Spilled(Event, frozen=True):
    """A `SpillObjects` ended: (k,) whether each object is on disk now.

    `full`: whether some are not because the disk has no room.
    """

    spill: int
    stored: Mask
    full: bool = False


class Warm(Event, frozen=True):
    """Load a dataset ahead of any session, as far as room allows."""

    dataset: str


class Dropped(Event, frozen=True):
    """Evict a dataset's unpinned residents."""

    dataset: str


class Unregistered(Event, frozen=True):
    """Forget a dataset without readers and fetches in flight (`Core.busy`).

    Its columns are not touched after this event.
    """

    dataset: str


class Tick(Event, frozen=True):
    """Time passed and nothing else happened."""


# --- actions ----------------------------------------------------------------------------------


class Action(msgspec.Struct, frozen=True, eq=False):
    """Base of what the core tells the shell to do."""


class FetchObjects(Action, frozen=True):
    """Read these objects from `origin`: length[i] bytes of ids[i] to the place offset[i].

    `origin` is SOURCE, HELD, DISK, or the number of a peer; the latter two may not have them (-1
    bytes).
    `runs` has the runs of those that are in several; their headers are to be written, too. Where
    offset[i] is NOWHERE the length is unknown: read into private memory, report the size. Objects
    are in order of urgency; `deadline` (s, monotonic) is when the first is needed.
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
    """Do not read what is left of these fetches from the source: nobody waits for it any more.

    `Fetched` comes all the same, with -1 bytes for what was not read.
    """

    dataset: str
    fetches: frozenset[int]


class ServeObjects(Action, frozen=True):
    """Send a peer the objects it asked for; `PeerServed` says when their bytes have left.

    (k,) `place` in the arena, NOWHERE where an object is not here; `nbytes`; `version` of its file;
    `age`: for how many seconds at most the storage was not asked for that; inf where unknown.
    """

    request: int
    place: Ints
    nbytes: Ints
    version: Ints
    age: Floats


class AskPlan(Action, frozen=True):
    """Ask the nodes of a cluster where objects lie in the epoch of this order; see `SharedPlan`.

    Said once a second as long as no `PlanShared` has brought it.
    """

    dataset: str
    cluster: str
    seed: int


class SharePlan(Action, frozen=True):
    """Tell a peer where objects lie; None: this node does not know that."""

    request: int
    plan: SharedPlan | None


class SpillObjects(Action, frozen=True):
    """Write residents to disk; `Spilled` is the answer.

    (k,) `place` in the arena, where the bytes stay until then; `nbytes`; `version` of its file.
    """

    spill: int
    dataset: str
    ids: Ids
    place: Ints
    nbytes: Ints
    version: Ints


class DropFromDisk(Action, frozen=True):
    """Remove objects from the disk, after all that was ordered before, before all that follows."""

    dataset: str
    ids: Ids


class Publish(Action, frozen=True):
    """Write the places of objects to the location table: table.offset[ids] = offset.

    Where a place is published, the object's bytes are there. Where an object leaves (NOWHERE), this
    comes before any action that may overwrite its bytes, and after READY of whoever may be reading
    it went back. `ids` may be slice(None): all objects.
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

    It may read the dataset's columns, which keep changing.
    """

    dataset: str
    boundary: PlanningTask


class SetReady(Action, frozen=True, eq=True):
    """Publish READY = `ready` and the `early` steps; answer waits for these and those below READY.

    `early`: steps after READY, ascending, whose objects are there while one of step READY is still
    awaited. Where READY goes back or an early step is missing, this comes before any action that
    may overwrite the bytes of steps that are no longer ready.
    """

    session: int
    ready: int
    failed: int
    early: tuple[int, ...] = ()
