"""The peer protocol between daemons of different nodes: handshake, frames, messages. Pure.

One TCP connection carries requests one way and answers the other way. It begins with a handshake in
which both sides prove that they have the key of their cluster, the client first:

    client                                      server
    Greeting(protocol, cluster, name, nonce) ->
                                             <- Challenge(name, nonce)
    Proof(HMAC of both, as client)           ->
                                             <- Proof(HMAC of both, as server)
    PeerRequest, PeerRequest, ...            <-> PeerAnswer and payload, in any order

Other connections carry a PeerBeat each way from time to time, or a PlanRequest and its answer.

A *frame* is a header, a body (msgspec, as `creel.messages`) and arrays (raw, little endian). After
the handshake each frame has a MAC over its number and its bytes, with a key of this connection: a
recorded frame is invalid everywhere, even in the same connection. The payload after an answer has
no MAC and is not encrypted, unless `cluster.encrypt` is set: see `sealing`.

Clients of this node have other requests (`creel.messages`): a kernel vouches for them, they get
memory in place of payload, and what they say is a plan, which a peer has of its own.
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
from creel.policies.cluster.placement import EPOCH, nobody, node_type
from creel.policies.cluster.shared_plan import PlanDigest, SharedPlan
from creel.policies.eviction.sampling import Nodes

#: To be increased whenever two versions could misread each other.
PEER_PROTOCOL = 4

#: Most bytes of a body, and of a whole frame in the handshake; names have about 100 bytes.
_MAX_BODY = 1024
#: Most bytes of a beat, which has the digests of many plans.
MAX_BEAT = 16 << 10
NONCE_NBYTES = KEY_NBYTES = 32
_MAC_NBYTES = 16

#: Most objects of one request.
MAX_OBJECTS = 4096
#: Most bytes of one answer, unless its first object alone has more.
ANSWER_NBYTES = 16 << 20
#: Instead of an object's size in an answer: it is not resident; the answer is full, ask again.
NOT_HERE = -1
LATER = -2
#: Bytes about each object in an answer, and the age that stands for an unknown one.
_OBJECT_NBYTES = 8 + 8 + 4
_AGELESS = (1 << 32) - 1

#: Bytes of the body, of the arrays, and the MAC.
HEADER = struct.Struct(f"<II{_MAC_NBYTES}s")
_COUNTED = struct.Struct("<QII")


class Credentials(NamedTuple):
    """A daemon's identity: its node `name`, and the `key` (32 bytes) of its `cluster`.

    All nodes of a cluster have the same key, so that the key proves the cluster but not the name.
    `encrypt`: whether payload is encrypted.
    """

    name: str
    cluster: str
    key: bytes
    encrypt: bool


class Greeting(Message, frozen=True):
    """First frame of a connection: the client's name and its cluster.

    `public`: key of a `sealing.KeyAgreement` for encrypted payload; empty if the connection carries
    no payload, or payload is not encrypted.
    """

    protocol: int
    cluster: str
    name: str
    nonce: bytes
    public: bytes = b""


class Challenge(Message, frozen=True):
    """The answer to a Greeting, even of an unknown cluster: without proof it reveals only the name.

    `public`: empty if this node does not encrypt payload.
    """

    name: str
    nonce: bytes
    public: bytes = b""


class Proof(Message, frozen=True):
    """Proof that the sender has the cluster's key (see `PeerSession.proof`)."""

    mac: bytes


class PeerRequest(Message, frozen=True):
    """A request for objects; the reader can wait for `wait_s` seconds. Array: (k,) int32 ids."""

    number: int
    dataset: str
    wait_s: float


class PeerAnswer(Message, frozen=True):
    """The answer to request `number`.

    Arrays: (k,) int64 nbytes, (k,) int64 version of each object, (k,) uint32 the most ms since the
    storage was asked for that version, or _AGELESS. nbytes may be NOT_HERE or LATER. The bytes of
    all other objects follow, in order.
    """

    number: int


