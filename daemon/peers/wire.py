"""Bytes between the daemons of different nodes: handshake, frames, messages. Pure.

One TCP connection carries requests one way and answers the other way. It begins with a handshake in
which both sides prove that they have the key of their cluster, first the one that connects:

    client                                      server
    Greeting(protocol, cluster, name, nonce) ->
                                             <- Challenge(name, nonce)
    Proof(HMAC of both, as client)           ->
                                             <- Proof(HMAC of both, as server)
    PeerRequest, PeerRequest, ...            <-> PeerAnswer and payload, in any order

Other connections carry a PeerBeat each way from time to time, or a PlanRequest and its answer.

A *frame* is a header, a body (msgspec, as `creel.messages`) and arrays (raw, little endian). After
the handshake each frame has a MAC over its number and its bytes, by a key that only this connection
has: a recorded frame is worth nothing anywhere, not even in the same connection. The payload after
an answer is as it lies in the arena, neither encrypted nor under a MAC, or both: see `sealing`.
"""

from __future__ import annotations

import hmac
import math
import struct
from collections.abc import Sequence
from hashlib import blake2b
from types import UnionType
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from creel.errors import MalformedError
from creel.messages import Member, Message, encode
from creel.policies.arrays import Floats, Ids, Ints
from creel.policies.cluster.agreement import SharedPlan
from creel.policies.cluster.members import Change, ChangeId, PlanDigest, packed, unpacked
from creel.policies.cluster.placement import EPOCH, nobody, node_type
from creel.policies.eviction.selection import Nodes

#: Increased whenever two versions could misread each other.
PEER_PROTOCOL = 4

#: Bytes of a body, and of a whole frame in the handshake: names are of some 100 bytes.
_MAX_BODY = 1024
#: Bytes of a beat: it may tell of `MAX_CHANGES` changes.
MAX_BEAT = 16 << 10
NONCE_NBYTES = KEY_NBYTES = 32
_MAC_NBYTES = 16

#: Most objects of one request.
MAX_OBJECTS = 4096
#: Most bytes of one answer, unless its first object alone has more.
ANSWER_NBYTES = 16 << 20
#: In an answer, instead of the bytes of an object: it is not here; the answer is full, ask again.
NOT_HERE = -1
LATER = -2
#: Bytes about each object in an answer, and the age of one whose version is not known to be new.
_OBJECT_NBYTES = 8 + 8 + 4
_AGELESS = (1 << 32) - 1

#: Bytes of the body, of the arrays, and the MAC.
HEADER = struct.Struct(f"<II{_MAC_NBYTES}s")
_COUNTED = struct.Struct("<QII")


class Credentials(NamedTuple):
    """What a daemon proves: that it is `name` (a node) and has the `key` (32 bytes) of `cluster`.

    All nodes of a cluster have one key: among them a name is a claim, not a proof. `encrypt`:
    whether payload is encrypted.
    """

    name: str
    cluster: str
    key: bytes
    encrypt: bool


class Greeting(Message, frozen=True):
    """First frame of a connection: who connects, to which cluster.

    `public`: of a `sealing.KeyAgreement`, for encrypted payload; empty: there is to be none, or it
    travels as it is.
    """

    protocol: int
    cluster: str
    name: str
    nonce: bytes
    public: bytes = b""


class Challenge(Message, frozen=True):
    """The answer, also where the cluster is unknown: without proof one learns the name alone.

    `public`: empty where this node does not encrypt payload.
    """

    name: str
    nonce: bytes
    public: bytes = b""


class Proof(Message, frozen=True):
    """Proof that the sender has the cluster's key (see `proof`)."""

    mac: bytes


class PeerRequest(Message, frozen=True):
    """Send these objects; the reader can wait for `wait_s` seconds. Array: (k,) int32 ids."""

    number: int
    dataset: str
    wait_s: float


class PeerAnswer(Message, frozen=True):
    """The answer to request `number`.

    Arrays: (k,) int64 nbytes, (k,) int64 version of each object, (k,) uint32 how many ms ago, at
    most, the storage was asked for that version, or _AGELESS. nbytes may be NOT_HERE or LATER. The
    bytes of all others follow, in order.
    """

    number: int


class PeerBeat(Message, frozen=True):
    """The node of this number is there; the answer is the other's beat, of the same cluster.

    `latest` is the last change of members that it knows; `log`, those up to it, is empty where the
    receiver is known to know them. `plans`: the inputs of its plans; `by_hash`: datasets without
    one, as some node reads them for a job on other nodes, too.
    """

    node: int
    member: Member
    latest: ChangeId
    log: tuple[Change, ...] = ()
    plans: tuple[PlanDigest, ...] = ()
    by_hash: tuple[str, ...] = ()


