"""How long a reader waits for the daemon before it reads directly. Pure.

A file in the page cache is read in less time than it takes to ask another process for it. There a
reader does not wait: it takes what is ready from the arena and reads the rest directly, while the
daemon keeps filling the arena ahead of it. Sources that make readers wait are left to the daemon,
which reads many objects at once.

What the loader itself finds in the page cache does not come here (`loader.reading.page_cache`).
"""

from __future__ import annotations

import math
from collections import deque

#: Limits per read and per byte, in ns: of the daemon's best time, and of the reader's own.
#: From the page cache objects of 300 B, 20 KB and 150 KB take a fetch thread 15, 20 and 70-130 us
#: (it writes to memory that is used for the first time), a trainer 7, 15 and 50; 4 KB of a user
#: space file system that answers at once 100 and 50-60 (benchmarks/own_dataset.py,
#: source_reads.py, 2 cores of an Intel Xeon, 2026-11-22).
_DAEMONS_NS, _DAEMONS_BYTE_NS = 45_000, 2
_OWN_NS, _OWN_BYTE_NS = 35_000, 1
#: Readers that sleep in less than every eighth read are disturbed by others only.
_MIN_SLEEPS_PART = 8
#: Batches of which one may be slow: its reader may just have been interrupted.
_REMEMBERED_BATCHES = 3
#: Batches to wait for before a slow source is tried again, at first; a cold file system may be
#: warm by then.
_PAUSE_BATCHES = 256
_PAUSE_FACTOR = 4  # factor for each further time
#: Batches read directly without a wait after a wait in vain: the daemon lacks processors.
_VAIN_BATCHES = 16


class DirectReads:
    """The choice of one reader, batch by batch, by the daemon's measurements and its own."""

    def __init__(self, *, allowed: bool) -> None:
        self._allowed = allowed
        self._slow: deque[bool] = deque(maxlen=_REMEMBERED_BATCHES)
        self._pause_left = 0  # number of batches to wait for
        self._pause = _PAUSE_BATCHES
        self._own_ns = 0.0  # per read of the last batch; 0 where its reads had to be waited for
        self._vain_left = 0

    def wait_s(self, reads: int, nbytes: int, object_ns: int) -> float:
        """Seconds to wait for a batch that is not ready; after them it is read directly.

        As long as this reader would take itself, where it knows that it does not have to wait for
        the source: so a daemon that lacks processors costs at most as much again, and not often.

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
        """Enter that the batch was not ready after `wait_s`."""
        self._vain_left = _VAIN_BATCHES

    def saw(self, reads: int, nbytes: int, ns: int, blocked: int) -> None:
        """Enter a batch's direct reads, in sequence in `ns`; the thread slept `blocked` times."""
        if not reads:
            return
        slow = ns > reads * _OWN_NS + nbytes * _OWN_BYTE_NS
        slept = slow and blocked * _MIN_SLEEPS_PART > reads
        self._own_ns = 0.0 if slept else ns / reads
        self._slow.append(slept)
        if sum(self._slow) > 1:
            self._slow.clear()
            self._pause_left = self._pause
            self._pause *= _PAUSE_FACTOR
