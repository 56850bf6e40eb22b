"""Per-thread state of reads, and the system resources that a thread has used."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Protocol

from creel.policies.thread_use import ThreadUse

if TYPE_CHECKING:
    import os
    from resource import struct_rusage

    from creel.loader.reading.lease import Lease
    from creel.loader.reading.read_counts import PartialRead, ThreadReads
    from creel.loader.reading.storage import Options


class ReadRecord(Protocol):
    """What records a thread's reads (`creel.loader.tracing.observed`)."""

    options: Options
    thread: ThreadReads

    def add(self, asked: str | tuple[int, int] | tuple[str, int, int], /) -> None:
        """Record the read of an address, of an object of a leaf by (id(leaf), number), or of a part
        of a file: address, bytes read, bytes in all."""
        ...

    def opened(
        self, path: str, status: os.stat_result, now_ns: int, waited_ns: int = 0
    ) -> PartialRead | None:
        """Record an opened file; return where its reads are counted, None if nowhere."""
        ...

    def waited(self, took: int) -> bool:
        """Whether the storage made this thread wait in an open of `took` ns."""
        ...


class ThisThread(threading.local):
    """State of each thread."""

    lease: Lease | None = None
    observed: ReadRecord | None = None
    intercepts = False  # whether opens by code other than creel's are intercepted
    latest = ""  # address that the present sample opened last, cached or not, if it is recorded


this_thread = ThisThread()


def usage() -> struct_rusage:
    """Return the system's resource usage of this thread."""
    import resource  # missing on Windows, where this module is imported too

    return resource.getrusage(resource.RUSAGE_THREAD)


def thread_use() -> ThreadUse:
    """Return what this thread has used so far."""
    counts = usage()
    reads = counts.ru_inblock + counts.ru_majflt
    return ThreadUse(time.monotonic_ns(), time.thread_time_ns(), counts.ru_nvcsw, reads)
