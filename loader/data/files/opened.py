"""creel.open and creel.read: the bytes at an address, from the cache if they are there.

For use in a dataset's own `__getitem__`. The cache serves addresses that the dataset declares, or
that it was seen to read before (see `data.binding`). Every other address is read directly.
A thread's *lease* (`lease.Lease`) says what it may read from the cache now: the objects of its
step.
"""

from __future__ import annotations

import builtins
import io
import os
import stat
import time
from functools import partial
from typing import IO, TYPE_CHECKING, Any, cast

from creel.cache.memory.memfd import Descriptor
from creel.cache.storage.lookup import read_all
from creel.cache.storage.stores.access import Options
from creel.cache.storage.stores.store import read_ahead
from creel.cache.storage.uris import absolute, absolute_path, is_local, scheme_of
from creel.errors import ConfigError
from creel.loader.data.files.block_files import held, taken_over
from creel.loader.data.files.file_objects import in_memory
from creel.loader.data.reading.observer import find, take_address
from creel.loader.data.reading.read_counts import os_open
from creel.loader.data.reading.this_thread import reader, this_thread
from creel.system.python_open import python_open

if TYPE_CHECKING:
    from creel.loader.data.reading.read_counts import PartialRead

#: Files in these folders change without a change of their status.
NO_FILES = ("/proc/", "/sys/", "/dev/")
#: Copying all of a file of at most this many bytes costs no more than opening it.
SMALL = 1 << 16
#: An open within this time did not wait: from the page cache h5py.File takes 100 us, os.open 5.
QUICK_OPEN_NS = 200_000
#: Bytes that the kernel reads ahead of an opened file while the open is being recorded.
_AHEAD_NBYTES = 128 << 10


def read(uri: str | os.PathLike[str], *, storage_options: Options = None) -> bytes:
    """Return all bytes of a file, from the cache if they are there.

    Args:
        uri: a path, or an address such as "s3://bucket/key".
        storage_options: of the client that reads a remote file, in fsspec's convention (`key`,
            `secret`, `endpoint_url`, ...); what they leave open, the environment decides. The
            cache has what was read with the options of its dataset.

    Raises:
        OSError: as Python's `open` for a local file; SourceError (an OSError) for a remote one.
    """
    address = _announced(uri)
    direct = partial(read_all, options=storage_options)
    return take_address(address, find(address, storage_options), direct, storage_options)


def open(  # noqa: A001  creel.open
    uri: str | os.PathLike[str], mode: str = "rb", *, storage_options: Options = None
) -> IO[bytes]:
    """Open a file for reading bytes, from the cache if they are there.

    A local file that is not in the cache is opened as the real file (with a descriptor, so that it
    can be mapped). Everything else is a copy in memory, without a descriptor.

    Args:
        uri: a path, or an address such as "s3://bucket/key".
        mode: "rb", the only one.
        storage_options: as for `read`.

    Raises:
        ConfigError: another mode.
        OSError: as Python's `open` for a local file; SourceError (an OSError) for a remote one.
    """
    if mode != "rb":
        raise ConfigError(f"creel.open reads bytes: its mode is 'rb', not {mode!r}")
    address = _announced(uri)
    number = find(address, storage_options)
    if number is None and not scheme_of(address):
        return open_local(address)
    direct = partial(read_all, options=storage_options)
    data = take_address(address, number, direct, storage_options)
    return io.BufferedReader(in_memory(data, address))


def _announced(uri: str | os.PathLike[str]) -> str:
    """Return the address, and note that it is about to be read: a relative path is one of now."""
    address, observed = absolute(uri), this_thread.observed
    if observed is not None and is_local(address):
        given = os.fspath(uri)
        observed.opens(address if "://" in given else os.path.expanduser(given))  # noqa: PTH111
    return address


def open_local(path: str) -> IO[bytes]:
    """Open the real file, observed if this thread's reads are being recorded."""
    file: IO[bytes] = open_in_blocks(path) or observed_file(python_open(path, "rb"), path)
    return file


def open_served(path: str, buffering: int = -1) -> IO[bytes] | None:
    """`open_local` for a library that would open the path itself; None where it is to do so.

    buffering: 1 for a library that knows what it needs. Each `read` then asks the system once for
    just these bytes, as the library would: Python's usual buffer asks twice, and for more. A buffer
    of one byte keeps nothing, and reads on after the system has returned less than was asked for,
    as FileIO does not.
    """
    file: IO[bytes] | None = open_in_blocks(path, buffering=buffering)
    observed = this_thread.observed
    if file is not None or observed is None or not observed.sample:
        return file
    try:
        raw: Any = python_open(path, "rb", 0)
    except OSError:  # the library raises its own
        return None
    size = raw._blksize if buffering < 0 else buffering  # noqa: SLF001  Python's choice
    return cast("IO[bytes]", observed_file(io.BufferedReader(raw, size), path, buffering=buffering))


