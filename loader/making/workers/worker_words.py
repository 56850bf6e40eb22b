"""Shared words of a loader's workers: what each does at the moment, and what it has counted.

A worker alone writes its row, and its trainer reads it; VOID alone is the trainer's. Counters are
those of `creel.counters` that workers write; they only grow while the pool lives.
"""

from __future__ import annotations

from creel.cache.memory.memfd import mapped
from creel.counters import OF_WORKERS

#: The word of a row that says what a worker does (`batch_times`), for which batch, since when (ns),
#: and the tag of that batch, and which part of it.
STAGE, BATCH, SINCE_NS, TAG, PART = range(5)
#: The word of each counter by name.
COUNTER = {name: PART + 1 + i for i, name in enumerate(OF_WORKERS)}
_ROW = 32
_VOID = 0
_FIRST = 8  # word of the first row
assert max(COUNTER.values()) < _ROW  # noqa: S101


class WorkerWords:
    """The words of all workers of a pool.

    Attributes:
        rows: for each worker its words, indexed with the constants above.
    """

    def __init__(self, fd: int, workers: int) -> None:
        """Map the words behind `fd` read-write; the caller keeps (and closes) `fd`."""
        self._all = memoryview(mapped(fd, self.nbytes(workers))).cast("q")
        firsts = range(_FIRST, len(self._all), _ROW)
        self.rows = [self._all[first : first + _ROW] for first in firsts]

    @staticmethod
    def nbytes(workers: int) -> int:
        """Return the size of the memfd."""
        return 8 * (_FIRST + _ROW * workers)

    @property
    def void(self) -> int:
        """Tasks with a tag below this are skipped."""
        return self._all[_VOID]

    @void.setter
    def void(self, tag: int) -> None:
        self._all[_VOID] = tag

    def counts(self) -> dict[str, int]:
        """Return all counters by name, summed over the workers."""
        return {name: sum(row[word] for row in self.rows) for name, word in COUNTER.items()}
