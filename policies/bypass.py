"""Whether a dataset is read without creel because its source makes nobody wait. Pure.

Intercepting each file that a sample opens costs some microseconds. A file in the page cache never
wins that time back. So creel does not intercept the reads of a thread that does not sleep while it
reads, and measures from time to time whether that still holds.
"""

from __future__ import annotations

from collections import deque

from creel.policies.thread_use import NO_USE, ThreadUse, slept, waited

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
