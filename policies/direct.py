"""Whether a source makes its readers wait, and who then reads past the daemon. Pure.

Reading a file from the page cache takes less time than asking another process for it. So what a
thread read shows, by the kernel's counters, whether it had to wait (`waited`), and two ask that:

* a loader's reader, after each batch that it read directly (`DirectReads`). While it need not wait,
  it takes the ready objects from the arena and reads the others directly, and the daemon keeps
  filling the arena ahead of it. Slow sources are left to the daemon, which reads many objects at
  once;
* a wrapped dataset that no daemon serves yet (`Bypass`). Intercepting each file that a sample opens
  costs some microseconds, which a file in the page cache never wins back.

What the kernel can say before anything is read is asked once an epoch (`loader.data.page_cache`).
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

#: Reads waited for their source if the thread slept at least once in this many of them ...
_READS_PER_SLEEP = 8
#: ... or slept for this part (1/n) of its time and a device was read: a file may hold many samples;
_OFF_CPU_PART = 10
#: in both cases only if it slept longer than this many ns per read. Threads wait some 100 us per
#: batch for the interpreter's lock; a file system that answers at once takes 50 us.
_OFF_CPU_NS = 20_000


class ThreadUse(NamedTuple):
    """Resources that a thread has used; times in ns."""

    wall_ns: int
    cpu_ns: int
    sleeps: int  # how often it gave up the processor by itself
    device_reads: int  # blocks read, and pages of mapped files

    def __sub__(self, other: ThreadUse) -> ThreadUse:
        """Return the use since `other`."""
        return ThreadUse(*(now - then for now, then in zip(self, other, strict=True)))

    def __add__(self, other: tuple[int, ...]) -> ThreadUse:  # type: ignore[override]  # no tuple
        """Return the sum of both."""
        return ThreadUse(*(value + more for value, more in zip(self, other, strict=True)))


NO_USE = ThreadUse(0, 0, 0, 0)


def slept(reads: int, use: ThreadUse) -> bool:
    """Whether a thread slept longer during `reads` reads than it would for other threads."""
    return use.sleeps > 0 and use.wall_ns - use.cpu_ns >= reads * _OFF_CPU_NS


def waited(reads: int, use: ThreadUse) -> bool:
    """Whether `reads` reads had to wait for their source.

    >>> waited(64, ThreadUse(10_000_000, 2_000_000, sleeps=64, device_reads=0))
    True
    >>> waited(64, ThreadUse(10_000_000, 9_990_000, sleeps=0, device_reads=0))
    False
    """
    often = use.sleeps * _READS_PER_SLEEP > reads
    device = use.device_reads > 0 and (use.wall_ns - use.cpu_ns) * _OFF_CPU_PART >= use.wall_ns
    return slept(reads, use) and (often or device)


#: Number of samples whose reads are judged together.
_WINDOW_SAMPLES = 64
#: Number of recent windows remembered. Reads are intercepted while two of them had to wait for the
#: source: a single one may be chance.
_REMEMBERED_WINDOWS = 8
#: Samples between two measurements while reads are not intercepted, if samples are read singly.
_UNMEASURED_SAMPLES = 16


class Bypass:
    """Decides for one reader in one process, from the kernel's counters of its thread."""

    def __init__(self, *, allowed: bool) -> None:
        """`allowed`: False if every read must be intercepted."""
        self._allowed = allowed
        self.active = False
        self._slept = False  # in any read so far
        self._samples, self._use = 0, NO_USE  # of this window
        self._waited: deque[bool] = deque(maxlen=_REMEMBERED_WINDOWS)
        self._unmeasured = 0

    @property
    def undecided(self) -> bool:
        """Whether reads are intercepted only because too few were measured."""
        return self._allowed and not self.active and not self._slept

    @property
    def waits(self) -> bool:
        """Whether reads have to wait for the source, as far as is known; else False."""
        return not self._allowed or any(self._waited)

    def measures(self, samples: int) -> bool:
        """Whether to measure the next read of `samples` samples that is not intercepted."""
        self._unmeasured += samples
        if self._unmeasured < _UNMEASURED_SAMPLES:
            return False
        self._unmeasured = 0
        return True

    def saw(self, samples: int, use: ThreadUse) -> None:
        """Enter a read of `samples` samples and the resources its thread used."""
        self._slept |= slept(samples, use)
        self._samples += samples
        self._use += use
        if self._samples < _WINDOW_SAMPLES:
            return
        had_to_wait = waited(self._samples, self._use)
        self._samples, self._use = 0, NO_USE
        self._waited.append(had_to_wait)
        self.active = self._allowed and sum(self._waited) < 2 and (self.active or not had_to_wait)


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

    @property
    def supposes(self) -> bool:
        """Whether a quick source is only supposed: the daemon may read many neighbours at once."""
        return not self._own_ns

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