def open_in_blocks(
    address: str, name: Any = None, buffering: int = -1, *, whole: bool = False
) -> Any:
    """Return a file of which blocks are in the cache, not opened at the source yet; else None.

    `name`, `buffering`: as given to `open`. `whole`: also a file that is there as one object.
    """
    lease = reader()[0]
    if lease is None or not lease.serves:
        return None
    if not lease.in_blocks(address) and not (whole and lease.find(address) is not None):
        return None
    try:
        descriptor = Descriptor(os_open(address, os.O_PATH | os.O_CLOEXEC))
    except OSError:  # opening it then raises the error
        return None
    if not cacheable(os.fstat(descriptor.fd), address):
        return None
    this_thread.latest = address
    return held(descriptor, address, address if name is None else os.fspath(name), buffering)


def open_blocks(address: str) -> Any:
    """Open a file that is read in blocks, whoever opens it, for samples that read it later."""
    held_file = open_in_blocks(address, whole=True)
    return held_file or taken_over(python_open(address, "rb"), address, -1)


def observed_file(real: Any, address: str, *, buffering: int = -1) -> Any:
    """Wrap a file just opened so that its reads are recorded, if this thread is being recorded.

    `buffering`: as given to `open`.
    """
    observed = this_thread.observed
    if observed is None:
        return real
    this_thread.latest = address
    fd, now_ns = real.fileno(), time.time_ns()
    status = os.fstat(fd)
    if not cacheable(status, address):
        return real
    read_ahead(fd, min(status.st_size, _AHEAD_NBYTES), status.st_dev)  # the kernel reads meanwhile
    part = observed.opened(address, status, now_ns)
    return real if part is None else taken_over(real, address, buffering, observed.sample, part)


#: Status of a file, and when it was asked for (`time.time_ns`).
DatedStat = tuple[os.stat_result, int]


def dated_stat(file: int | str) -> DatedStat | None:
    """Return the status of a file, by descriptor or path; None if unreadable or unrecorded.

    Called just before a library opens the file: a network file system then answers the library from
    its cache.
    """
    if this_thread.observed is None:
        return None
    now_ns = time.time_ns()
    try:
        return os.stat(file), now_ns  # noqa: PTH116
    except OSError:
        return None


def opened_part(stat: DatedStat | None, address: str) -> PartialRead | None:
    """Record that a file was opened; return where its reads are counted, None if nowhere.

    `stat`: the result of `dated_stat` for the file.
    """
    observed = this_thread.observed
    if observed is None or stat is None:
        return None
    this_thread.latest = address
    if not cacheable(stat[0], address):
        return None
    return observed.opened(address, *stat)


def cacheable(status: os.stat_result, address: str) -> bool:
    """Whether this is a regular file with bytes. An empty one may be a lock: never cached."""
    regular = stat.S_ISREG(status.st_mode) and status.st_size > 0
    return regular and not address.startswith(NO_FILES)


def open_as_python(file: Any, mode: str = "r", *args: Any, **more: Any) -> Any:
    """Python's `open`, but local files opened with "rb" go through `open` during a lease or record.

    It replaces `open` in modules whose file reads creel serves.
    """
    plain = mode != "rb" or args or more or not isinstance(file, (str, os.PathLike))
    idle = this_thread.lease is None and this_thread.observed is None
    if plain or idle or "://" in os.fspath(file):
        return builtins.open(file, mode, *args, **more)  # noqa: PTH123  the caller closes it
    return open(file)


# --- files that user code opens itself ----------------------------------------------------------


def local_address(file: object) -> str | None:
    """Return the cache's address of `file`; None if it is not the plain path of a file.

    >>> local_address("/data/./a//b"), local_address(b"/data/a"), local_address("/data/")
    ('/data/a/b', '/data/a', None)
    """
    if type(file) is not str:
        if isinstance(file, (bytes, os.PathLike)):
            file = os.fsdecode(file)
        if not isinstance(file, str):
            return None
    if not file:
        return None
    if file[0] == "/" and "//" not in file and "/." not in file and file[-1] != "/":
        return file  # the usual case
    if file[-1] == "/" or "://" in file or "\0" in file:
        return None
    return absolute_path(file)
