"""Per-thread state of reads, and the system resources that a thread has used."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from creel.policies.thread_use import ThreadUse

if TYPE_CHECKING:
    from resource import struct_rusage

    from creel.loader.reading.lease import Lease
    from creel.loader.reading.observed import ObservedReads


class ThisThread(threading.local):
    """State of each thread."""

    lease: Lease | None = None
    observed: ObservedReads | None = None
    intercepts = False  # whether opens by code other than creel's are intercepted


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
