"""The results of reads, and counters of a source.

Reads from storage, from a peer and from the disk tier all return a `Read`.
"""

from __future__ import annotations

import errno
import threading
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from creel.cache.memory.buffers import Part
from creel.cache.storage import version
from creel.cache.storage.stores.requests import Requests
from creel.errors import SourceError
from creel.policies.arrays import Floats, Ints

#: Upper bounds of the histogram's buckets, in seconds: from page cache to slow object stores.
SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


@dataclass
class Counters:
    """Counters of a source. All methods may be called from any thread."""

    opens: int = 0
    reads: int = 0
    nbytes: int = 0
    retries: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    last_error: str = ""
    seconds: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    seconds_sum: float = 0.0
    #: Of object stores; counted by their clients.
    requests: Requests = field(default_factory=Requests, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def count(self, reads: int, nbytes: int, seconds: float, opens: int) -> None:
        """Count reads that succeeded and took `seconds` together."""
        if not reads:
            return
        with self._lock:
            self.reads += reads
            self.opens += opens
            self.nbytes += nbytes
            self.seconds[bisect_left(SECONDS, seconds / reads)] += reads
            self.seconds_sum += seconds

    def count_retry(self) -> None:
        with self._lock:
            self.retries += 1

    def count_error(self, error: SourceError) -> None:
        with self._lock:
            self.errors[errno.errorcode.get(error.errno or 0, "other")] += 1
            self.last_error = f"{error.uri}: {error.strerror}"

    def snapshot(self) -> Counters:
        """Return a copy; `seconds` has a count per bucket of SECONDS, and one of slower reads."""
        with self._lock:
            return replace(
                self, errors=self.errors.copy(), seconds=list(self.seconds), _lock=threading.Lock()
            )


def parts_in(buffer: memoryview, length: Ints) -> list[Part]:
    """Cut a buffer into (k,) objects of these lengths, one after the other."""
    ends = length.cumsum()
    ranges = zip((ends - length).tolist(), ends.tolist(), strict=True)
    return [[buffer[start:stop]] for start, stop in ranges]


class Read(NamedTuple):
    """Results of a read, by object in the order requested.

    nbytes: (k,) bytes read; -1 where the object failed (`counters.last_error` has the reason).
    version: (k,) int64 version of its file (`cache/storage/version.py`); UNKNOWN where it failed.
    asked: (k,) earliest time at which the storage was asked for that version (`time.monotonic`); 0
        if unknown.
    """

    nbytes: Ints
    version: Ints
    asked: Floats

    @classmethod
    def failed(cls, objects: int) -> Read:
        """Return results in which all objects have failed, to begin a read with."""
        nbytes, unknown = np.full(objects, -1), np.full(objects, version.UNKNOWN)
        return cls(nbytes, unknown, np.zeros(objects))

    def part(self, part: slice) -> Read:
        """Return a view of the results of some objects, to be written to."""
        return Read(self.nbytes[part], self.version[part], self.asked[part])

    def enter(self, where: NDArray[np.integer] | slice, part: Read) -> None:
        """Enter the results `part` for the objects at `where`."""
        for column, values in zip(self, part, strict=True):
            column[where] = values


class WholeObject(NamedTuple):
    """An object whose length was unknown; `version` and `asked` as in `Read`."""

    data: bytes
    version: int
    asked: float
