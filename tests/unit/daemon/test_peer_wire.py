"""Frames and handshake between nodes: altered, recorded or forged messages are refused."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from creel.cache.memory.buffers import cut
from creel.daemon.peers import sealing, wire
from creel.daemon.peers.wire import (
    HEADER,
    Challenge,
    Greeting,
    PeerAnswer,
    PeerRequest,
    PeerSession,
)
from creel.errors import MalformedError
from creel.messages import Message
from creel.policies.cluster.placement import node_type
from creel.policies.cluster.shared_plan import SharedPlan
from creel.policies.eviction.sampling import Nodes

KEY = bytes(range(32))
GREETING = Greeting(wire.PEER_PROTOCOL, "cluster", "client", b"c" * 32)
CHALLENGE = Challenge("server", b"s" * 32)
CLIENT = wire.CLIENT_SAYS
KINDS = [Greeting, Challenge, wire.Proof, CLIENT, PeerAnswer, wire.PeerBeat, wire.PlanAnswer]


@dataclass
class Pair:
    """Both ends of one session."""

    client: PeerSession = field(default_factory=lambda: PeerSession(KEY, GREETING, CHALLENGE))
    server: PeerSession = field(default_factory=lambda: PeerSession(KEY, GREETING, CHALLENGE))

    def request(self, number: int = 1) -> bytes:
        ids = np.arange(5, dtype="<i4")
        return wire.pack(PeerRequest(number, "data", 0.5), [ids], self.client.requests)

    def receive(self, frame: bytes) -> Message:
        return unpacked(frame, CLIENT, self.server.requests)


def unpacked(frame: bytes, kind: wire.Kind, seal: wire.Seal | None) -> Message:
    header, body = frame[: HEADER.size], frame[HEADER.size :]
    if wire.following(header, kind) != len(body):
        raise MalformedError("cut")
    message, arrays = wire.unpack(header, body, kind, seal)
    if isinstance(message, PeerRequest):
        wire.requested(message, arrays)
    assert isinstance(message, Message)
    return message


def test_frames_arrive_as_they_were_sent_in_order() -> None:
    pair = Pair()
    for number in range(3):
        assert pair.receive(pair.request(number)) == PeerRequest(number, "data", 0.5)


@given(st.integers(0), st.integers(1, 255))
def test_no_byte_of_a_frame_can_be_changed(at: int, change: int) -> None:
    pair = Pair()
    frame = bytearray(pair.request())
    frame[at % len(frame)] ^= change
    with pytest.raises(MalformedError):
        pair.receive(bytes(frame))


def test_a_recorded_frame_is_worth_nothing_in_its_own_session() -> None:
    pair = Pair()
    frame = pair.request()
    pair.receive(frame)
    with pytest.raises(MalformedError):
        pair.receive(frame)


def test_a_frame_cannot_be_left_out() -> None:
    pair = Pair()
    pair.request()
    with pytest.raises(MalformedError):
        pair.receive(pair.request())


@pytest.mark.parametrize(
    "greeting, challenge",
    [
        (GREETING, Challenge("server", b"t" * 32)),
        (Greeting(wire.PEER_PROTOCOL, "cluster", "client", b"d" * 32), CHALLENGE),
        (Greeting(wire.PEER_PROTOCOL, "another", "client", b"c" * 32), CHALLENGE),
        (Greeting(wire.PEER_PROTOCOL, "cluster", "clien", b"c" * 32), CHALLENGE),
        (GREETING, Challenge("serve", b"s" * 32)),
    ],
)
def test_proofs_and_frames_are_of_one_session_only(
    greeting: Greeting, challenge: Challenge
) -> None:
    """Every MAC covers both nonces, both names and the cluster."""
    pair, other = Pair(), PeerSession(KEY, greeting, challenge)
    for side in "client", "server":
        assert pair.server.proves(side, pair.client.proof(side))
        assert not other.proves(side, pair.client.proof(side))
    with pytest.raises(MalformedError):
        unpacked(pair.request(), CLIENT, other.requests)


def test_another_key_proves_nothing() -> None:
    pair, stranger = Pair(), PeerSession(KEY[::-1], GREETING, CHALLENGE)
    assert not pair.server.proves("client", stranger.proof("client"))
    with pytest.raises(MalformedError):
        unpacked(pair.request(), CLIENT, stranger.requests)


def test_nothing_that_one_side_said_serves_as_word_of_the_other() -> None:
    pair = Pair()
    assert not pair.client.proves("server", pair.client.proof("client"))
    with pytest.raises(MalformedError):
        unpacked(pair.request(), CLIENT, pair.client.answers)


@pytest.mark.parametrize("nonces", [(b"", b"s" * 32), (b"c" * 32, b"s" * 31), (b"c" * 33,) * 2])
def test_nonces_have_one_size(nonces: tuple[bytes, bytes]) -> None:
    greeting = Greeting(wire.PEER_PROTOCOL, "cluster", "client", nonces[0])
    with pytest.raises(MalformedError):
        PeerSession(KEY, greeting, Challenge("server", nonces[1]))


def test_another_protocol_is_refused() -> None:
    with pytest.raises(MalformedError):
        PeerSession(KEY, Greeting(wire.PEER_PROTOCOL + 1, "c", "n", b"c" * 32), CHALLENGE)


@given(st.sampled_from(KINDS), st.binary(min_size=HEADER.size, max_size=400))
def test_any_bytes_are_a_message_or_malformed(kind: wire.Kind, data: bytes) -> None:
    with contextlib.suppress(MalformedError):
        unpacked(data, kind, None)


@given(st.sampled_from(KINDS), st.binary(max_size=400), st.integers(0, 400))
def test_any_body_is_a_message_or_malformed(kind: wire.Kind, data: bytes, body: int) -> None:
    """Any bytes after a valid header."""
    body = min(body, len(data))
    header = HEADER.pack(body, len(data) - body, bytes(16))
    with contextlib.suppress(MalformedError):
        unpacked(header + data, kind, None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_frame_of_absurd_size_is_refused_by_its_header(kind: wire.Kind) -> None:
    for sizes in (1 << 20, 0), (0, 1 << 20), (2**32 - 1, 2**32 - 1):
        with pytest.raises(MalformedError):
            wire.following(HEADER.pack(*sizes, bytes(16)), kind)


@pytest.mark.parametrize("wait_s", [float("nan"), float("inf"), -1.0])
def test_a_wait_is_a_time(wait_s: float) -> None:
    with pytest.raises(MalformedError):
        wire.requested(PeerRequest(1, "data", wait_s), b"\0\0\0\0")


@pytest.mark.parametrize("arrays", [b"", b"\0\0\0", b"\xff\xff\xff\xff"])
def test_ids_are_numbers_from_0_on(arrays: bytes) -> None:
    with pytest.raises(MalformedError):
        wire.requested(PeerRequest(1, "data", 1.0), arrays)


@pytest.mark.parametrize("nbytes", [[-3, 0], [wire.LATER, wire.LATER], [5]])
def test_an_answer_must_make_sense(nbytes: list[int]) -> None:
    """An answer that only says "later" would be requested again forever."""
    arrays = np.array([nbytes, nbytes], "<i8").tobytes() + bytes(4 * len(nbytes))
    with pytest.raises(MalformedError):
        wire.answered(arrays, 2)


@given(st.lists(st.binary(max_size=9)), st.integers(0, 100))
def test_cut_buffers_are_the_same_bytes(parts: list[bytes], nbytes: int) -> None:
    first, remaining = cut([memoryview(p) for p in parts], nbytes)
    whole = b"".join(parts)
    assert b"".join(first) == whole[:nbytes]
    assert b"".join(remaining) == whole[nbytes:]
    assert not remaining or len(remaining[0])


@pytest.mark.parametrize("nodes", [3, 255, 256, 1024])
def test_a_shared_plan_is_what_was_said(nodes: int) -> None:
    dtype = node_type(nodes)
    holder: Nodes = np.full(4, np.iinfo(dtype).max, dtype)
    holder[[0, 1, 3]] = 0, 2, nodes - 1
    answer, column = wire.plan_answer(7, SharedPlan(9, nodes, holder))
    assert answer.number == 7
    heard = wire.shared_plan(answer, column)
    assert heard is not None
    assert (heard.seed, heard.nodes) == (9, nodes)
    assert heard.holder is not None
    assert heard.holder.tolist() == holder.tolist()


def test_that_nobody_holds_anything_is_another_answer_than_that_nothing_is_known() -> None:
    heard = wire.shared_plan(wire.plan_answer(7, SharedPlan(9, 3, None))[0], None)
    assert heard is not None
    assert heard.holder is None
    assert wire.shared_plan(wire.plan_answer(7, None)[0], None) is None


@pytest.mark.parametrize(
    "nodes, holder",
    [(-1, b""), (1 << 16, b""), (2, b"\x02"), (256, b"\x02"), (256, b"\x00\x01")],
)
def test_a_plan_of_nodes_that_do_not_exist_is_malformed(nodes: int, holder: bytes) -> None:
    answer = wire.PlanAnswer(1, 2, nodes, len(holder))
    with pytest.raises(MalformedError):
        wire.shared_plan(answer, holder)


# --- encrypted payload --------------------------------------------------------------------------


def agreed(key: bytes = KEY) -> tuple[sealing.Sealer, sealing.Opener]:
    """Return both ends of one connection."""
    pytest.importorskip("cryptography")
    ours, theirs = sealing.KeyAgreement(), sealing.KeyAgreement()
    session = PeerSession(key, GREETING, CHALLENGE)
    sealer = sealing.Sealer(ours.cipher(session, theirs.public))
    return sealer, sealing.Opener(theirs.cipher(session, ours.public))


def record(sealer: sealing.Sealer, payload: bytes) -> bytes:
    sealed, remaining = sealer.record([memoryview(payload)])
    assert not remaining
    return bytes(sealed)


def opened(opener: sealing.Opener, sealed: bytes) -> bytes:
    header, body = sealed[: sealing.HEADER.size], sealed[sealing.HEADER.size :]
    if opener.following(header) != len(body):
        raise MalformedError("cut")
    return opener.opened(header, memoryview(body))


def test_payload_arrives_as_it_was_sent_in_order() -> None:
    sealer, opener = agreed()
    for payload in b"x", b"y" * 1000, b"z" * sealing.RECORD_NBYTES:
        assert opened(opener, record(sealer, payload)) == payload
    buffers = [memoryview(bytes([i % 256]) * 5000) for i in range(200)]
    whole, remaining = b"".join(buffers), buffers
    got = b""
    while remaining:
        sealed, remaining = sealer.record(remaining)
        got += opened(opener, bytes(sealed))
    assert got == whole


@given(st.integers(0), st.integers(1, 255))
def test_no_byte_of_a_record_can_be_changed(at: int, change: int) -> None:
    sealer, opener = agreed()
    sealed = bytearray(record(sealer, b"payload"))
    sealed[at % len(sealed)] ^= change
    with pytest.raises(MalformedError):
        opened(opener, bytes(sealed))


@pytest.mark.parametrize("taken", [[1], [1, 0], [0, 0]])
def test_no_record_can_be_left_out_moved_or_repeated(taken: list[int]) -> None:
    sealer, opener = agreed()
    records = [record(sealer, b"first"), record(sealer, b"second")]
    *before, last = taken
    for i in before:
        with contextlib.suppress(MalformedError):
            opened(opener, records[i])
    with pytest.raises(MalformedError):
        opened(opener, records[last])


def test_each_connection_has_a_key_of_its_own_even_where_all_else_is_the_same() -> None:
    (sealer, _), (_, other) = agreed(), agreed()
    with pytest.raises(MalformedError):
        opened(other, record(sealer, b"payload"))


def test_a_meddler_without_the_cluster_s_key_reads_nothing() -> None:
    pytest.importorskip("cryptography")
    ours, theirs = sealing.KeyAgreement(), sealing.KeyAgreement()
    sealer = sealing.Sealer(ours.cipher(PeerSession(KEY, GREETING, CHALLENGE), theirs.public))
    guess = PeerSession(KEY[::-1], GREETING, CHALLENGE)
    with pytest.raises(MalformedError):
        opened(sealing.Opener(theirs.cipher(guess, ours.public)), record(sealer, b"payload"))


@pytest.mark.parametrize("public", [b"", b"short", bytes(32)])
def test_an_impossible_public_key_is_malformed(public: bytes) -> None:
    pytest.importorskip("cryptography")
    with pytest.raises(MalformedError):
        sealing.KeyAgreement().cipher(PeerSession(KEY, GREETING, CHALLENGE), public)


def test_public_keys_are_under_the_proofs() -> None:
    with_key = Greeting(wire.PEER_PROTOCOL, "cluster", "client", b"c" * 32, b"k" * 32)
    plain, keyed = PeerSession(KEY, GREETING, CHALLENGE), PeerSession(KEY, with_key, CHALLENGE)
    assert not plain.proves("client", keyed.proof("client"))
