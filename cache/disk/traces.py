"""Access traces of datasets, kept in the folder of a disk tier for later jobs.

The loader chooses the contents and the name of a trace (`data/tracing/recording.py`). The file is
named after the trace and the key of the dataset it leads to; dropping the dataset removes it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from creel.cache.disk.folder import subfolder

_FOLDER = "traces"
#: Most traces in a folder; beyond that, the least recently used ones are removed.
_MOST = 16
_NEW = "new."  # prefix of the name of a trace that is being written


def open_trace(path: str, name: str) -> int:
    """Return a descriptor for reading the trace of this name.

    Raises:
        OSError: there is no such trace.
    """
    with subfolder(path, _FOLDER) as folder:
        found = next((one for one in os.listdir(folder) if one.startswith(f"{name}.")), name)  # noqa: PTH208  a descriptor
        fd = os.open(found, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        with suppress(OSError):
            os.utime(fd)
        return fd


def keep_trace(path: str, name: str, dataset: str, trace: bytes, keep_free: int) -> None:
    """Keep the trace of this name, in place of an earlier one.

    `dataset`: key of the dataset to which the trace leads.
    `keep_free`: bytes that must stay free on the disk; if they would not, nothing is kept.

    Raises:
        OSError: the trace cannot be written.
    """
    disk = os.statvfs(path)
    if disk.f_bavail * disk.f_frsize - len(trace) < keep_free:
        return
    with subfolder(path, _FOLDER) as folder:
        new, flags = f"{_NEW}{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        with os.fdopen(os.open(new, flags | os.O_NOFOLLOW, 0o600, dir_fd=folder), "wb") as out:
            out.write(trace)
        kept = f"{name}.{dataset}"
        os.replace(new, kept, src_dir_fd=folder, dst_dir_fd=folder)
        _unlink(folder, lambda one: one.startswith(f"{name}.") and one != kept)
        used = {}
        for one in os.listdir(folder):  # noqa: PTH208  a descriptor
            with suppress(FileNotFoundError):  # another process has removed it
                if not one.startswith(_NEW):
                    used[one] = os.stat(one, dir_fd=folder).st_mtime_ns
        unused = sorted(used, key=used.__getitem__)[:-_MOST]
        _unlink(folder, lambda one: one in unused)


def drop_traces(path: str, dataset: str) -> None:
    """Remove the traces that lead to a dataset.

    Raises:
        OSError: a trace cannot be removed.
    """
    with subfolder(path, _FOLDER) as folder:
        _unlink(folder, lambda one: one.endswith(f".{dataset}"))


def _unlink(folder: int, unwanted: Callable[[str], bool]) -> None:
    for one in filter(unwanted, os.listdir(folder)):
        with suppress(FileNotFoundError):  # another process has removed it
            os.unlink(one, dir_fd=folder)