class PlanRequest(Message, frozen=True):
    """Where do objects lie in the epoch of this order? For a node that has missed it."""

    number: int
    dataset: str
    seed: int


class PlanAnswer(Message, frozen=True):
    """The answer: a `SharedPlan`; `known` is None where the node does not know.

    `holder` and `planned` are their bytes, which follow; -1: there is none.
    """

    number: int
    seed: int = 0
    known: ChangeId | None = None
    members: bytes = b""
    nodes: int = 0
    holder: int = -1
    planned: int = -1


#: What a client may send once both sides have proved who they are.
CLIENT_SAYS = PeerRequest | PeerBeat | PlanRequest
#: A message's class, or several.
Kind: TypeAlias = type[Message] | UnionType

_decoders: dict[Kind, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind)
    for kind in (Greeting, Challenge, Proof, PeerAnswer, PeerBeat, PlanAnswer, CLIENT_SAYS)
}
_MAX_ARRAYS: dict[Kind, int] = {
    CLIENT_SAYS: 4 * MAX_OBJECTS,
    PeerAnswer: _OBJECT_NBYTES * MAX_OBJECTS,
}
_MAX_BODIES: dict[Kind, int] = {CLIENT_SAYS: MAX_BEAT, PeerBeat: MAX_BEAT}


# --- handshake --------------------------------------------------------------------------------


class PeerSession:
    """What both sides know after `Greeting` and `Challenge`: proofs, and the keys of this session.

    Names, cluster, protocol, both nonces and both public keys are under every MAC.
    """

    def __init__(self, key: bytes, greeting: Greeting, challenge: Challenge) -> None:
        """Raises MalformedError for another protocol, or nonces or keys of another size."""
        if greeting.protocol != PEER_PROTOCOL:
            raise MalformedError(f"peer protocol {greeting.protocol}, not {PEER_PROTOCOL}")
        if {len(greeting.nonce), len(challenge.nonce)} != {NONCE_NBYTES}:
            raise MalformedError(f"a nonce has {NONCE_NBYTES} bytes")
        if not {len(greeting.public), len(challenge.public)} <= {0, KEY_NBYTES}:
            raise MalformedError(f"a public key has {KEY_NBYTES} bytes")
        self.greeting = greeting
        self._key = key
        self._said = encode(greeting) + encode(challenge)
        self.requests = Seal(self._mac("requests"))
        self.answers = Seal(self._mac("answers"))

    def proof(self, side: str) -> Proof:
        return Proof(self._mac(side))

    def proves(self, side: str, proof: Proof) -> bool:
        """Whether the other side, `side`, has the key."""
        return hmac.compare_digest(proof.mac, self._mac(side))

    @property
    def payload_salt(self) -> bytes:
        """What the key of the payload comes from beside the sides' agreement."""
        return self._mac("payload")

    def _mac(self, purpose: str) -> bytes:
        return hmac.digest(self._key, f"creel peer {purpose}:".encode() + self._said, "sha256")


