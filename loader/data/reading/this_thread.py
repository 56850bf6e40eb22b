"""Per-thread state of reads, and the system resources that a thread has used."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from creel.policies.thread_use import ThreadUse

if TYPE_CHECKING:
    import os
    from resource import struct_rusage

    from creel.loader.data.reading.lease import Lease
    from creel.loader.data.reading.read_counts import PartialRead, ThreadReads
    from creel.loader.data.reading.storage import Options


#: One read of a thread: an address; an object of a leaf as (id(leaf), object number); or a small
#: part of a file as (address, bytes that were read, bytes of the file).
Asked = str | tuple[int, int] | tuple[str, int, int]
#: In place of a folder's descriptor: relative to the working directory (AT_FDCWD of Linux).
AT_CWD = -100


class ReadRecord(Protocol):
    """What records a thread's reads (`tracing/observed` for `creel.wrap`, `reading/inputs`)."""

    thread: ThreadReads

    def add(self, asked: Asked, /) -> None:
        """Record a successful read."""
        ...

    def add_address(self, address: str, options: Options, /) -> None:
        """Record the read of an address with these options of its store."""
        ...

    def opens(self, path: Any, /) -> None:
        """Note a file or folder that is about to be read, by its path as it was given."""
        ...

    def opens_in_c(self, path: Any, /) -> None:
        """Note what a library in C is about to open: if it is a folder, any file in it."""
        ...

    def looks_for(self, path: Any, folder_fd: int | None, /, *, follows: bool) -> None:
        """Note a path whose status is about to be asked for.

        Args:
            folder_fd: an open folder that the path is relative to; None: the working directory.
            follows: whether a link is followed.
        """
        ...

    def inherit(self, inputs: Sequence[Sequence[Any]], owner: int, number: int, /) -> None:
        """Note what a kept sample was made of: sample `number` of the dataset with id `owner`."""
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
    #: The folder's descriptor (or `AT_CWD`) of the `os.open` that is running; None outside.
    folder_fd: int | None = None


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
