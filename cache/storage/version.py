"""Versions: numbers that differ if the bytes of a file may differ. Pure.

A version is not derived from the bytes: equal versions of one address mean that the storage knows
of no change in between. Locally it is made from stat, remotely from the storage's own tag (ETag,
generation), or else from time and size.

The upper bits of a version are the same on all nodes that mount the storage (`shared`). The lower
bits come from inode and device, which each node may number differently.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from creel.policies.arrays import Ints, Mask

if TYPE_CHECKING:
    import os

#: The storage gives no version.
UNKNOWN = 0
#: The file changed so recently that another change might not show: differs even from itself.
CHANGING = -1
#: The file is absent or not readable.
MISSING = -2

#: Two writes within one tick of the kernel's clock (10 ms at most) may have the same time.
_TICK_NS = 20_000_000
#: The same for file systems that store whole seconds, or even ones (FAT).
_COARSE_NS = 2_100_000_000
#: An mtime further in the future was set by hand, and is not due to a clock that is fast.
_AHEAD_NS = 3600 * 10**9
_SECOND_NS = 10**9
_POSITIVE = (1 << 62) - 1
#: Bits from inode and device; never all zero in a version from `of_stat`.
_OWN = (1 << 20) - 1
_SHARED = _POSITIVE & ~_OWN

_pack = struct.Struct("<3Q").pack
_WORD = (1 << 64) - 1


def of_stat(status: os.stat_result, now_ns: int) -> int:
    """Return the version of a local file.

    It is made of size, mtime, ctime, inode and device. Only the system sets ctime, so the version
    of a file that was written again with its old mtime differs.

    Args:
        status: status of the file.
        now_ns: `time.time_ns()`, not later than the call that returned `status`.

    Returns:
        A number above 0; CHANGING if the last change is so recent that another one could have the
        same times, or lies in the future.
    """
    mtime, ctime = status.st_mtime_ns, status.st_ctime_ns
    settled = now_ns - (_TICK_NS if ctime % _SECOND_NS else _COARSE_NS)
    if ctime > settled or settled < mtime < now_ns + _AHEAD_NS:
        return CHANGING
    digest = xxhash.xxh3_64_intdigest(_pack(status.st_size, mtime & _WORD, ctime & _WORD))
    own = (status.st_ino ^ status.st_dev << 7) & _OWN  # neighbours differ, on one device and on two
    return digest & _SHARED | (own or 1)


def of_tag(tag: str) -> int:
    """Return the version, above 0, for a tag of the storage.

    >>> of_tag('"abc"') == of_tag('"abc"') != of_tag('"abd"')
    True
    """
    digest = xxhash.xxh3_64_intdigest(tag.encode("utf-8", "surrogateescape"))
    return (digest & _POSITIVE) or 1


def shared(versions: Ints) -> Ints:
    """Return (k,) versions with only the bits that are the same on every node.

    >>> same = np.array([of_tag("a"), UNKNOWN, CHANGING])
    >>> bool((shared(shared(same)) == shared(same)).all()), shared(same)[1:].tolist()
    (True, [0, -1])
    """
    return np.where(versions > 0, versions & ~_OWN, versions)


def differ(old: Ints, new: Ints) -> Mask:
    """Return (k,) whether the bytes may differ; versions of other nodes compare by shared bits."""
    other: Mask = (old != new) | (old == CHANGING)
    foreign = other & (((old & _OWN) == 0) | ((new & _OWN) == 0)) & (old > 0) & (new > 0)
    if np.count_nonzero(foreign):
        other &= ~(foreign & (shared(old) == shared(new)))
    return other


def stands_for(held: int, now: int) -> bool:
    """Return whether bytes of version `held` are what a local file of version `now` has.

    Bytes that came from another node have only the bits that all nodes share (`shared`).

    >>> stands_for(5 << 20 | 7, 5 << 20 | 7), stands_for(5 << 20, 5 << 20 | 7)
    (True, True)
    >>> stands_for(5 << 20 | 6, 5 << 20 | 7), stands_for(CHANGING, CHANGING)
    (False, False)
    """
    return now > 0 and held in {now, now & _SHARED}


def torn(before: os.stat_result, after: os.stat_result) -> bool:
    """Return whether a read between two fstat calls may mix two versions of the file."""
    return (
        before.st_mtime_ns != after.st_mtime_ns
        or before.st_ctime_ns != after.st_ctime_ns
        or before.st_size != after.st_size
    )