class PeerBeat(Message, frozen=True):
    """A heartbeat of node number `node`; the answer is the receiver's beat for the same cluster.

    `plans`: digests of the inputs of the sender's plans. `by_hash`: datasets without a plan, as a
    node reads them for another job, too.
    """

    node: int
    member: Member
    plans: tuple[PlanDigest, ...] = ()
    by_hash: tuple[str, ...] = ()


class PlanRequest(Message, frozen=True):
    """A request for the plan of the epoch of this order (`seed`), from a node that lacks it."""

    number: int
    dataset: str
    seed: int


class PlanAnswer(Message, frozen=True):
    """The answer to a PlanRequest: a `SharedPlan` of `nodes` nodes; 0: the node has no plan.

    `holder` is the size in bytes of this column, which follows; -1: absent.
    """

    number: int
    seed: int = 0
    nodes: int = 0
    holder: int = -1


#: Messages that a client may send after the handshake.
CLIENT_SAYS = PeerRequest | PeerBeat | PlanRequest
#: The class of a message, or a union of classes.
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
    """The keys and proofs of a connection, which follow from `Greeting` and `Challenge`.

    Every MAC covers names, cluster, protocol, both nonces and both public keys.
    """

    def __init__(self, key: bytes, greeting: Greeting, challenge: Challenge) -> None:
        """Derive the keys; raise MalformedError for another protocol, or invalid nonces or keys."""
        if greeting.protocol != PEER_PROTOCOL:
            raise MalformedError(f"peer protocol {greeting.protocol}, not {PEER_PROTOCOL}")
        if {len(greeting.nonce), len(challenge.nonce)} != {NONCE_NBYTES}:
            raise MalformedError(f"a nonce must have {NONCE_NBYTES} bytes")
        if not {len(greeting.public), len(challenge.public)} <= {0, KEY_NBYTES}:
            raise MalformedError(f"a public key must have {KEY_NBYTES} bytes")
        self.greeting = greeting
        self._key = key
        self._said = encode(greeting) + encode(challenge)
        self.requests = Seal(self._mac("requests"))
        self.answers = Seal(self._mac("answers"))

    def proof(self, side: str) -> Proof:
        return Proof(self._mac(side))

    def proves(self, side: str, proof: Proof) -> bool:
        """Return whether a proof of the other side, `side`, shows that it has the key."""
        return hmac.compare_digest(proof.mac, self._mac(side))

    @property
    def payload_salt(self) -> bytes:
        """Salt from which, with the shared secret, the key of the payload is derived."""
        return self._mac("payload")

    def _mac(self, purpose: str) -> bytes:
        return hmac.digest(self._key, f"creel peer {purpose}:".encode() + self._said, "sha256")


