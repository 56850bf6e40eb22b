"""The index of the disk as a file: a journal of the places of written records.

Blocks of 4 KiB with a checksum are appended after the records that they name are written. There is
no entry for a record that leaves: a later record in its room replaces it. A process killed at any
moment loses only the records that it was writing; the kernel writes the others. After a power
failure, blocks may be missing, or name records that never reached the disk and so do not match
their checksums. Loading takes about a second and 250 MB for a million records.
"""

from __future__ import annotations

import os
import struct

import numpy as np
import xxhash
from numpy.typing import NDArray

from creel.policies.arrays import Index
from creel.system.transfers import transfer

#: One run of a record. `serial` numbers records in the order of writing. `start`, `units` (of the
#: run) and `room` (of all runs) are in units of the disk, `nbytes` is the object's size in bytes,
#: `dataset` is the first half of the dataset's identity.
ENTRY = np.dtype(
    [
        *(("dataset", "<u8"), ("serial", "<u8"), ("nbytes", "<i8")),
        *(("object", "<u4"), ("start", "<u4"), ("units", "<u4"), ("room", "<u4")),
    ]
)
Entries = NDArray[np.void]

_BLOCK_NBYTES = 4096
_HEADER = struct.Struct("<8sIIQ")  # magic, unit of the disk, entries, checksum of these
_MAGIC = b"creel x1"
PER_BLOCK = (_BLOCK_NBYTES - _HEADER.size) // ENTRY.itemsize

_NAME, _NEW = "index", "index.new"
#: The file is rewritten above this multiple of the blocks that its live entries need, plus some.
_SLACK, _SLACK_BLOCKS = 2, 1024


class Journal:
    """The journal in a folder.

    Args:
        folder: descriptor of the folder.
        unit: unit of the disk, in bytes; entries with another unit are ignored.
    """

    def __init__(self, folder: int, unit: int) -> None:
        self._folder = folder
        self._unit = unit
        self._fd = self._open(_NAME, os.O_RDWR | os.O_CREAT)
        self._blocks = os.fstat(self._fd).st_size // _BLOCK_NBYTES

    def load(self) -> Entries:
        """Return all entries in the order of writing, without those of damaged blocks."""
        data = bytearray(self._blocks * _BLOCK_NBYTES)
        view, done = memoryview(data), transfer(os.preadv, self._fd, [data])
        blocks = (_unpack(view[at : at + _BLOCK_NBYTES], self._unit) for at in _steps(done))
        return np.concatenate([np.empty(0, ENTRY), *blocks])

    def append(self, entries: Entries) -> None:
        """Append entries of records that are on disk already."""
        data = _pack(entries, self._unit)
        transfer(os.pwritev, self._fd, [data], self._blocks * _BLOCK_NBYTES)
        self._blocks += len(data) // _BLOCK_NBYTES

    def too_long(self, live: int) -> bool:
        """Return whether a `rewrite` is worth it, given the number of `live` entries."""
        return self._blocks > _SLACK * -(-live // PER_BLOCK) + _SLACK_BLOCKS

    def rewrite(self, entries: Entries) -> None:
        """Replace the whole journal by these entries, atomically."""
        fd = self._open(_NEW, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            data = _pack(entries, self._unit)
            transfer(os.pwritev, fd, [data])
            os.fdatasync(fd)
            os.rename(_NEW, _NAME, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except BaseException:
            os.close(fd)
            raise
        os.close(self._fd)
        self._fd, self._blocks = fd, len(data) // _BLOCK_NBYTES

    def close(self) -> None:
        os.close(self._fd)

    def _open(self, name: str, flags: int) -> int:
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(name, flags, 0o600, dir_fd=self._folder)


def _steps(nbytes: int) -> range:
    return range(0, nbytes - _BLOCK_NBYTES + 1, _BLOCK_NBYTES)


def _pack(entries: Entries, unit: int) -> bytes:
    out = []
    for at in range(0, len(entries), PER_BLOCK):
        part = entries[at : at + PER_BLOCK]
        body = part.tobytes().ljust(_BLOCK_NBYTES - _HEADER.size, b"\0")
        checksum = xxhash.xxh3_64_intdigest(body, seed=len(part))
        out.append(_HEADER.pack(_MAGIC, unit, len(part), checksum) + body)
    return b"".join(out)


def _unpack(block: memoryview, unit: int) -> Entries:
    magic, of_unit, count, checksum = _HEADER.unpack_from(block)
    body = block[_HEADER.size :]
    good = magic == _MAGIC and of_unit == unit and count <= PER_BLOCK
    if not good or xxhash.xxh3_64_intdigest(body, seed=count) != checksum:
        return np.empty(0, ENTRY)
    return np.frombuffer(body, ENTRY, count)


def intact(entries: Entries, units: int) -> Entries:
    """Return the entries of records that were not overwritten, the latest of each object.

    A record counts only if all its runs are intact. Only neighbours are compared to find
    overwritten records, which may miss one where three overlap; a later read detects that.

    Args:
        entries: in the order of writing.
        units: size of the disk, in units.
    """
    inside = entries["start"].astype(np.int64) + entries["units"] <= units
    entries = entries[inside & (entries["units"] > 0)]
    entries = entries[_order(entries, "start")]
    while len(entries) > 1:
        start, serial = entries["start"].astype(np.int64), entries["serial"]
        overlap = start[:-1] + entries["units"][:-1] > start[1:]
        older = serial[:-1] < serial[1:]
        gone = np.zeros(len(entries), np.bool_)
        gone[:-1] |= overlap & older
        gone[1:] |= overlap & ~older
        if not gone.any():
            break
        entries = entries[~gone]
    return _complete(entries)


def _complete(entries: Entries) -> Entries:
    """Return the entries of each object's latest record that has all its runs."""
    if not len(entries):
        return entries
    entries = entries[_order(entries, "serial", "object", "dataset")]
    first = _begins(entries, "dataset", "object", "serial")
    held = np.add.reduceat(entries["units"].astype(np.int64), first)
    whole = held == entries["room"][first]
    runs = np.diff(np.append(first, len(entries)))
    entries = entries[np.repeat(whole, runs)]
    if not len(entries):
        return entries
    first = _begins(entries, "dataset", "object")
    last = np.append(first[1:], len(entries)) - 1
    newest = np.repeat(entries["serial"][last], np.diff(np.append(first, len(entries))))
    latest: Entries = entries[entries["serial"] == newest]
    return latest


def _order(entries: Entries, *names: str) -> Index:
    """Return the order of np.lexsort by these fields, in a third of the time."""
    order = np.arange(len(entries))
    for name in names:
        column = np.ascontiguousarray(entries[name])
        if len(column) and (column != column[0]).any():
            order = order[column[order].argsort(kind="stable")]
    return order


def _begins(entries: Entries, *names: str) -> Index:
    """Return the positions of entries that differ from the one before in one of these fields."""
    differs = np.zeros(len(entries), np.bool_)
    differs[0] = True
    for name in names:
        differs[1:] |= entries[name][1:] != entries[name][:-1]
    return np.flatnonzero(differs)