class Seal:
    """MACs of the frames of one direction, each of which has its number.

    By keyed BLAKE2 (RFC 7693): 1 us a frame, where OpenSSL 3 takes 13 for an HMAC.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def mac(self, body_nbytes: int, rest: bytes) -> bytes:
        """The MAC of the next frame; `rest` is its body and its arrays."""
        self._count += 1
        counted = _COUNTED.pack(self._count, body_nbytes, len(rest))
        return blake2b(counted + rest, key=self._key, digest_size=_MAC_NBYTES).digest()


# --- frames -----------------------------------------------------------------------------------


def pack(message: Message, arrays: Sequence[NDArray[Any]] = (), seal: Seal | None = None) -> bytes:
    """The frame of a message; `seal` is None in the handshake."""
    body = encode(message)
    rest = b"".join([body, *(array.tobytes() for array in arrays)])
    mac = seal.mac(len(body), rest) if seal else bytes(_MAC_NBYTES)
    return HEADER.pack(len(body), len(rest) - len(body), mac) + rest


def following(header: bytes | bytearray, kind: Kind) -> int:
    """Bytes that follow the header of a frame with a message of this kind.

    Raises:
        MalformedError: more than such a message ever has.
    """
    body_nbytes, arrays_nbytes, _ = HEADER.unpack(header)
    most = _MAX_BODIES.get(kind, _MAX_BODY), _MAX_ARRAYS.get(kind, 0)
    if body_nbytes > most[0] or arrays_nbytes > most[1]:
        raise MalformedError(f"a frame of {body_nbytes} and {arrays_nbytes} bytes")
    return int(body_nbytes + arrays_nbytes)


def unpack(
    header: bytes | bytearray, rest: bytes, kind: Kind, seal: Seal | None = None
) -> tuple[Any, bytes]:
    """The message of a frame, and the bytes of its arrays.

    Raises:
        MalformedError: for any invalid bytes, or another MAC; nothing else is ever raised.
    """
    body_nbytes, _, mac = HEADER.unpack(header)
    if seal is not None and not hmac.compare_digest(mac, seal.mac(body_nbytes, rest)):
        raise MalformedError("a frame that its sender did not send, or not here")
    try:
        return _decoders[kind].decode(rest[:body_nbytes]), rest[body_nbytes:]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise MalformedError(str(e)) from e


#: Stands for the changes that a receiver knows, where nothing is known of it.
NOTHING_KNOWN = ChangeId(-1, -1)


def shortened(beat: PeerBeat, known: ChangeId) -> PeerBeat:
    """This beat, which has the whole log, for a node that knows the changes up to `known`."""
    return msgspec.structs.replace(beat, log=()) if known == beat.latest else beat


def plan_answer(number: int, plan: SharedPlan | None) -> tuple[PlanAnswer, list[bytes]]:
    """The answer to a `PlanRequest`, and what follows it."""
    if plan is None:
        return PlanAnswer(number), []
    columns = [None if one is None else one.tobytes() for one in (plan.holder, plan.planned)]
    sizes = [-1 if column is None else len(column) for column in columns]
    members = packed(plan.members), len(plan.members)
    answer = PlanAnswer(number, plan.seed, plan.known, *members, *sizes)
    return answer, [column for column in columns if column]


def shared_plan(
    answer: PlanAnswer, holder: bytes | None, planned: bytes | None
) -> SharedPlan | None:
    """What a `PlanAnswer` and the bytes after it say.

    Raises:
        MalformedError: nodes that do not exist.
    """
    if answer.known is None:
        return None
    if not 0 < answer.nodes < EPOCH:
        raise MalformedError(f"{answer.nodes} nodes")
    columns = [None if x is None else _nodes(x, answer.nodes) for x in (holder, planned)]
    return SharedPlan(answer.seed, answer.known, unpacked(answer.members, answer.nodes), *columns)


def _nodes(column: bytes, nodes: int) -> Nodes:
    if len(column) % node_type(nodes).itemsize:
        raise MalformedError("half a number of a node")
    wide = node_type(nodes).itemsize == 2
    out: Nodes = np.frombuffer(column, np.uint16) if wide else np.frombuffer(column, np.uint8)
    if ((out >= nodes) & (out != nobody(out))).any():
        raise MalformedError("an object on a node that does not exist")
    return out


def requested(request: PeerRequest, arrays: bytes) -> Ids:
    """(k,) the ids of a request.

    Raises:
        MalformedError: none, negative ones, or a time that is none.
    """
    if not arrays or len(arrays) % 4:
        raise MalformedError(f"{len(arrays)} bytes of ids")
    if not (math.isfinite(request.wait_s) and request.wait_s >= 0):
        raise MalformedError(f"a wait of {request.wait_s} s")
    ids = np.frombuffer(arrays, "<i4")
    if ids.min() < 0:
        raise MalformedError("a negative id")
    return ids


def about(nbytes: Ints, version: Ints, age: Floats) -> list[NDArray[Any]]:
    """The arrays of an answer; age: in seconds, or inf.

    >>> arrays = about(np.array([5, 5]), np.array([7, 7]), np.array([1.2, np.inf]))
    >>> answered(b"".join(array.tobytes() for array in arrays), 2)
    (array([5, 5]), array([7, 7]), array([1.2, inf]))
    """
    ms = np.minimum(np.ceil(age * 1000), _AGELESS)
    return [nbytes.astype("<i8"), version.astype("<i8"), ms.astype("<u4")]


def answered(arrays: bytes, objects: int) -> tuple[Ints, Ints, Floats]:
    """(k,) nbytes, (k,) versions and (k,) ages of an answer about this many objects.

    Raises:
        MalformedError: about another number of them, or LATER where it is no answer at all.
    """
    if len(arrays) != _OBJECT_NBYTES * objects:
        raise MalformedError(f"{len(arrays)} bytes about {objects} objects")
    nbytes, version = np.frombuffer(arrays, "<i8", 2 * objects).reshape(2, objects)
    ms = np.frombuffer(arrays, "<u4", offset=16 * objects)
    if nbytes.min() < LATER or (nbytes == LATER).all():
        raise MalformedError("objects of an impossible size")
    return nbytes, version, np.where(ms < _AGELESS, ms / 1000, np.inf)
