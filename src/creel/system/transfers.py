"""Reads and writes of all bytes of some buffers, in as many system calls as that takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from creel.system.limits import IOV_MAX


def transfer(call: Callable[..., int], fd: int, buffers: Iterable[Any], offset: int = 0) -> int:
    """Fill or write buffers from a byte of a file on, by `os.preadv` or `os.pwritev`.

    Returns:
        How many bytes that were; fewer than the buffers have only at the end of the file.
    """
    views = [memoryview(buffer) for buffer in buffers]
    left, at = deque(view.cast("B") for view in views if view.nbytes), offset
    while left and (done := call(fd, list(islice(left, IOV_MAX)), at)):
        at += done
        while left and done >= left[0].nbytes:
            done -= left.popleft().nbytes
        if done:
            left[0] = left[0][done:]
    return at - offset
