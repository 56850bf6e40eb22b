"""The wire format: messages come back as sent, and no bytes do harm."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from creel import messages
from creel.errors import MalformedError
from creel.messages import (
    ControlReply,
    ControlRequest,
    DealtReplays,
    DealtSamples,
    DecodedWords,
    Extend,
    Grant,
    Grants,
    Member,
    Message,
    RequestMessage,
    RequestReply,
    Wait,
    arrays_of,
    decode,
    encode,
)
from kit import seeds

UNIONS = (ControlRequest, ControlReply, RequestMessage, RequestReply)

#: Extreme values of each type of field.
EDGES: dict[Any, list[Any]] = {
    int: [0, 1, -1, 2**31, 2**63 - 1, -(2**63), 2**64 - 1],
    float: [0.0, -1.5, 1e300, float("inf")],
    bool: [False, True],
    str: ["", "a", "/d/ä/€/𝄞", "x" * 70_000, "\0"],
    bytes: [b"", bytes(32), bytes(70_000)],
    list[int]: [[], [0], [-1, 2**63 - 1]],
    Member: [Member("n", "::1", 9, 1), Member("", "", -1, 2**63 - 1)],
    list[DecodedWords]: [[], [DecodedWords(0, 1, 4096)] * 4, [DecodedWords(-1, 2**63 - 1, -8)]],
    list[Member]: [[], [Member("n", "::1", 9, 1)] * 300],
    DealtReplays | None: [None, DealtReplays(1, 2, 2**64 - 1, 0), DealtReplays(-1, 0, -1, 2**63)],
    Grants: [[], [{}, {"s3": Grant({"key": "x"}, {"HOME": "f00d"})}]],
    dict[str, Any]: [{}, {"a": 1, "b": {"c": [None, True, 1.5, "x", b"y"]}}],
}


def kinds() -> list[tuple[Any, type[Message]]]:
    """Return every message type, with its union."""
    return [(union, kind) for union in UNIONS for kind in typing.get_args(union)]


def words(wanted: Any) -> tuple[str, ...]:
    """Return the permitted words of a field; nothing for other fields."""
    is_word = typing.get_origin(wanted) is typing.Literal
    return typing.get_args(wanted) if is_word else ()


def some(kind: type[Message], rng: np.random.Generator) -> Message:
    """Return a message of this type, with random extreme values."""
    types = typing.get_type_hints(kind)
    values = {}
    for name in kind.__struct_fields__:
        choices = words(types[name]) or EDGES[types[name]]
        values[name] = choices[rng.integers(len(choices))]
    return kind(**values)


def mutated(body: bytes, rng: np.random.Generator) -> bytes:
    """Return a body with a few bytes changed, cut, doubled or inserted."""
    raw = bytearray(body)
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(0, len(raw) + 1))
        match int(rng.integers(0, 5)):
            case 0 | 1 if at < len(raw):
                raw[at] = int(rng.integers(256))
            case 2:
                del raw[at:]
            case 3:
                raw[at:at] = rng.bytes(int(rng.integers(1, 9)))
            case _:
                raw += raw[at:]
    return bytes(raw)


def leaves(value: Any) -> Iterator[Any]:
    """Yield everything in a decoded field."""
    yield value
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(key)
            yield from leaves(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from leaves(inner)


def test_every_message_belongs_to_one_union() -> None:
    everyone = [kind for _, kind in kinds()]
    assert len(set(everyone)) == len(everyone)
    # Nodes exchange other messages (`creel.daemon.peers.wire`).
    ours = {kind for kind in Message.__subclasses__() if kind.__module__ == Message.__module__}
    assert set(everyone) == ours
    tags = [kind.__struct_config__.tag for kind in everyone]
    assert len(set(tags)) == len(tags)


@pytest.mark.parametrize("union, kind", kinds(), ids=lambda v: getattr(v, "__name__", ""))
def test_messages_come_back_as_sent(union: Any, kind: type[Message]) -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        message = some(kind, rng)
        again = decode(encode(message), union)
        assert type(again) is kind
        assert again == message
        assert decode(memoryview(encode(message)), union) == message


@pytest.mark.parametrize("union, kind", kinds(), ids=lambda v: getattr(v, "__name__", ""))
def test_a_message_of_another_road_is_malformed(union: Any, kind: type[Message]) -> None:
    body = encode(some(kind, np.random.default_rng(0)))
    for other in UNIONS:
        if other is not union:
            with pytest.raises(MalformedError):
                decode(body, other)


@pytest.mark.parametrize("union, kind", kinds())
def test_versions_that_differ_by_a_field_with_a_default_understand_each_other(
    union: Any, kind: type[Message]
) -> None:
    message = some(kind, np.random.default_rng(2))
    fields = msgspec.msgpack.decode(encode(message))
    later = msgspec.msgpack.encode([*fields, {"added": "by a later version"}])
    assert decode(later, union) == message
    optional = len(kind.__struct_defaults__)
    earlier = decode(msgspec.msgpack.encode(fields[: len(fields) - optional]), union)
    required = kind.__struct_fields__[: len(kind.__struct_fields__) - optional]
    assert [getattr(earlier, name) for name in required] == [
        getattr(message, name) for name in required
    ]


@pytest.mark.parametrize("seed", seeds(100))
def test_mutated_bodies_are_malformed_or_messages(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for union, kind in kinds():
        body = mutated(encode(some(kind, rng)), rng)
        try:
            message = decode(body, union)
        except MalformedError:
            continue
        assert type(message) in typing.get_args(union)
        types = typing.get_type_hints(type(message))
        for name in message.__struct_fields__:
            value, known = getattr(message, name), words(types[name])
            wanted = [typing.get_origin(types[name]) or types[name], *typing.get_args(types[name])]
            assert value in known if known else type(value) in wanted
        assert decode(encode(message), union) == message or any(v != v for v in _all(message))


def _all(message: Message) -> Iterator[Any]:
    for name in message.__struct_fields__:
        yield from leaves(getattr(message, name))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000,
        b"\x93\xa4Told\x01\x81\xa1a" + b"\x91" * 100_000,  # nested as deep as a stack
        b"\x93\xa4Told\x01\x81\xa1a\xdd\xff\xff\xff\xff",  # a list of 4 billion
        b"\x93\xa4Told\x01\x81\xa1a\xdf\xff\xff\xff\xff",
        b"\x93\xa4Told\x01\x81\xa1a\xdb\xff\xff\xff\xff",
        b"\x93\xa4Told\x01\x81\xa1a\x81\x80\x01",  # a key without a hash
        b"\x93\xa4Told\x01\x81\xa1a\xa1\xff",  # not utf-8
        b"\x93\xa4Told\x01\x81\xa1a\xc7\x0c\xff" + bytes(4) + b"\x40" + bytes(7),  # a far date
        encode(Wait("t", 1, 2, 3)) + b"\0",
        msgspec.msgpack.encode(["Told", 1, {}, "one more"]),
        msgspec.msgpack.encode(["Told", "1", {}]),
        msgspec.msgpack.encode({"type": "Told", "call": 1, "body": {}}),
        bytes(messages.MAX_BODY + 1),
    ],
    ids=lambda body: repr(body[:16]),
)
def test_hostile_bodies_are_malformed(body: bytes) -> None:
    with pytest.raises(MalformedError):
        decode(body, RequestReply)


@pytest.mark.parametrize("message", [Extend("", 1, 0, 0), DealtSamples("", 1, 9, 0)])
@pytest.mark.parametrize("seed", seeds(50))
def test_frames_are_views_or_malformed(seed: int, message: Extend | DealtSamples) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.choice([0, 1, 3, 4, 8, 12, 16, 4000], int(rng.integers(0, 5)))
    frames = [memoryview(rng.bytes(int(n))) for n in sizes]
    kinds = ("<i4", "<i8") if isinstance(message, Extend) else ("<i4",)
    fits = len(sizes) == len(kinds)
    fits = fits and all(n % np.dtype(k).itemsize == 0 for n, k in zip(sizes, kinds, strict=True))
    try:
        arrays = arrays_of(message, frames)
    except MalformedError:
        assert not fits
        return
    assert fits
    for array, frame, dtype in zip(arrays, frames, kinds, strict=True):
        assert array.dtype == np.dtype(dtype)
        assert array.tobytes() == bytes(frame)
        assert not array.flags.writeable
