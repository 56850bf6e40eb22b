"""Whose read it is, and the system resources that a thread has used.

What belongs to a sample is in context variables, which threads have too that asyncio starts for it
(`asyncio.to_thread`, an event loop). A thread without any, as of a library in C, reads for the only
sample that this process is reading (`reader`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from typing import TYPE_CHECKING, Any, Protocol

from creel.policies.direct import ThreadUse
from creel.system.forks import at_fork

if TYPE_CHECKING:
    import os
    from resource import struct_rusage

    from creel.cache.storage.stores.access import Options
    from creel.loader.data.reading.lease import Lease
    from creel.loader.data.reading.read_counts import PartialRead, ThreadReads


#: One read of a thread: an address; an object of a leaf as (id(leaf), object number); or units
#: of a file as (address, first unit, number of units, bytes of the file), where the number of units
#: is negative if an earlier sample had opened the file.
Asked = str | tuple[int, int] | tuple[str, int, int, int]
#: In place of a folder's descriptor: relative to the working directory (AT_FDCWD of Linux).
AT_CWD = -100


class ReadRecord(Protocol):
    """What records a thread's reads (`tracing/observed` for `creel.wrap`, `reading/inputs`)."""

    thread: ThreadReads

    @property
    def sample(self) -> int:
        """A number that differs from sample to sample; 0: no parts of files are recorded."""
        ...

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
        self, path: str, status: os.stat_result, now_ns: int, *, again: bool = False
    ) -> PartialRead | None:
        """Record an opened file; return where its reads are recorded, None if nowhere.

        again: an earlier sample has opened it.
        """
        ...

    def opened_remote(
        self, address: str, nbytes: int, options: Options, /, *, again: bool
    ) -> PartialRead | None:
        """`opened`, for a file of `nbytes` bytes that is read with these options of its store."""
        ...

    def waited(self, took: int) -> bool:
        """Whether the storage made this thread wait in an open of `took` ns."""
        ...


_lease: ContextVar[Lease | None] = ContextVar("creel_lease", default=None)
_observed: ContextVar[ReadRecord | None] = ContextVar("creel_observed", default=None)
_intercepts: ContextVar[bool] = ContextVar("creel_intercepts", default=False)
#: The contexts of the samples of users' datasets that are being read, by thread.
_reading: dict[int, Context] = {}


class ThisThread(threading.local):
    """State of each thread, and of the sample that it reads."""

    latest = ""  # address that the present sample opened last, cached or not, if it is recorded
    #: The folder's descriptor (or `AT_CWD`) of the `os.open` that is running; None outside.
    folder_fd: int | None = None

    @property
    def lease(self) -> Lease | None:
        """What serves the thread's reads."""
        return _lease.get()

    @lease.setter
    def lease(self, lease: Lease | None) -> None:
        _lease.set(lease)

    @property
    def observed(self) -> ReadRecord | None:
        """What records the thread's reads."""
        return _observed.get()

    @observed.setter
    def observed(self, observed: ReadRecord | None) -> None:
        _observed.set(observed)
        if threading.get_ident() in _reading:
            self.begins()

    @property
    def intercepts(self) -> bool:
        """Whether opens by code other than creel's are intercepted."""
        return _intercepts.get()

    @intercepts.setter
    def intercepts(self, intercepts: bool) -> None:
        _intercepts.set(intercepts)

    def begins(self) -> None:
        """Note that this thread reads samples of a user's dataset."""
        _reading[threading.get_ident()] = copy_context()

    def ends(self) -> None:
        _reading.pop(threading.get_ident(), None)


this_thread = ThisThread()


def only_sample() -> Context | None:
    """Return the context of the only sample that is being read, by another thread; else None."""
    with suppress(RuntimeError, ValueError):  # another thread begins or ends one
        ((thread, sample),) = _reading.items()
        return None if thread == threading.get_ident() else sample
    return None


def reads_for_nobody() -> bool:
    """Whether this thread has been started neither for a sample nor by creel to read one."""
    return _lease.get() is None and _observed.get() is None


def reader() -> tuple[Lease | None, ReadRecord | None]:
    """Return lease and record of the sample that this thread reads a file for."""
    lease, observed = _lease.get(), _observed.get()
    if lease is None and observed is None:
        sample = only_sample()
        if sample is not None:
            return sample.get(_lease), sample.get(_observed)
    return lease, observed


at_fork(after_in_child=_reading.clear)


def usage() -> struct_rusage:
    """Return the system's resource usage of this thread."""
    import resource  # missing on Windows, where this module is imported too

    return resource.getrusage(resource.RUSAGE_THREAD)


def thread_use() -> ThreadUse:
    """Return what this thread has used so far."""
    counts = usage()
    reads = counts.ru_inblock + counts.ru_majflt
    return ThreadUse(time.monotonic_ns(), time.thread_time_ns(), counts.ru_nvcsw, reads)
