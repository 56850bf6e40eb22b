"""What happens to a node's core and what it wants done: plain data. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from creel.cache.space import Lengths
from creel.daemon.versions import Versions

Ids: TypeAlias = NDArray[np.int32]
Sizes: TypeAlias = NDArray[np.int64]

# --- events -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Registered:
    """A dataset is known; `offset` and `length` are the columns of its shared `Table`.

    The core is their one writer: it publishes an object by writing its offset. All offsets are
    ABSENT; `lengths` is what the lengths come to; `versions` those of its files, none known yet.
    """

    dataset: str
    offset: Sizes
    length: Sizes
    lengths: Lengths
    versions: Versions | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    """A session begins: rank `rank` of `world` of job `job` will read from `dataset`.

    `recheck`: when the version of a file is asked for again; see `messages.Open`.
    """

    session: int
    dataset: str
    job: str
    rank: int
    world: int
    recheck: str = "never"


@dataclass(frozen=True, slots=True, eq=False)
class Extended:
    """A session's plan goes on; see `messages.Extend` (already checked against the manifest)."""

    session: int
    epoch: int
    step: int
    objects: Ids
    ends: Sizes
    blind: bool = False


@dataclass(frozen=True, slots=True)
class Begun:
    """A session's epoch begins now: what was known of its files before may be out of date."""

    session: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Truncated:
    """A session's plan is void from `step` on."""

    session: int
    step: int


@dataclass(frozen=True, slots=True)
class Progressed:
    """The board says: steps < `done` gave their bytes back, somebody waits for step `wanted`-1."""

    session: int
    done: int
    wanted: int


@dataclass(frozen=True, slots=True)
class Closed:
    """A session ended or its client died."""

    session: int


@dataclass(frozen=True, slots=True, eq=False)
class Fetched:
    """Fetch `fetch` ended: (k,) `nbytes` really read, -1 where the object could not be read.

    Where the action's offset was ABSENT (length unknown) the shell holds the bytes until it is
    told to `Store` or `Discard` them. `version` (k,): of the file each was read from, as
    `cache/version.py` has it; None where nobody knows.
    """

    fetch: int
    nbytes: Sizes
    version: Sizes | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Checked:
    """Check `check` ended: (k,) `version` of its files as the storage has them now."""

    check: int
    version: Sizes


@dataclass(frozen=True, slots=True, eq=False)
class Lost:
    """The machine has no memory left for these, which a `Store` had put at `offset`: not published.

    Comes right after the actions that the `Store` was one of.
    """

    dataset: str
    ids: Ids
    offset: Sizes


@dataclass(frozen=True, slots=True)
class Warm:
    """Somebody asked to load (all of) a dataset ahead of any session, as far as room allows."""

    dataset: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """Forget a dataset's residents that nobody has pinned."""

    dataset: str


@dataclass(frozen=True, slots=True)
class Unregistered:
    """Forget a dataset that nobody reads and nothing is under way for (`Core.busy`).

    Its columns are not touched after this event.
    """

    dataset: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed and nothing else happened."""


Event: TypeAlias = (
    Registered
    | Opened
    | Extended
    | Begun
    | Truncated
    | Progressed
    | Closed
    | Fetched
    | Checked
    | Lost
    | Warm
    | Dropped
    | Unregistered
    | Tick
)

# --- actions ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Fetch:
    """Read these objects from the source: object ids[i] to arena[offset[i]:offset[i]+length[i]].

    Where offset[i] is ABSENT the length is unknown: read into private memory, report the size.
    Objects are in order of urgency; `deadline` (s, monotonic) is when the first is needed.
    """

    fetch: int
    dataset: str
    ids: Ids
    offset: Sizes
    length: Sizes
    deadline: float


@dataclass(frozen=True, slots=True, eq=False)
class Check:
    """Ask the storage for the versions of these files; `Checked` says what they are."""

    check: int
    dataset: str
    files: Ids
    deadline: float


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """Copy objects `ids` of fetch `fetch` from private memory to the arena, now, then publish them.

    To publish is to write table.offset[id] = offset; as with `Move`, it says ABSENT until then.
    """

    fetch: int
    dataset: str
    ids: Ids
    offset: Sizes


@dataclass(frozen=True, slots=True)
class Discard:
    """Forget all bytes still held in private memory for fetch `fetch`."""

    fetch: int


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """Move objects `ids` within the arena, now and in this order, then publish where they are.

    For each: copy arena[src:src+nbytes] to dst as `memmove` does, then table.offset[id] = dst. The
    core has written ABSENT there already, so that whoever copies an object that nobody has pinned
    sees that it moved.
    """

    dataset: str
    ids: Ids
    src: Sizes
    dst: Sizes
    nbytes: Sizes


@dataclass(frozen=True, slots=True)
class SetReady:
    """Write READY = `ready` on the session's board and answer whoever waits for a step below it.

    Where READY goes back, this comes before any action that may write over the bytes of the steps
    that are not ready any more.
    """

    session: int
    ready: int
    failed: int


Action: TypeAlias = Fetch | Check | Store | Discard | Move | SetReady
