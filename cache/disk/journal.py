"""The index of the disk as a file: a journal of which record was written where.

Blocks of 4 KiB, each with a checksum, are appended as records are written, and never before. There
is no entry for a record that leaves: a later one in its room says so. A process killed at any
moment thus loses what it was writing, and nothing else; the kernel has the rest. After a power
failure blocks may be missing, or name records that never reached the disk: those do not match their
checksums. Loading takes about a second and 250 MB for a million records.
"""

from __future__ import annotations

import os
import struct

import numpy as np
import xxhash
from numpy.typing import NDArray

from creel.cache.disk.folder import write_all
from creel.policies.arrays import Index

#: One run of a record. `serial` numbers records in the order of writing; `start` and `units` are in
#: units of the disk, `nbytes` are the object's, `dataset` is the first half of its identity.
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
#: The file is rewritten when it is this many times as long as its live entries need, plus a bit.
_SLACK, _SLACK_BLOCKS = 2, 1024


class Journal:
    """The journal in a folder.

    Args:
        folder: descriptor of the folder.
        unit: of the disk, in bytes; entries of another unit do not count.
    """

    def __init__(self, folder: int, unit: int) -> None:
        self._folder = folder
        self._unit = unit
        self._fd = self._open(_NAME, os.O_RDWR | os.O_CREAT)
        self._blocks = os.fstat(self._fd).st_size // _BLOCK_NBYTES

    def load(self) -> Entries:
        """All entries, in the order of writing; blocks that are damaged are left out."""
        data = bytearray(self._blocks * _BLOCK_NBYTES)
        view, done = memoryview(data), 0
        while done < len(data) and (got := os.preadv(self._fd, [view[done:]], done)):
            done += got
        found = (_unpack(view[at : at + _BLOCK_NBYTES], self._unit) for at in _steps(done))
        return np.concatenate([np.empty(0, ENTRY), *found])

    def append(self, entries: Entries) -> None:
        """Append entries; `entries` are of records that are on the disk already."""
        data = _pack(entries, self._unit)
        write_all(self._fd, memoryview(data), self._blocks * _BLOCK_NBYTES)
        self._blocks += len(data) // _BLOCK_NBYTES

    def too_long(self, live: int) -> bool:
        """Whether `rewrite` is worth it where `live` entries count."""
        return self._blocks > _SLACK * -(-live // PER_BLOCK) + _SLACK_BLOCKS

    def rewrite(self, entries: Entries) -> None:
        """Replace the whole journal by these entries, at once or not at all."""
        fd = self._open(_NEW, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            data = _pack(entries, self._unit)
            write_all(fd, memoryview(data), 0)
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
    """Those entries whose records were not overwritten since, the latest of each object.

    A record counts only with all its runs. That no later record lies in its room is a guess from
    neighbours alone, which may be wrong where three overlap: a read then finds that out.

    Args:
        entries: in the order of writing.
        units: size of the disk.
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
    """The latest record of each object, where all its runs are there."""
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
    """As np.lexsort of these fields, in a third of the time."""
    order = np.arange(len(entries))
    for name in names:
        column = np.ascontiguousarray(entries[name])
        if len(column) and (column != column[0]).any():
            order = order[column[order].argsort(kind="stable")]
    return order


def _begins(entries: Entries, *names: str) -> Index:
    """Where entries differ from the one before in one of these fields."""
    differs = np.zeros(len(entries), np.bool_)
    differs[0] = True
    for name in names:
        differs[1:] |= entries[name][1:] != entries[name][:-1]
    return np.flatnonzero(differs)
