"""KnownChunks: what a producer knows of a log, to wait for readers and delete what they passed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from creel.streams import memories
from creel.streams.cursors import Cursor
from creel.streams.log import ABSENT, Log

#: Bytes of passed chunks that stay at most, to be written over: what a reader passes at a time.
_SPARE_NBYTES = 64 << 20


class KnownChunks:
    """The chunks of a log that are not deleted, by whomever, and how many bytes they have."""

    def __init__(self, log: Log) -> None:
        self._log = log
        there = log.numbers()
        whole = (chunk for chunk in there if log.size(chunk) != ABSENT)
        first = next(whole, there[-1] + 1 if there else 0)
        self._first, self._next = first, first
        #: Chunks that readers passed, of which memories hold so many records; -1: to be deleted.
        self._holding = dict.fromkeys((chunk for chunk in there if chunk < first), -1)
        self._samples = -1  # that memories held
        self._spare: int | None = None  # a chunk in place of which one may be appended
        self._ends = {first - 1: 0}  # bytes up to the end of each chunk, from the first one on
        self._add_new()

    def _add_new(self) -> None:
        """Find chunks that other producers have appended."""
        while (size := self._log.size(self._next)) != ABSENT:
            self._add(size)

    def _add(self, size: int) -> None:
        self._ends[self._next] = self._ends[self._next - 1] + size
        self._next += 1

    def append(self, data: Sequence[memoryview]) -> None:
        number = self._log.medium.append(data, self._next, self._spare)
        if self._spare is not None:
            self._drop_first()
        while self._next < number:  # other producers', which may be deleted already
            self._add(max(self._log.size(self._next), 0))
        self._add(sum(map(len, data)))

    def in_the_way(self, readers: Mapping[str, Cursor], nbytes: int) -> str | None:
        """Return the name of a reader that must read before `nbytes` more are appended, or None."""
        self._add_new()
        ahead, end = self._log.about.ahead, self._ends[self._next - 1]
        for name, cursor in (readers or {"a first reader": Cursor(0, 0, 0)}).items():
            unread = end - self._at(cursor)
            if unread + nbytes > ahead and unread >= cursor.reach and unread:
                return name
        return None

    def trim(self, readers: Mapping[str, Cursor], nbytes: int) -> None:
        """Delete chunks that all readers passed `keep` bytes ago; never the newest one.

        What rehearsal memories hold of them stays. So do spare ones, for the next appends, as far
        as `nbytes` more fit into what producers may be ahead.
        """
        self._spare = None
        if not readers:
            return
        slowest, about = min(map(self._at, readers.values())), self._log.about
        passed, first = slowest - about.keep, self._first
        over = self._first < self._next - 1 and self._ends[self._first] <= passed
        if not (over or self._holding):
            return
        needed, spare = memories.read(self._log.medium, readers), 0
        nothing = needed.floor >= self._next and not len(needed.samples)
        if self._log.medium.recycles and nothing:
            ahead = self._ends[self._next - 1] - slowest + nbytes
            most = max(about.ahead, *(reader.reach for reader in readers.values()))
            spare = max(min(_SPARE_NBYTES, most - ahead), 0)
        stop = min(self._next - 1, needed.floor)
        while self._first < stop and self._ends[self._first] <= passed - spare:
            self._holding[self._first] = -1
            self._drop_first()
        if spare and self._first < stop and self._ends[self._first] <= passed:
            self._spare = self._first
        if first < self._first or len(needed.samples) != self._samples:
            self._reduce(needed)
        self._samples = len(needed.samples)

    def _drop_first(self) -> None:
        del self._ends[self._first - 1]
        self._first += 1

    def _reduce(self, needed: memories.Needed) -> None:
        """Delete what memories do not hold of chunks that were passed."""
        numbers = np.array(list(self._holding), np.int64)
        starts = np.searchsorted(needed.samples, numbers * self._log.about.records)
        stops = np.searchsorted(needed.samples, (numbers + 1) * self._log.about.records)
        changed = stops - starts != np.array(list(self._holding.values()))
        for at in np.flatnonzero(changed).tolist():
            number, start, stop = int(numbers[at]), starts[at], stops[at]
            held = needed.samples[start:stop]
            self._log.delete(number, held - number * self._log.about.records)
            self._holding[number] = len(held)
            if not len(held):
                del self._holding[number]

    def _at(self, cursor: Cursor) -> int:
        """Return the bytes before a reader's place."""
        if cursor.chunk >= self._next:
            return self._ends[self._next - 1]
        if cursor.chunk < self._first:
            return self._ends[self._first - 1]
        record_at = self._ends[cursor.chunk - 1] + cursor.record * self._log.nbytes
        return min(record_at, self._ends[cursor.chunk])
