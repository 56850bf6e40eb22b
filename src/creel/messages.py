"""Messages between a daemon and its clients: one schema for both sockets.

**Control socket** (`SOCK_SEQPACKET`, abstract unix socket): handshake and file descriptors. A
client keeps this connection open while it lives; its end tells the daemon of the client's death.
One packet is one message; descriptors are passed by SCM_RIGHTS.

**Request socket** (ZeroMQ DEALER to ROUTER, abstract ipc): all later requests. A message is
`[body, array...]`. The body is msgspec (MessagePack). Only `Extend` has arrays, as raw
little-endian frames.

Payload bytes never travel in a message: they are in the arena, a memfd that clients map read-only.
Events of each batch are not messages but shared words (`cache/memory/shared_words.py`). Step
numbers are per session, start at 0 and never restart at an epoch's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from creel.errors import MalformedError

#: Increased whenever an old client could misread a new daemon, or vice versa. From the first
#: release on, `Hello` must keep its fields: a daemon that cannot decode it cannot name both
#: versions.
PROTOCOL = 13
#: The oldest protocol that this version still speaks: that of the minor release before.
OLDEST_PROTOCOL = 13

#: Largest packet on the control socket and largest body on the request socket, in bytes (without
#: arrays).
MAX_BODY = 1 << 20
#: Most descriptors with a packet.
MAX_FDS = 4


def control_address(uid: int, name: str, view: str) -> str:
    """Return the abstract unix address of the control socket of user `uid`'s daemon `name`.

    `view` identifies the files that its clients see (`creel.addresses`).

    >>> control_address(7, "default", "f00d")
    '\\x00creel/7/default/f00d/control'
    """
    return f"\0creel/{uid}/{name}/{view}/control"


def request_address(uid: int, secret: str) -> str:
    """Return the ZeroMQ address of a request socket; only `Welcome` tells clients the secret."""
    return f"ipc://@creel/{uid}/request-{secret}"


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages; `encode` and `decode` convert them.

    A field that a later version adds stands last and has a default: a side that does not know it
    ignores it, and one that misses it takes the default. Both need no other `PROTOCOL`.
    """


# --- control socket: client to daemon ---------------------------------------------------------


class Hello(Message, frozen=True):
    """First packet of every connection.

    `role` is "trainer", "worker" (which attaches to the trainer's sessions by its token), "cli", or
    "service": a daemon that is to stay, to which an embedded one gives up its address. A descriptor
    may be attached: the pidfd of the process that the client works for. An embedded daemon stays
    alive as long as that process. The client speaks each protocol from `oldest` to `protocol`.
    """

    protocol: int
    role: str
    token: str = ""
    oldest: int = OLDEST_PROTOCOL


class AnyHello(msgspec.Struct, frozen=True, tag="Hello", array_like=True):
    """A `Hello` of whatever protocol: this much of it never changes."""

    protocol: int
    role: object = None
    token: object = None
    oldest: object = None

    def spoken(self) -> int | None:
        """Return the newest protocol that both sides speak; None if there is none.

        >>> AnyHello(PROTOCOL + 1, oldest=PROTOCOL).spoken() == PROTOCOL
        True
        >>> AnyHello(PROTOCOL + 2, oldest=PROTOCOL + 1).spoken()
        """
        oldest = self.oldest if isinstance(self.oldest, int) else self.protocol
        newest = min(self.protocol, PROTOCOL)
        return newest if newest >= max(oldest, OLDEST_PROTOCOL) else None


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """How a client reaches the addresses of one scheme (`creel.cache.storage.stores.access`).

    Attributes:
        options: of the store's client; some are secret.
        environment: digests of the variables that decide the rest, by name.
    """

    options: dict[str, Any]
    environment: dict[str, str]

    def __repr__(self) -> str:
        return f"<Grant of {', '.join(sorted(self.options)) or 'the environment'}>"


#: The grants by scheme, for each access of a manifest.
Grants: TypeAlias = list[dict[str, Grant]]


class Register(Message, frozen=True):
    """Register a dataset; its descriptor is a sealed memfd, `Manifest.to_arrow()` of `nbytes`."""

    nbytes: int
    grants: Grants = []


class Renew(Message, frozen=True):
    """Read a registered dataset with these grants from now on: keys were renewed.

    The answer is `Registered`.
    """

    dataset: str
    grants: Grants


class Attach(Message, frozen=True):
    """A worker asks for the shared words and the location table of its trainer's session."""

    session: int


class DecodedWords(msgspec.Struct, frozen=True, array_like=True):
    """Which objects are kept decoded: of `objects` from `first` on, by words from byte `at` on."""

    first: int
    objects: int
    at: int


