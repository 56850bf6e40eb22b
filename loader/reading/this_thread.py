"""What holds for the reads of the current thread, and what it has used so far."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from creel.policies.bypass import ThreadUse

if TYPE_CHECKING:
    from resource import struct_rusage

    from creel.loader.reading.lease import Lease
    from creel.loader.reading.observed import ObservedReads


class ThisThread(threading.local):
    """The state of each thread."""

    lease: Lease | None = None
    observed: ObservedReads | None = None
    intercepts = False  # whether opens by code that is not creel's are looked at (`intercept`)


this_thread = ThisThread()


def usage() -> struct_rusage:
    """What the system counts of this thread."""
    import resource  # there is none on Windows, where this module is imported, too

    return resource.getrusage(resource.RUSAGE_THREAD)


def thread_use() -> ThreadUse:
    """What this thread has used so far."""
    counts = usage()
    reads = counts.ru_inblock + counts.ru_majflt
    return ThreadUse(time.monotonic_ns(), time.thread_time_ns(), counts.ru_nvcsw, reads)
