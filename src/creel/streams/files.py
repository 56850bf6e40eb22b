"""Files of a log's chunks: scattered reads, second names, and holes in place of records."""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeAlias

from creel.system.transfers import transfer

#: Bytes to read: the number of their chunk, the first one's place in it, and where they go.
Piece: TypeAlias = tuple[int, int, Sequence[memoryview]]
#: The mode of a file of a deleted chunk, with records that stay and perhaps holes in place of the
#: others: a bit that means nothing else.
HOLES = stat.S_ISVTX
_PUNCH = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE


def read(fd: int, offset: int, buffers: Sequence[memoryview]) -> int | None:
    """Fill buffers from a byte of a file on; return the byte behind them, None if it has fewer."""
    nbytes = transfer(os.preadv, fd, buffers, offset)
    return offset + nbytes if nbytes == sum(map(len, buffers)) else None


def locked(path: str, flags: int = 0, *, waits: bool = True) -> int:
    """Open a file for writing, and lock it; `unlock` ends both. Unlocked where no locks exist.

    Args:
        flags: further ones of `os.open`; with O_CREAT, another file is made if this one was deleted
            as abandoned before it was locked.
        waits: while somebody else has it locked.

    Raises:
        OSError: it does not wait, and somebody else has it locked, or no locks exist.
    """
    import fcntl  # missing on Windows, which imports this module but never a stream

    while True:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except OSError:
            if not waits:
                os.close(fd)
                raise
        except BaseException:
            os.close(fd)
            raise
        if not flags or os.fstat(fd).st_nlink:
            return fd
        os.close(fd)


def unlock(fd: int) -> None:
    """Unlock and close a file, also for a child that was forked meanwhile and has it open."""
    import fcntl

    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def delete_if_abandoned(path: str) -> None:
    """Delete a file that nobody has locked, where locks exist: its writer has ended."""
    with suppress(OSError):
        fd = locked(path, waits=False)
        try:
            os.unlink(path)  # noqa: PTH108  quick
        finally:
            unlock(fd)


def linked(temporary: str, path: str) -> bool:
    """Give a file another name; False if there is one of that name."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    return True


def punch(fd: int, but: Sequence[tuple[int, int]]) -> None:
    """Mark a file as deleted but for some parts, in order; give back the whole blocks between them.

    Bytes that share a block with one of them stay. All do where the file system cannot give back
    blocks: NFS before 4.2, for example.
    """
    status = os.fstat(fd)
    block = status.st_blksize
    ends = [0, *(first + nbytes for first, nbytes in but)]
    starts = [*(first for first, _ in but), status.st_size]
    inside = [
        (-(-e // block) * block, s // block * block) for e, s in zip(ends, starts, strict=True)
    ]
    with suppress(OSError):
        os.fchmod(fd, status.st_mode | HOLES)  # first: nobody may take holes for records
        for first, stop in inside:
            if first < stop and ctypes.CDLL(None).fallocate(
                fd, _PUNCH, ctypes.c_int64(first), ctypes.c_int64(stop - first)
            ):
                break
