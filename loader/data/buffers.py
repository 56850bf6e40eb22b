"""Memory for batches: reusable buffers, and tensors over memory that torch does not own."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
import weakref
from collections import deque
from contextlib import suppress
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

#: Most free buffers of like sizes that are kept; a trainer that holds more gets new memory.
_MAX_KEPT = 8
#: Most bytes of them, since they are kept while the loader lives. Memory beyond that (a dataset
#: read as one batch, many batches held) is freed with its batches. This is enough for the 6
#: batches of 64 MB that two workers and a trainer have at a time: making one buffer in 16 anew
#: took as long as half the copies (benchmarks/two_commits.py, files 1 MB x 64).
MAX_KEPT_NBYTES = 512 << 20
_ALIGN = 4096
#: glibc adapts its limits to freed blocks below 32 MiB, on 64-bit systems.
_LARGE_NBYTES = 31 << 20


@functools.cache
def keep_freed_memory() -> None:
    """Let glibc keep up to 62 MiB of memory that a batch frees, for the next batch; runs once.

    By default glibc trims its heap whenever 128 KiB at the end are free. Samples then touch new
    pages in each batch, which costs several times the copy into them. glibc raises the limit to
    twice the size of a larger block that is freed (mallopt(3)). This frees such a block, never
    written to. It has no effect with other C libraries.
    """
    with suppress(MemoryError):  # address space is short (`ulimit -v`): keep nothing
        np.empty(_LARGE_NBYTES, np.uint8)


def over(
    buffer: object, count: int, offset: int = 0, dtype: torch.dtype = torch.uint8
) -> torch.Tensor:
    """Return a (count,) tensor over the writable `buffer`, kept alive by every view of the tensor.

    `share_memory_()` and torch's queues replace the memory of a tensor. torch then drops its
    reference to the buffer, though a NumPy view taken before still points there. The storage, which
    such a view keeps alive, therefore holds the buffer as well.

    Args:
        count: elements.
        offset: bytes.
    """
    tensor = torch.frombuffer(cast(Any, buffer), dtype=dtype, count=count, offset=offset)
    cast(Any, tensor.untyped_storage()).buffer = buffer
    return tensor


def over_array(array: NDArray[Any]) -> torch.Tensor:
    """Return a tensor over a writable array, as `over`."""
    tensor = torch.from_numpy(array)
    cast(Any, tensor.untyped_storage()).buffer = array
    return tensor


class BufferPool:
    """Memory for batches, reused when the last tensor over it is gone. Thread-safe.

    The first write to a page costs the kernel several times the copy that goes into it. Buffers of
    like sizes, within a factor of two, are one another's: a small part of a batch must not take a
    large one's, of which it would write one page.
    """

    def __init__(self, max_nbytes: int = sys.maxsize) -> None:
        """`max_nbytes`: of a buffer of this pool; a larger one is new memory."""
        self._free_lists: dict[int, _FreeList] = {}
        self._max_nbytes = max_nbytes

    def lease(self, nbytes: int) -> Any:
        """Return a writable buffer of at least `nbytes`; its memory is reused after it dies."""
        like = (nbytes - 1).bit_length()
        free_list = self._free_lists.get(like)
        if free_list is None or nbytes > free_list.size:
            free_list = self._free_lists[like] = _FreeList(-(-nbytes // _ALIGN) * _ALIGN)
        try:
            memory = free_list.free.pop()
        except IndexError:
            # Private: a forked child's view of a batch stays unchanged, as with torch's memory.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            memory = mmap.mmap(-1, free_list.size, flags=flags)
        buffer = free_list.kind.from_buffer(memory)
        buffer.memory = memory
        buffer.back = free_list.back
        return buffer

    def __call__(self, nbytes: int) -> torch.Tensor:
        """Return a (nbytes,) uint8 tensor over `array`."""
        return over_array(self.array(nbytes))

    def array(self, nbytes: int) -> NDArray[np.uint8]:
        """Return a (nbytes,) array over a lease, or over new memory if mmap fails."""
        if nbytes <= self._max_nbytes:
            try:
                return np.frombuffer(self.lease(nbytes), np.uint8, nbytes)
            except OSError:
                pass
        return np.empty(nbytes, np.uint8)


class _FreeList:
    """Free buffers of one size; a buffer that returns after this list is gone is freed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.kind = buffer_class(size)
        self.free: deque[mmap.mmap] = deque(maxlen=min(_MAX_KEPT, MAX_KEPT_NBYTES // max(size, 1)))
        self.back = weakref.ref(self.free)


@functools.cache
def buffer_class(size: int) -> Any:
    """Return the buffer class of this size; cached for good, as ctypes caches its array types.

    An mmap cannot report when its last view ends; a ctypes array with `__del__` can.
    """

    def ended(self: Any) -> None:
        free = self.back()
        if free is not None:
            free.append(self.memory)

    # Ctrl-C may come before a lease has its memory: then the default `back` returns None.
    return type("Leased", (ctypes.c_char * size,), {"__del__": ended, "back": lambda _: None})
