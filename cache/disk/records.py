"""Records: the format of objects on disk, with which a wrong byte is never served. Pure.

A record is a header of 64 bytes and the object's bytes, in whole units of the disk. The header has
the identity of the object and a checksum (XXH3) over itself and the bytes. It detects a record that
was partly overwritten or damaged, or belongs to another object.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import xxhash

from creel.policies.arrays import Ints

_MAGIC = b"creel 1\n"
_FIELDS = struct.Struct("<8s16sqqq8x")
_CHECKSUM = struct.Struct("<Q")
HEADER_NBYTES = _FIELDS.size + _CHECKSUM.size

#: Records of this size or more begin at, and take, whole pages of 4 KiB, which disks write at once.
_LARGE_NBYTES = 32 << 10
_PAGE_NBYTES = 4096


class Identity(NamedTuple):
    """The identity of a record's object.

    `dataset`: the dataset's content identity; `object`: its number in there; `nbytes`: its size;
    `version`: the version of the file that it was read from.
    """

    dataset: bytes
    object: int
    nbytes: int
    version: int


def dataset_id(key: str) -> bytes:
    """Return the identity (16 bytes) of a dataset, given its key."""
    return xxhash.xxh3_128_digest(key.encode())


def header(identity: Identity, parts: Iterable[memoryview | bytes]) -> bytes:
    """Return the header of a record whose bytes are `parts`, one after the other."""
    fields = _FIELDS.pack(_MAGIC, *identity)
    return fields + _CHECKSUM.pack(_digest(fields, parts).intdigest())


class Verifier:
    """Verifies a record while it is read: begins with the header, `update` takes the rest."""

    def __init__(self, head: memoryview | bytes) -> None:
        """head: the first HEADER_NBYTES of a record."""
        fields = bytes(head[: _FIELDS.size])
        magic, *identity = _FIELDS.unpack(fields)
        self.identity = Identity(*identity) if magic == _MAGIC else None
        self._checksum = _CHECKSUM.unpack_from(head, _FIELDS.size)[0]
        self._digest = _digest(fields, ())

    def update(self, data: memoryview) -> None:
        self._digest.update(data)

    def matches(self) -> bool:
        """Return whether all bytes are as they were written."""
        return self.identity is not None and self._digest.intdigest() == self._checksum


def _digest(fields: bytes, parts: Iterable[memoryview | bytes]) -> xxhash.xxh3_64:
    digest = xxhash.xxh3_64(fields)
    for part in parts:
        digest.update(part)
    return digest


def room_nbytes(nbytes: Ints, unit: int) -> Ints:
    """Return (k,) bytes that records of objects of these sizes take on a disk with this unit.

    >>> room_nbytes(np.array([448, 449, 100_000]), 512).tolist()
    [512, 1024, 102400]
    """
    record = nbytes + HEADER_NBYTES
    align = alignment(record, unit)
    return -(-record // align) * align


def alignment(record_nbytes: Ints, unit: int) -> Ints:
    """Return (k,) the alignment of records of these sizes, in bytes."""
    return np.where(record_nbytes >= _LARGE_NBYTES, max(unit, _PAGE_NBYTES), unit)
