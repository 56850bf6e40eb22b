"""How long a reader waits for the daemon before it reads directly. Pure.

Reading a file from the page cache takes less time than asking another process for it. For such
files a reader does not wait: it takes the ready objects from the arena and reads the others
directly, while the daemon keeps filling the arena ahead of it. Slow sources are left to the daemon,
which reads many objects at once.

Objects that the loader itself finds in the page cache before an epoch are not counted here
(`loader.page_cache`).
"""

from __future__ import annotations

import math
from collections import deque

from creel.policies.thread_use import ThreadUse, waited

#: A source is worth a direct read, which shows how quick it is, if the daemon's best time stays
#: below this limit, in ns per read and per byte. From the page cache, objects of 300 B, 20 KB and
#: 150 KB take a fetch thread 15, 20 and 70-130 us (it writes to fresh memory); 4 KB from a user
#: space file system that answers at once take 100 us (benchmarks/own_dataset.py, source_reads.py, 2
#: cores of an Intel Xeon, 2026-11-22). Without the daemon's time no reader would dare the first
#: read: the first epoch of records in the page cache then takes twice as long (tokens 8 KB x 64,
#: 2 workers: 11.0 ms a batch in place of 5.3, median of 6 rounds in turn, 2 busy cores,
#: 2026-11-26).
_DAEMONS_NS, _DAEMONS_BYTE_NS = 45_000, 2
#: Number of recent batches of which one may be slow: its reader may have been interrupted.
_REMEMBERED_BATCHES = 3
#: Batches to wait for before direct reads from a slow source are tried again, the first time: a
#: cold file system may be warm by then.
_PAUSE_BATCHES = 256
_PAUSE_FACTOR = 4  # of the pause, for each further time
#: Batches read directly without waiting after a wait that was in vain: the daemon lacks processors.
_VAIN_BATCHES = 16


class DirectReads:
    """Decides for one reader, batch by batch, from the daemon's measurements and its own."""

    def __init__(self, *, allowed: bool) -> None:
        self._allowed = allowed
        self._slow: deque[bool] = deque(maxlen=_REMEMBERED_BATCHES)
        self._pause_left = 0  # number of batches to wait for
        self._pause = _PAUSE_BATCHES
        self._own_ns = 0.0  # per read of the last batch; 0 if its reads had to wait
        self._vain_left = 0

    def wait_s(self, reads: int, nbytes: int, object_ns: int) -> float:
        """Return how many seconds to wait for a batch that is not ready before reading it directly.

        If the reader's own reads do not wait for the source, it waits as long as these would take.
        So a daemon that lacks processors at most doubles the time of a batch, and rarely.

        Args:
            reads, nbytes: most objects and bytes that are missing.
            object_ns: the daemon's time per read; 0 while unknown.
        """
        if not self._allowed:
            return math.inf
        if self._pause_left > 0:
            self._pause_left -= 1
            return math.inf
        if object_ns and reads * object_ns <= reads * _DAEMONS_NS + nbytes * _DAEMONS_BYTE_NS:
            return 0.0
        if not self._own_ns:
            return math.inf
        if self._vain_left > 0:
            self._vain_left -= 1
            return 0.0
        return reads * self._own_ns / 1e9

    def waited_in_vain(self) -> None:
        """Note that the batch was not ready after `wait_s`."""
        self._vain_left = _VAIN_BATCHES

    def saw(self, reads: int, ns: int, use: ThreadUse) -> None:
        """Enter the direct reads of a batch.

        Args:
            reads: their number, one after the other.
            ns: how long they took.
            use: resources of the thread while it read and decoded them.
        """
        if not reads:
            return
        # The thread may also have slept while it decoded, for its own threads.
        slow = waited(reads, use._replace(wall_ns=min(use.wall_ns, use.cpu_ns + ns)))
        self._own_ns = 0.0 if slow else ns / reads
        self._slow.append(slow)
        if sum(self._slow) > 1:
            self._slow.clear()
            self._pause_left = self._pause
            self._pause *= _PAUSE_FACTOR
