"""Whether a dataset is read without creel because its source makes nobody wait. Pure.

Intercepting each file that a sample opens costs some microseconds. A file in the page cache never
wins that time back. So creel does not intercept the reads of a thread that does not sleep while it
reads, and measures from time to time whether that still holds.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

#: Number of samples whose reads are judged together.
_WINDOW_SAMPLES = 64
#: Number of recent windows remembered. Reads are intercepted while two of them had to wait for the
#: source: a single one may be chance.
_REMEMBERED_WINDOWS = 8
#: A window waited for its source if its thread slept at least once in four samples ...
_SAMPLES_PER_SLEEP = 4
#: ... or slept for this part (1/n) of its time and a device was read: a file may hold many samples;
_OFF_CPU_PART = 10
#: in both cases only if it slept longer than this many ns per sample. Threads wait some 100 us per
#: batch for the interpreter's lock; a file system that answers at once takes 50 us.
_OFF_CPU_NS = 20_000
#: Samples between two measurements while reads are not intercepted, if samples are read singly.
_UNMEASURED_SAMPLES = 16


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
        return ThreadUse(*(one + more for one, more in zip(self, other, strict=True)))


_NOTHING = ThreadUse(0, 0, 0, 0)


class Bypass:
    """Decides for one reader in one process, from the kernel's counters of its thread."""

    def __init__(self, *, allowed: bool) -> None:
        """`allowed`: False if every read must be intercepted."""
        self._allowed = allowed
        self.active = False
        self._slept = False  # in any read so far
        self._samples, self._use = 0, _NOTHING  # of this window
        self._waited: deque[bool] = deque(maxlen=_REMEMBERED_WINDOWS)
        self._unmeasured = 0

    @property
    def undecided(self) -> bool:
        """Whether reads are intercepted only because too few were measured."""
        return self._allowed and not self.active and not self._slept

    def measures(self, samples: int) -> bool:
        """Whether to measure the next read of `samples` samples that is not intercepted."""
        self._unmeasured += samples
        if self._unmeasured < _UNMEASURED_SAMPLES:
            return False
        self._unmeasured = 0
        return True

    def saw(self, samples: int, use: ThreadUse) -> None:
        """Enter a read of `samples` samples and the resources its thread used."""
        self._slept |= _slept(samples, use)
        self._samples += samples
        self._use += use
        if self._samples < _WINDOW_SAMPLES:
            return
        waited = _waited(self._samples, self._use)
        self._samples, self._use = 0, _NOTHING
        self._waited.append(waited)
        self.active = self._allowed and sum(self._waited) < 2 and (self.active or not waited)


def _slept(samples: int, use: ThreadUse) -> bool:
    """Whether a thread slept longer than it would for other threads."""
    return use.sleeps > 0 and use.wall_ns - use.cpu_ns >= samples * _OFF_CPU_NS


def _waited(samples: int, use: ThreadUse) -> bool:
    """Whether a window had to wait for its source."""
    often = use.sleeps * _SAMPLES_PER_SLEEP >= samples
    device = use.device_reads > 0 and (use.wall_ns - use.cpu_ns) * _OFF_CPU_PART >= use.wall_ns
    return _slept(samples, use) and (often or device)
