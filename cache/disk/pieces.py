"""Writes records to disk in large pieces, and the buffers for reads and writes."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from creel.cache.disk.folder import DataFile, buffer
from creel.policies.arrays import Ints

#: Bytes read or written at once.
_WRITE_NBYTES = 1 << 20


class AlignedScratch(threading.local):
    """An aligned buffer for each thread that reads or writes."""

    def __init__(self) -> None:
        self.view = buffer(_WRITE_NBYTES)


class PieceWriter:
    """Gathers records in a buffer and writes them in large pieces."""

    def __init__(self, file: DataFile, view: memoryview) -> None:
        self._file, self._view = file, view
        self._at = 0  # offset in the file of the buffer's first byte
        self._used = 0

    def record(self, parts: Sequence[memoryview | bytes], ranges: Ints) -> None:
        """Write a record to (r, 2) offsets and sizes; zeros fill the rest of its last unit."""
        data = [memoryview(part) for part in parts]
        for start, size in ranges.tolist():
            if start != self._at + self._used:
                self.flush()
                self._at = start
            left = size
            while left:
                some = min(left, len(self._view) - self._used, len(data[0]) if data else left)
                here = self._view[self._used : self._used + some]
                if data:
                    here[:] = data[0][:some]
                    data[0] = data[0][some:]
                    if not len(data[0]):
                        data.pop(0)
                else:
                    here[:] = bytes(some)
                self._used += some
                left -= some
                if self._used == len(self._view):
                    self.flush()

    def flush(self) -> None:
        if self._used:
            self._file.write(self._view[: self._used], self._at)
        self._at += self._used
        self._used = 0
