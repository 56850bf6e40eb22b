"""Operations on bytes in several consecutive buffers. Pure."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np

#: The buffers of one object: a single one, or several, one after the other.
Part: TypeAlias = Sequence[memoryview]


def address_of(writable: Any) -> int:
    """The address of the first byte of a writable buffer, which must not be empty."""
    return ctypes.addressof(ctypes.c_char.from_buffer(writable))


def cut(buffers: list[memoryview], nbytes: int) -> tuple[list[memoryview], list[memoryview]]:
    """Split buffers into the first `nbytes` bytes and the rest.

    >>> [[bytes(b) for b in part] for part in cut([memoryview(b"abc"), memoryview(b"de")], 1)]
    [[b'a'], [b'bc', b'de']]
    """
    ends = list(accumulate(map(len, buffers)))
    whole = bisect_right(ends, nbytes)
    if whole == len(buffers):
        return buffers, []
    inside = nbytes - (ends[whole - 1] if whole else 0)
    first = [*buffers[:whole], buffers[whole][:inside]] if inside else buffers[:whole]
    return first, [buffers[whole][inside:], *buffers[whole + 1 :]]


def copy_over(data: memoryview, buffers: Sequence[memoryview]) -> None:
    """Copy `data` into the buffers, in order; numpy releases the GIL meanwhile."""
    at = 0
    for buffer in buffers:
        target = np.frombuffer(buffer, np.uint8)
        np.copyto(target, np.frombuffer(data[at : at + len(buffer)], np.uint8))
        at += len(buffer)
