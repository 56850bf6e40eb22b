"""Arrived: the records of a log in the order of their arrival, from one of them on."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from creel.errors import SourceNotFoundError
from creel.streams.log import ABSENT, Log


class Arrived:
    """Numbers of the records that have arrived and are not taken yet.

    Attributes:
        count: how many are known.
        ended: whether there will be no others.
    """

    def __init__(self, log: Log, chunk: int, record: int) -> None:
        """Begin at a record of a chunk, which need not have arrived."""
        self.count = 0
        self.ended = False
        self._log = log
        self._next, self._skip = chunk, record  # the chunk to look for, and the record in it
        self._spans: deque[tuple[int, int]] = deque()  # number of the first record, how many

    @property
    def place(self) -> tuple[int, int]:
        """Chunk and record of the next one to take."""
        if not self._spans:
            return self._next, self._skip
        return divmod(self._spans[0][0], self._log.about.records)

    def poll(self, enough: int) -> bool:
        """Look for chunks until `enough` records are known; False if more must arrive first.

        Raises:
            ConfigError: a chunk of the wrong size.
            SourceError: the folder cannot be read, or (at the end) as `check`.
        """
        while self.count < enough and not self.ended:
            size = self._log.size(self._next)
            if size == ABSENT:
                if not self._log.ended():
                    return False
                size = self._log.size(self._next)  # it may have arrived just before the end
            if size == ABSENT:
                self.check()
                self.ended = True
                break
            first = self._next * self._log.about.records + self._skip
            count = max(size // self._log.nbytes - self._skip, 0)
            if count:
                self._spans.append((first, count))
            self.count += count
            self._next, self._skip = self._next + 1, 0
        return True

    def check(self) -> None:
        """Check that what comes next has not been deleted.

        Raises:
            SourceNotFoundError: it has.
        """
        oldest = self._log.deleted(self._next)
        if oldest is not None:
            raise behind(self._log, self._next, oldest)

    def take(self, n: int) -> NDArray[np.int64]:
        """Return the numbers of the next n records, fewer if fewer are known."""
        parts, left = [np.empty(0, np.int64)], min(n, self.count)
        self.count -= left
        while left:
            first, count = self._spans.popleft()
            some = min(count, left)
            parts.append(np.arange(first, first + some))
            if some < count:
                self._spans.appendleft((first + some, count - some))
            left -= some
        return np.concatenate(parts)


def behind(log: Log, chunk: int, oldest: int) -> SourceNotFoundError:
    """Return the error for a chunk that was deleted before it was read; `oldest`: the next one."""
    return SourceNotFoundError(
        2,
        f"chunk {chunk} has been deleted, the next one is {oldest}: let producers keep more than"
        " is produced between two checkpoints (keep=), name readers that begin late (readers=), or"
        f" begin with Stream(begin={oldest})",
        log.path,
    )
