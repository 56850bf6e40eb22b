"""Writes objects to their places in the arena in the cheapest way.

Pages that were never written cost a page fault each through the mapping, so objects there are read
into a buffer and written by one system call. Other objects are read straight into their places.
"""

from __future__ import annotations

import threading

import numpy as np

from creel.cache.memory.arena import Arena
from creel.cache.memory.pools.free_ranges import NOWHERE
from creel.cache.memory.pools.runs import HEADER, Runs, headers
from creel.cache.storage.reads import Read, parts_in
from creel.daemon.service.storage.fetch_queue import Readable
from creel.policies.arrays import Ids, Index, Ints

#: Size of the read buffer in front of the arena; it fits into a core's cache.
SCRATCH_NBYTES = 1 << 20
#: Objects up to this size go through the buffer if their pages were never written.
_LARGE_NBYTES = 1 << 20


class ArenaWriter:
    """Reads or copies objects into an arena; thread-safe.

    Its methods raise OSError if the machine has no memory for the arena.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._scratch = _ReadBuffer()

    def fill(self, source: Readable, ids: Ids, offset: Ints, length: Ints) -> Read:
        """Read objects into their places, directly or through a buffer.

        All small objects take the same way, so that neighbours in a file are one read.
        """
        read = Read.failed(len(ids))
        straight = (length > _LARGE_NBYTES) | (offset < NOWHERE)
        straight |= self._arena.written(offset[~straight], length[~straight])
        where = np.flatnonzero(straight)
        if len(where):
            parts = self._arena.parts(offset[where], length[where])
            read.enter(where, source.read_parts(ids[where], length[where], parts))
        for where in _portions(np.flatnonzero(~straight), length):
            part = self._fill_buffered(source, ids[where], offset[where], length[where])
            read.enter(where, part)
        return read

    def link(self, place: Ints, length: Ints, runs: Runs) -> None:
        """Write the headers of the runs of objects in several runs."""
        for i in (place < NOWHERE).nonzero()[0].tolist():
            for start, header in headers(runs[int(place[i])], int(length[i])):
                self._arena.write(start, memoryview(header))

    def write(self, place: int, data: memoryview, runs: Runs) -> None:
        """Write an object, or adjacent objects joined in `data`, to the place of the first."""
        if place >= 0:
            self._arena.write(place, data)
            return
        for start, header in headers(runs[place], len(data)):
            held = HEADER.unpack(header)[0]
            self._arena.write(start, memoryview(header + data[:held]))
            data = data[held:]

    def _fill_buffered(self, source: Readable, ids: Ids, offset: Ints, length: Ints) -> Read:
        ends = length.cumsum()
        scratch = self._scratch.view(int(ends[-1]))
        read = source.read_parts(ids, length, parts_in(scratch, length))
        self._put(scratch, ends - length, offset, np.where(read.nbytes < 0, 0, length))
        return read

    def _put(self, scratch: memoryview, begins: Ints, offset: Ints, length: Ints) -> None:
        """Write objects from the buffer to their places; one write for objects adjacent in both."""
        ends = begins + length
        joined = (ends[:-1] == begins[1:]) & (offset[:-1] + length[:-1] == offset[1:])
        first = np.flatnonzero(np.append(True, ~joined))
        last = np.append(first[1:], len(begins)) - 1
        for begin, end, to in zip(
            begins[first].tolist(), ends[last].tolist(), offset[first].tolist(), strict=True
        ):
            self._arena.write(to, scratch[begin:end])


def _portions(where: Index, length: Ints) -> list[Index]:
    """Split positions into portions of about SCRATCH_NBYTES."""
    if not len(where):
        return []
    cut = np.flatnonzero(np.diff((length[where].cumsum() - 1) // SCRATCH_NBYTES)) + 1
    return np.split(where, cut)


class _ReadBuffer(threading.local):
    """A buffer for each thread, as large as the largest request."""

    _view = memoryview(bytearray())  # writable, though empty

    def view(self, nbytes: int) -> memoryview:
        """Return at least `nbytes` bytes of memory that only this thread uses."""
        if len(self._view) < nbytes:
            self._view = memoryview(bytearray(max(nbytes, SCRATCH_NBYTES)))
        return self._view
