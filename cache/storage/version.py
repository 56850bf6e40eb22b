"""Versions: one number that differs once the bytes of a file may differ. Pure.

A version says nothing about the bytes themselves: equal versions of one address mean that its
storage knows of no change in between. Locally it is made from stat, remotely from the storage's own
tag (ETag, generation), else from its time and size.

The upper bits of a version are the same on all nodes that mount the storage (`shared`). The lower
ones come from inode and device, which each node may number differently.
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
#: Changed so recently that a further change might not show: equals nothing, not even itself.
CHANGING = -1
#: Absent or not readable.
MISSING = -2

#: Two writes within one tick of the kernel's clock (10 ms at most) have the same time.
_TICK_NS = 20_000_000
#: The same for file systems that keep whole seconds, or every other one (FAT).
_COARSE_NS = 2_100_000_000
#: A change time further ahead was set by hand, and does not mean that a clock is fast.
_AHEAD_NS = 3600 * 10**9
_SECOND_NS = 10**9
_POSITIVE = (1 << 62) - 1
#: Bits from inode and device; never all zero in a version from `of_stat`.
_OWN = (1 << 20) - 1
_SHARED = _POSITIVE & ~_OWN

_pack = struct.Struct("<3Q").pack
_WORD = (1 << 64) - 1


def of_stat(status: os.stat_result, now_ns: int) -> int:
    """The version of a local file.

    Made of size, mtime, ctime, inode and device. Only the system sets ctime: a file written again
    with its mtime put back differs.

    Args:
        status: that of the file.
        now_ns: `time.time_ns()`, not later than the call that returned `status`.

    Returns:
        Above 0; CHANGING where the last change is so recent that the next could look the same, or
        lies in the future.
    """
    mtime, ctime = status.st_mtime_ns, status.st_ctime_ns
    settled = now_ns - (_TICK_NS if ctime % _SECOND_NS else _COARSE_NS)
    if ctime > settled or settled < mtime < now_ns + _AHEAD_NS:
        return CHANGING
    digest = xxhash.xxh3_64_intdigest(_pack(status.st_size, mtime & _WORD, ctime & _WORD))
    own = (status.st_ino ^ status.st_dev << 7) & _OWN  # neighbours differ, on one device and on two
    return digest & _SHARED | (own or 1)


def of_tag(tag: str) -> int:
    """The version from a storage's own text; above 0.

    >>> of_tag('"abc"') == of_tag('"abc"') != of_tag('"abd"')
    True
    """
    digest = xxhash.xxh3_64_intdigest(tag.encode("utf-8", "surrogateescape"))
    return (digest & _POSITIVE) or 1


def shared(versions: Ints) -> Ints:
    """(k,) the part of each version that is the same on every node, its other bits zero.

    >>> same = np.array([of_tag("a"), UNKNOWN, CHANGING])
    >>> bool((shared(shared(same)) == shared(same)).all()), shared(same)[1:].tolist()
    (True, [0, -1])
    """
    return np.where(versions > 0, versions & ~_OWN, versions)


def differ(old: Ints, new: Ints) -> Mask:
    """(k,) whether the bytes may differ: where either came from another node, by shared parts."""
    other: Mask = (old != new) | (old == CHANGING)
    foreign = other & (((old & _OWN) == 0) | ((new & _OWN) == 0)) & (old > 0) & (new > 0)
    if np.count_nonzero(foreign):
        other &= ~(foreign & (shared(old) == shared(new)))
    return other


def torn(before: os.stat_result, after: os.stat_result) -> bool:
    """Whether a read between two fstat calls may mix two versions of the file."""
    return (
        before.st_mtime_ns != after.st_mtime_ns
        or before.st_ctime_ns != after.st_ctime_ns
        or before.st_size != after.st_size
    )