class Seal:
    """MACs of the numbered frames of one direction.

    Uses keyed BLAKE2 (RFC 7693): 1 us per frame, where OpenSSL 3 takes 13 us for an HMAC.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def mac(self, body_nbytes: int, payload: bytes) -> bytes:
        """Return the MAC of the next frame; `payload` are its body and its arrays."""
        self._count += 1
        counted = _COUNTED.pack(self._count, body_nbytes, len(payload))
        return blake2b(counted + payload, key=self._key, digest_size=_MAC_NBYTES).digest()


# --- frames -----------------------------------------------------------------------------------


def pack(message: Message, arrays: Sequence[NDArray[Any]] = (), seal: Seal | None = None) -> bytes:
    """Return the frame of a message; `seal` is None in the handshake."""
    body = encode(message)
    payload = b"".join([body, *(array.tobytes() for array in arrays)])
    mac = seal.mac(len(body), payload) if seal else bytes(_MAC_NBYTES)
    return HEADER.pack(len(body), len(payload) - len(body), mac) + payload


def following(header: bytes | bytearray, kind: Kind) -> int:
    """Return the number of bytes that follow the header of a frame of this kind.

    Raises:
        MalformedError: more than such a message can have.
    """
    body_nbytes, arrays_nbytes, _ = HEADER.unpack(header)
    most = _MAX_BODIES.get(kind, _MAX_BODY), _MAX_ARRAYS.get(kind, 0)
    if body_nbytes > most[0] or arrays_nbytes > most[1]:
        raise MalformedError(f"a frame cannot have {body_nbytes} and {arrays_nbytes} bytes")
    return int(body_nbytes + arrays_nbytes)


def unpack(
    header: bytes | bytearray, payload: bytes, kind: Kind, seal: Seal | None = None
) -> tuple[Any, bytes]:
    """Return the message of a frame, and the bytes of its arrays.

    Raises:
        MalformedError: for any invalid bytes or a wrong MAC; nothing else is ever raised.
    """
    body_nbytes, _, mac = HEADER.unpack(header)
    if seal is not None and not hmac.compare_digest(mac, seal.mac(body_nbytes, payload)):
        raise MalformedError("a frame has a wrong MAC")
    try:
        return _decoders[kind].decode(payload[:body_nbytes]), payload[body_nbytes:]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise MalformedError(str(e)) from e


def plan_answer(number: int, plan: SharedPlan | None) -> tuple[PlanAnswer, bytes]:
    """Return the answer to a `PlanRequest`, and the column that follows it."""
    if plan is None:
        return PlanAnswer(number), b""
    if plan.holder is None:
        return PlanAnswer(number, plan.seed, plan.nodes), b""
    column = plan.holder.tobytes()
    return PlanAnswer(number, plan.seed, plan.nodes, len(column)), column


def shared_plan(answer: PlanAnswer, holder: bytes | None) -> SharedPlan | None:
    """Return the plan in a `PlanAnswer` and the column after it; None if there is none.

    Raises:
        MalformedError: the plan names nodes that do not exist.
    """
    if not answer.nodes:
        return None
    if not 0 < answer.nodes < EPOCH:
        raise MalformedError(f"{answer.nodes} nodes")
    column = None if holder is None else _nodes(holder, answer.nodes)
    return SharedPlan(answer.seed, answer.nodes, column)


def _nodes(column: bytes, nodes: int) -> Nodes:
    if len(column) % node_type(nodes).itemsize:
        raise MalformedError("a column of nodes has an odd number of bytes")
    wide = node_type(nodes).itemsize == 2
    out: Nodes = np.frombuffer(column, np.uint16) if wide else np.frombuffer(column, np.uint8)
    if ((out >= nodes) & (out != nobody(out))).any():
        raise MalformedError("an object on a node that does not exist")
    return out


def requested(request: PeerRequest, arrays: bytes) -> Ids:
    """Return (k,) the ids of a request.

    Raises:
        MalformedError: there are no ids or negative ones, or `wait_s` is not a duration.
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
    """Return the arrays of an answer; age: in seconds, or inf.

    >>> arrays = about(np.array([5, 5]), np.array([7, 7]), np.array([1.2, np.inf]))
    >>> answered(b"".join(array.tobytes() for array in arrays), 2)
    (array([5, 5]), array([7, 7]), array([1.2, inf]))
    """
    ms = np.minimum(np.ceil(age * 1000), _AGELESS)
    return [nbytes.astype("<i8"), version.astype("<i8"), ms.astype("<u4")]


def answered(arrays: bytes, objects: int) -> tuple[Ints, Ints, Floats]:
    """Return (k,) nbytes, (k,) versions and (k,) ages of an answer about this many objects.

    Raises:
        MalformedError: the answer is about another number of objects, or LATER for all of them.
    """
    if len(arrays) != _OBJECT_NBYTES * objects:
        raise MalformedError(f"{len(arrays)} bytes about {objects} objects")
    nbytes, version = np.frombuffer(arrays, "<i8", 2 * objects).reshape(2, objects)
    ms = np.frombuffer(arrays, "<u4", offset=16 * objects)
    if nbytes.min() < LATER or (nbytes == LATER).all():
        raise MalformedError("objects of an impossible size")
    return nbytes, version, np.where(ms < _AGELESS, ms / 1000, np.inf)