class Open(Message, frozen=True):
    """Open a session: one stream of batches that one rank reads from one dataset.

    `recheck` says when the versions of resident files are checked again. "open": now. "epoch": now
    and, for local files, after each `Begin`, before any step of that epoch is ready. "step": after
    each `Extend`, for clients that cannot tell where an epoch begins. "never": not at all.

    `decoded`: where the client keeps objects decoded. The k-th descriptor is a memfd with an int64
    for each of them, not 0 if it is there.
    """

    dataset: str
    job: str
    rank: int
    world: int
    recheck: Literal["epoch", "open", "step", "never"]
    decoded: list[DecodedWords] = []


class Close(Message, frozen=True):
    """Close a session and release all that it holds."""

    session: int


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A node of a cluster: its daemon's id, address for peers, and bytes of arena and disk.

    `born` (s since 1970) tells a daemon from a later one in its place. The disk tier allocates in
    units of `disk_unit` bytes.
    """

    node: str
    host: str
    port: int
    arena_nbytes: int
    born: float = 0.0
    disk_nbytes: int = 0
    disk_unit: int = 1


class Host(Message, frozen=True):
    """Ask the daemon to serve peers at this address of its node; the answer is `Hosting`.

    `port` 0: any free port.
    """

    host: str
    port: int = 0


class Join(Message, frozen=True):
    """Name the nodes of this client's job, this one included; they serve each other from now on.

    `key` (32 bytes) is known to these nodes alone. Rank r runs on the node `members[ranks[r]]`. All
    nodes of a job get the same message. The answer is `Joined`.

    If the nodes come from a list, `me` is the place of this one in it. The other daemons are not
    known yet: they have the names of the list, and arenas of 0 bytes. `again`: an earlier daemon of
    this node was in the cluster.
    """

    cluster: str
    key: bytes
    members: list[Member]
    ranks: list[int]
    me: int = -1
    again: bool = False


class OfferJournal(Message, frozen=True):
    """Offer the memfd in which this rank would record what it reads.

    The answer is `JointJournal`, with the memfd that the first client offered under this name.
    """

    name: str


class WithdrawJournal(Message, frozen=True):
    """Let no further rank join the journal of this name that this client has offered. No reply."""

    name: str


# --- control socket: daemon to client ---------------------------------------------------------


class Welcome(Message, frozen=True):
    """Answer to `Hello`, with the arena's descriptor (read-only).

    `returns`: whether a service manager starts the daemon again after its end.
    """

    protocol: int
    token: str
    request_address: str
    arena_nbytes: int
    pid: int
    returns: bool


class Registered(Message, frozen=True):
    """Answer to `Register` and `Renew`: `dataset` is the manifest's key."""

    dataset: str


class Opened(Message, frozen=True):
    """Answer to `Open` and `Attach`, with two descriptors.

    These are the shared words (read-write) and the location table (read-only). `record`: as in
    `LocationTable`.
    """

    session: int
    objects: int
    record: int


class Hosting(Message, frozen=True):
    """Answer to `Host`: this node as a member of any cluster."""

    member: Member


class Joined(Message, frozen=True):
    """Answer to `Join`; `ready`: each node has answered or was given up. If not, ask again."""

    ready: bool


class JointJournal(Message, frozen=True):
    """Answer to `OfferJournal`, with the descriptor of a memfd."""


class Refused(Message, frozen=True):
    """A refusal, with one sentence that says what to do. The connection stays usable."""

    reason: str


# --- request socket: client to daemon (each message carries the client's token) ---------------


class Extend(Message, frozen=True):
    """The session's plan continues: steps `step, step+1, ...` will read these objects.

    Arrays: `objects` (k,) int32 object ids in order of reading; `ends` (b,) int64: step+i reads
    `objects[ends[i-1]:ends[i]]`. `epoch` counts the session's epochs. The last step known so far
    plus one must equal `step`. `unplanned`: nothing is known of later steps. No reply.
    """

    token: str
    session: int
    epoch: int
    step: int
    unplanned: bool = False


class DealtReplays(msgspec.Struct, frozen=True, array_like=True):
    """The rows of a rehearsal memory that an epoch replays (`policies.rehearsal.passes`).

    Of `kept` rows, each rank replays `each` in a step, in the order of `seed`. The epoch begins at
    step `first_step` of the job.
    """

    kept: int
    each: int
    seed: int
    first_step: int


class Deal(Message, frozen=True):
    """Say how an epoch of the session is dealt to all ranks (`policies.cluster.job_order`).

    Only a hint: with it, the nodes of `cluster` compute the same plan of what each keeps. No reply.

    `object_of`: sample i is the object that `DealtSamples` said last; else it is object i. The rows
    that are replayed follow the samples there.
    """

    token: str  # of the client
    session: int
    epoch: int
    cluster: str
    samples: int
    world: int  # ranks of the job
    each: int
    batch: int  # samples of a step of one rank
    seed: int  # of the permutation, or IN_ORDER
    remapped: bool = False  # whether the ranks exchange samples
    object_of: bool = False
    replays: DealtReplays | None = None


