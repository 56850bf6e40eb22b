"""Whether a dataset is read past creel, because its source makes nobody wait. Pure.

Looking at every file that samples open costs some microseconds each, which a file out of the page
cache never gives back. So a reader whose thread does not sleep while it reads is left alone; from
time to time it is looked at whether that is still so.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

#: Number of samples whose reads are judged together.
_WINDOW_SAMPLES = 64
#: A dataset is not left alone while two of its last windows had to wait: one may be chance. This is
#: how many windows are remembered.
_REMEMBERED_WINDOWS = 8
#: A window waits for its source where its thread sleeps for every fourth sample or more often ...
_SAMPLES_PER_SLEEP = 4
#: ... or for this part of its time and a device was read: a file can have many samples;
_OFF_CPU_PART = 10
#: in both cases for longer than threads wait for each other (the interpreter's lock: some 100 us a
#: batch): ns a sample. A file system that answers at once takes 50 us.
_OFF_CPU_NS = 20_000
#: Samples from one measurement to the next while reads go past creel, if they are read singly.
_UNMEASURED_SAMPLES = 16


class ThreadUse(NamedTuple):
    """What a thread has used: times in ns."""

    wall_ns: int
    cpu_ns: int
    sleeps: int  # how often it gave up the processor by itself
    device_reads: int  # blocks read, and pages of mapped files

    def __sub__(self, other: ThreadUse) -> ThreadUse:
        """From `other` to this."""
        return ThreadUse(*(now - then for now, then in zip(self, other, strict=True)))

    def __add__(self, other: tuple[int, ...]) -> ThreadUse:  # type: ignore[override]  # no tuple
        """Both together."""
        return ThreadUse(*(one + more for one, more in zip(self, other, strict=True)))


_NOTHING = ThreadUse(0, 0, 0, 0)


class Bypass:
    """The choice of one reader in one process, from what the kernel counts of its thread."""

    def __init__(self, *, allowed: bool) -> None:
        """`allowed`: False where every read is to be looked at."""
        self._allowed = allowed
        self.active = False
        self._slept = False  # in any read so far
        self._samples, self._use = 0, _NOTHING  # of this window
        self._waited: deque[bool] = deque(maxlen=_REMEMBERED_WINDOWS)
        self._unmeasured = 0

    @property
    def undecided(self) -> bool:
        """Whether reads are looked at only because too few were seen."""
        return self._allowed and not self.active and not self._slept

    def measures(self, samples: int) -> bool:
        """Whether the next read past creel, of `samples` samples, is to be measured."""
        self._unmeasured += samples
        if self._unmeasured < _UNMEASURED_SAMPLES:
            return False
        self._unmeasured = 0
        return True

    def saw(self, samples: int, use: ThreadUse) -> None:
        """Enter a read of `samples` samples, and what its thread used for it."""
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
    """Whether a thread slept for longer than for other threads."""
    return use.sleeps > 0 and use.wall_ns - use.cpu_ns >= samples * _OFF_CPU_NS


def _waited(samples: int, use: ThreadUse) -> bool:
    """Whether a window had to wait for its source."""
    often = use.sleeps * _SAMPLES_PER_SLEEP >= samples
    device = use.device_reads > 0 and (use.wall_ns - use.cpu_ns) * _OFF_CPU_PART >= use.wall_ns
    return _slept(samples, use) and (often or device)
