"""Find files in the page cache, where reading costs no more than from creel's cache.

A loader asks before each epoch (`page_cached` in `line/batches/state.py`). A wrapped dataset below
torch's own loader asks before it connects (`daemon_not_worth_it` in `data/binding/daemon_link.py`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from creel.system.python_open import bytes_of

#: Local file systems. Those on a disk keep files in the page cache, and can say whether a read
#: would wait; those in memory never wait. All others count as slow.
_ON_DISK = frozenset({"ext2", "ext3", "ext4", "f2fs", "xfs"})
_IN_MEMORY = frozenset({"ramfs", "tmpfs"})
#: Others of this machine, of which the page cache has what was read before.
_OTHERS = frozenset({"bcachefs", "btrfs", "overlay", "zfs"})
#: One file in this many may be missing from the page cache.
_FEW = 32


class _Mount(NamedTuple):
    at: str  # mount point, ending in a slash
    kind: str
    device: int


_NOWHERE = _Mount("", "", -1)


def in_page_cache(paths: Sequence[str]) -> bool:
    """Whether the first and last bytes of nearly all these files can be read without waiting.

    The kernel may have evicted one file in 32: waiting for a few takes less time than copying all.
    False for a file that is not on a local file system. Such a file is not opened, since that costs
    its server something.
    """
    mounts, left = _mounts(), len(paths) // _FEW
    for path in paths:
        left -= not _cached(path, mounts)
        if left < 0:
            return False
    return bool(mounts)


def local(path: str) -> bool:
    """Whether a folder is on a local file system, in memory or on a disk."""
    try:
        mount = _mount_of(f"{path}/", _mounts())
        return mount.kind in _ON_DISK | _IN_MEMORY and os.stat(path).st_dev == mount.device  # noqa: PTH116  a string
    except (OSError, ValueError):
        return False


def remote(path: str) -> bool:
    """Whether a file is on a network file system or one in user space, as far as is known."""
    kind = kind_of(path)
    return bool(kind) and kind not in _ON_DISK | _IN_MEMORY | _OTHERS


def kind_of(path: str) -> str:
    """Return the kind of file system on which a path is; "" if it is not known."""
    return _mount_of(path, _mounts()).kind


def _mount_of(path: str, mounts: list[_Mount]) -> _Mount:
    below = (mount for mount in reversed(mounts) if path.startswith(mount.at))  # latest first
    return next(below, _NOWHERE)


def _cached(path: str, mounts: list[_Mount]) -> bool:
    mount = _mount_of(path, mounts)
    if mount.kind not in _ON_DISK | _IN_MEMORY:
        return False
    try:
        name = os.open(path, os.O_PATH | os.O_CLOEXEC)  # O_PATH opens nothing
        try:
            status = os.fstat(name)
            if status.st_dev != mount.device:  # a link led to another file system
                return False
            return mount.kind in _IN_MEMORY or _readable_now(name, status.st_size)
        finally:
            os.close(name)
    except (OSError, ValueError, AttributeError):  # not a path, or Python has no RWF_NOWAIT
        return False


def _readable_now(name: int, nbytes: int) -> bool:
    """Whether the first and last byte of a file are in memory.

    Raises:
        OSError: the file system does not say.
    """
    fd = os.open(f"/proc/self/fd/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return all(cached_at(fd, at) for at in ({0, nbytes - 1} if nbytes else ()))
    finally:
        os.close(fd)


def cached_at(fd: int, at: int) -> bool:
    """Whether a byte of a file is in memory.

    Raises:
        OSError: the file system does not say, as NFS and FUSE.
    """
    try:
        return os.preadv(fd, [bytearray(1)], at, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False


def _mounts() -> list[_Mount]:
    """Return this process's mounts in the order they were made; [] if the system does not tell."""
    try:
        return _parsed(bytes_of("/proc/self/mountinfo"))
    except OSError:
        return []


@lru_cache(maxsize=1)  # parsing takes ten times as long as reading
def _parsed(mountinfo: bytes) -> list[_Mount]:
    mounts = []
    for line in os.fsdecode(mountinfo).splitlines():
        before, _, after = line.partition(" - ")
        _, _, device, _, at, *_ = before.split(" ")
        number = os.makedev(*map(int, device.split(":")))
        mounts.append(_Mount(_unescaped(at).rstrip("/") + "/", after.split(" ")[0], number))
    return mounts


def _unescaped(name: str) -> str:
    """Decode a name from /proc, which has blanks and backslashes in octal.

    >>> _unescaped("/mnt/a\\040b")
    '/mnt/a b'
    """
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), name)
