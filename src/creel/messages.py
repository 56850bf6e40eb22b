"""The wire between a daemon and its clients: one schema, two roads.

**Desk** (`SOCK_SEQPACKET`, abstract unix socket): who are you, and file descriptors. A client keeps
this connection open for as long as it lives; its end is how the daemon learns of a death. One
packet is one message; descriptors ride along by SCM_RIGHTS.

**Line** (ZeroMQ DEALER to ROUTER, abstract ipc): all later control. A message is
`[body, array...]`: the body is msgspec (MessagePack), arrays are raw little-endian frames in the
order the class names.

Payload bytes never travel in a message: they lie in the arena, a memfd that clients map read-only.
What happens once per batch is not a message at all but a word on the `Board` (`cache/board.py`).
Numbers of a step are per session, start at 0 and never restart at an epoch's end.
"""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from creel.errors import MalformedError

#: Raised by one whenever an old client could misread a new daemon, or the other way round.
PROTOCOL = 3

#: Largest packet at the desk, and largest body on the line, in bytes (arrays are not counted).
MAX_BODY = 1 << 20


def desk_address(uid: int, name: str) -> str:
    """Abstract unix address of the desk of user `uid`'s daemon `name`.

    >>> desk_address(7, "default")
    '\\x00creel/7/default/desk'
    """
    return f"\0creel/{uid}/{name}/desk"


def line_address(uid: int, name: str) -> str:
    """ZeroMQ address of the same daemon's line; clients learn it from `Welcome`."""
    return f"ipc://@creel/{uid}/{name}/line"


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages; `encode` and `decode` are the only way on and off the wire."""


# --- desk: client to daemon -------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First packet of every connection.

    `role` is "trainer", "worker" (attaches to the trainer's sessions by its token) or "cli".
    """

    protocol: int
    role: str
    pid: int
    token: str = ""


class Register(Message, frozen=True):
    """Here is a dataset; one descriptor: a sealed memfd with `Manifest.to_arrow()` of `nbytes`."""

    nbytes: int


class Attach(Message, frozen=True):
    """A worker asks for the board of a session of its trainer (and the table of its dataset)."""

    session: int


class Open(Message, frozen=True):
    """Begin a session: one stream of batches that one rank will read from one dataset."""

    dataset: str
    job: str = ""
    rank: int = 0
    world: int = 1
    name: str = ""


class Close(Message, frozen=True):
    """End a session; all its leases are given back."""

    session: int


# --- desk: daemon to client -------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """The arena's descriptor comes along (read-only). `line` is the ZeroMQ address."""

    protocol: int
    token: str
    line: str
    arena_nbytes: int
    pid: int


class Registered(Message, frozen=True):
    """The table's descriptor comes along (read-only); `dataset` is the manifest's key."""

    dataset: str
    objects: int
    table_nbytes: int


class Opened(Message, frozen=True):
    """Descriptors: board (read-write), table (read-only)."""

    session: int
    dataset: str
    objects: int


class Refused(Message, frozen=True):
    """No, and why, in one sentence that says what to do. The connection stays usable."""

    reason: str
    retry_after: float = 0.0


# --- line: client to daemon (every one carries the token of the desk) -------------------------


class Extend(Message, frozen=True):
    """The session's plan goes on: steps `step, step+1, ...` will read these objects.

    Arrays: `objects` (k,) int32 object ids in order of reading; `ends` (b,) int64: step+i reads
    `objects[ends[i-1]:ends[i]]`. `epoch` counts the session's epochs. The last step known so far
    plus one must equal `step`. `blind`: these steps were not foreseen, and nobody knows what comes
    after them. No reply.
    """

    token: str
    session: int
    epoch: int
    step: int
    blind: bool = False


class Truncate(Message, frozen=True):
    """Forget the plan from `step` on (a prediction was wrong, or an epoch was left). No reply."""

    token: str
    session: int
    step: int


class Wait(Message, frozen=True):
    """Answer `Ready` once step `step` is ready. `call` is echoed."""

    token: str
    call: int
    session: int
    step: int


class Ask(Message, frozen=True):
    """A command of the CLI: `what` is status, stats, datasets, config, warm, drop, stop.

    Answered by `Told`; `args` are plain values, checked by the daemon per command.
    """

    token: str
    call: int
    what: str
    args: dict[str, Any] = {}


# --- line: daemon to client -------------------------------------------------------------------


class Ready(Message, frozen=True):
    """Step `step` is ready: its objects are resident, or failed (then `Table.offset` is ABSENT)."""

    call: int
    session: int
    step: int


class Told(Message, frozen=True):
    """The answer to an `Ask`, as plain values with a stable schema (docs/cli.md)."""

    call: int
    body: dict[str, Any]


class Failed(Message, frozen=True):
    """The request with this `call` cannot be met, and why."""

    call: int
    reason: str


DeskRequest: TypeAlias = Hello | Register | Attach | Open | Close
DeskReply: TypeAlias = Welcome | Registered | Opened | Refused
LineRequest: TypeAlias = Extend | Truncate | Wait | Ask
LineReply: TypeAlias = Ready | Told | Failed

#: Arrays that follow the body on the line, by class: (name, dtype).
FRAMES: dict[type[Message], tuple[tuple[str, str], ...]] = {
    Extend: (("objects", "<i4"), ("ends", "<i8")),
}

M = TypeVar("M", bound=Message)

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {
    union: msgspec.msgpack.Decoder(union)
    for union in (DeskRequest, DeskReply, LineRequest, LineReply)
}


def encode(message: Message) -> bytes:
    """Body of a message.

    >>> decode(encode(Hello(PROTOCOL, "cli", 7)), DeskRequest)
    Hello(protocol=3, role='cli', pid=7, token='')
    """
    return _encoder.encode(message)


def decode(body: bytes | memoryview, union: Any) -> Any:
    """The message in `body`, one of `union` (DeskRequest, DeskReply, LineRequest, LineReply).

    Raises:
        MalformedError: whatever is wrong with the bytes; nothing else is ever raised.
    """
    if len(body) > MAX_BODY:
        raise MalformedError(f"a body of {len(body)} bytes is longer than {MAX_BODY}")
    try:
        return _decoders[union].decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise MalformedError(str(e)) from e


def decode_frames(kind: type[Message], frames: list[memoryview]) -> list[NDArray[Any]]:
    """The arrays that follow a body of class `kind`, as read-only views of the frames.

    Raises:
        MalformedError: too few or too many frames, or a length that is no multiple of the item.
    """
    wanted = FRAMES.get(kind, ())
    if len(frames) != len(wanted):
        raise MalformedError(f"{kind.__name__} has {len(wanted)} arrays, {len(frames)} came")
    try:
        return [np.frombuffer(f, dtype) for f, (_, dtype) in zip(frames, wanted, strict=True)]
    except ValueError as e:
        raise MalformedError(f"{kind.__name__}: {e}") from e
