"""Whether a thread had to wait for the source of what it read, by the kernel's counters. Pure.

Two ask: a loader's reader, after each batch that it read directly (`direct`), and a wrapped dataset
that no daemon serves yet (`bypass`). What the kernel can say before anything is read is asked once
an epoch (`loader.page_cache`).
"""

from __future__ import annotations

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
        return ThreadUse(*(one + more for one, more in zip(self, other, strict=True)))


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
