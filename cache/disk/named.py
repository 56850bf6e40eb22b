"""Decoded samples that a person gave a name, in the folder of a disk tier, for later jobs.

The file KEY is a store of the loader (`data/decoded/stores/named_store.py`); KEY.json says of what.
The key covers all that is known of how samples are made; several keys may have one name.
"""

from __future__ import annotations

import json
import os
import secrets
import struct
from contextlib import suppress
from typing import Any, NamedTuple

from creel.cache.disk.folder import locked, subfolder

_FOLDER, _ABOUT, _NEW = "decoded", ".json", "new."
#: At most so many keys of one name; beyond that, those that were used last stay.
_MOST = 4
#: The words of a store that a list shows: bytes (the second), samples (the third).
_SHOWN = struct.Struct("<qqq")


class Named(NamedTuple):
    """What is kept under a name.

    Attributes:
        key: the file.
        name, dataset: as the person and the code call it.
        samples: how many the dataset has; `kept`: how many of them are there, in `nbytes`.
        used: when a job last began to use it, seconds since the epoch.
    """

    key: str
    name: str
    dataset: str
    samples: int
    kept: int
    nbytes: int
    used: float


def open_samples(path: str, key: str, about: dict[str, Any], begin: bytes, nbytes: int) -> int:
    """Return a descriptor of the file `key`, for reading and writing; make it if there is none.

    Args:
        about: what `listed` says of it: its name, dataset and number of samples.
        begin: first bytes of a new file, `nbytes` of which are allocated.

    Raises:
        OSError: it cannot be opened, or there is no room.
    """
    with subfolder(path, _FOLDER) as folder:
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        with suppress(FileNotFoundError):
            fd = os.open(key, flags, dir_fd=folder)
            os.utime(fd)
            return fd
        new = _new()
        fd = os.open(new, flags | os.O_CREAT | os.O_TRUNC, 0o600, dir_fd=folder)
        try:
            os.posix_fallocate(fd, 0, nbytes)
            os.pwrite(fd, begin, 0)
            _write(folder, key + _ABOUT, json.dumps(about).encode())
            with suppress(FileExistsError):  # another process was first
                os.link(new, key, src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            os.close(fd)
            os.unlink(new, dir_fd=folder)
        older = [
            named for named in _listed(folder) if named.name == about["name"] and named.key != key
        ]
        for named in sorted(older, key=lambda named: named.used)[: max(len(older) + 1 - _MOST, 0)]:
            _remove(folder, named.key, unused=True)
        return os.open(key, flags, dir_fd=folder)


def listed(path: str) -> list[Named]:
    """Return what is kept, used last first.

    Raises:
        OSError: the folder cannot be read.
    """
    with subfolder(path, _FOLDER) as folder:
        return sorted(_listed(folder), key=lambda named: -named.used)


def drop(path: str, key: str) -> None:
    """Remove a file; processes that use it do so until they end.

    Raises:
        OSError: it cannot be removed.
    """
    with subfolder(path, _FOLDER) as folder:
        _remove(folder, key)


def _new() -> str:
    """Return a name for a file that is being written; containers may share numbers of processes."""
    return f"{_NEW}{secrets.token_hex(8)}"


def _listed(folder: int) -> list[Named]:
    listing = []
    for file in os.listdir(folder):
        key = file.removesuffix(_ABOUT)
        with suppress(OSError, ValueError, KeyError, TypeError, struct.error):  # removed meanwhile
            if key != file:
                about = json.loads(_read(folder, file, 1 << 16))
                status = os.stat(key, dir_fd=folder)
                kept = _SHOWN.unpack(_read(folder, key, _SHOWN.size))[2]
                listing.append(
                    Named(
                        key,
                        about["name"],
                        about["dataset"],
                        about["samples"],
                        kept,
                        status.st_blocks * 512,
                        status.st_mtime,
                    )
                )
    return listing


def _read(folder: int, file: str, nbytes: int) -> bytes:
    fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        return os.read(fd, nbytes)
    finally:
        os.close(fd)


def _write(folder: int, file: str, data: bytes) -> None:
    new, flags = _new(), os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with os.fdopen(os.open(new, flags | os.O_NOFOLLOW, 0o600, dir_fd=folder), "wb") as out:
        out.write(data)
    os.replace(new, file, src_dir_fd=folder, dst_dir_fd=folder)


def _remove(folder: int, key: str, *, unused: bool = False) -> None:
    """Remove a file; `unused`: unless a job has it (`claim`)."""
    with suppress(FileNotFoundError):
        fd = os.open(key, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            if not (unused and not claim(fd)):
                os.unlink(key, dir_fd=folder)
                os.unlink(key + _ABOUT, dir_fd=folder)
        finally:
            os.close(fd)


def claim(fd: int) -> bool:
    """Claim a file until this process and its forks have closed `fd`; False if another one has."""
    try:
        return locked(fd)
    except OSError:
        return False