class DealtSamples(Message, frozen=True):
    """Say which object each of `samples` samples is, a piece at a time, the first one first.

    Array: `objects` (k,) int32, those of samples `first, first + 1, ...`. No reply.

    `rehearsed`: the session's job replays earlier data, now or later. The samples end with the rows
    of its memory, and what is no sample will not be read any more.
    """

    token: str
    session: int
    samples: int
    first: int
    rehearsed: bool = False


class Follow(Message, frozen=True):
    """Say that not all nodes of `cluster` can know how the session's job reads.

    From now on they ask each other for objects without a plan. No reply.
    """

    token: str
    session: int
    cluster: str


class Begin(Message, frozen=True):
    """Epoch `epoch` of the session begins now; see `Open.recheck`. No reply."""

    token: str
    session: int
    epoch: int


class Truncate(Message, frozen=True):
    """Forget the plan from `step` on (a prediction was wrong, or an epoch was left). No reply."""

    token: str
    session: int
    step: int


class Wait(Message, frozen=True):
    """Ask for a `Ready` once step `step` is ready. `call` is echoed."""

    token: str
    call: int
    session: int
    step: int


class Command(Message, frozen=True):
    """A command of the CLI or a loader; `name` is one of daemon/service/sockets/commands.py.

    `args` are plain values, which the daemon checks. The answer is `CommandReply`.
    """

    token: str
    call: int
    name: str
    args: dict[str, Any] = {}


# --- request socket: daemon to client ---------------------------------------------------------


class Ready(Message, frozen=True):
    """Step `step` is ready: each object is resident, or failed (then its offset is NOWHERE)."""

    call: int
    session: int
    step: int


class CommandReply(Message, frozen=True):
    """The answer to a `Command`, as plain values with a stable schema (docs/json.md)."""

    call: int
    body: dict[str, Any]


class Failed(Message, frozen=True):
    """The request with this `call` failed, for this reason."""

    call: int
    reason: str


ControlRequest: TypeAlias = (
    Hello | Register | Renew | Attach | Open | Host | Join | OfferJournal | WithdrawJournal | Close
)
ControlReply: TypeAlias = Welcome | Registered | Opened | Hosting | Joined | JointJournal | Refused
RequestMessage: TypeAlias = (
    Extend | Deal | DealtSamples | Follow | Begin | Truncate | Wait | Command
)
RequestReply: TypeAlias = Ready | CommandReply | Failed

#: The types of the arrays that follow a message.
_ARRAYS: dict[type[Message], tuple[str, ...]] = {Extend: ("<i4", "<i8"), DealtSamples: ("<i4",)}

M = TypeVar("M", bound=Message)

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {
    union: msgspec.msgpack.Decoder(union)
    for union in (AnyHello, ControlRequest, ControlReply, RequestMessage, RequestReply)
}


def encode(message: Message) -> bytes:
    """Return the body of a message.

    >>> decode(encode(Hello(PROTOCOL, "cli")), ControlRequest)
    Hello(protocol=13, role='cli', token='', oldest=13)
    """
    return _encoder.encode(message)


def survives(values: dict[str, Any]) -> bool:
    """Return whether plain values come back from a message as they were.

    >>> survives({"a": [1, "x", None]}), survives({"a": object()}), survives({"a": (1,)})
    (True, False, False)
    """
    try:
        return bool(msgspec.msgpack.decode(_encoder.encode(values)) == values)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return False


def decode(body: bytes | memoryview, union: Any) -> Any:
    """Decode `body`, a message of `union`: `AnyHello` or one of the four type aliases above.

    Raises:
        MalformedError: for any invalid bytes; nothing else is ever raised.
    """
    if len(body) > MAX_BODY:
        raise MalformedError(f"a body of {len(body)} bytes is longer than {MAX_BODY}")
    try:
        return _decoders[union].decode(body)
    # TypeError: msgspec 0.19 meets a key that has no hash
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError) as e:
        raise MalformedError(str(e)) from e


def arrays_of(
    message: Extend | DealtSamples, frames: Sequence[memoryview]
) -> list[NDArray[np.integer[Any]]]:
    """Return the arrays of a message as read-only views of the frames after its body.

    Raises:
        MalformedError: there are more or fewer, or a length is no multiple of the item size.
    """
    kinds = _ARRAYS[type(message)]
    if len(frames) != len(kinds):
        raise MalformedError(
            f"{type(message).__name__} has {len(kinds)} arrays, {len(frames)} came"
        )
    try:
        return [np.frombuffer(frame, kind) for frame, kind in zip(frames, kinds, strict=True)]
    except ValueError as e:
        raise MalformedError(f"{type(message).__name__}: {e}") from e
