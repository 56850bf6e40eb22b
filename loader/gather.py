"""Batches that are rows of the arena: assembled right here, by one copy, into reused memory."""

from __future__ import annotations

import ctypes
import functools
import mmap
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from creel.loader.overlay import over

if TYPE_CHECKING:
    from creel.loader.client import Client
    from creel.loader.session import Session
    from creel.loader.sources import Gather

#: Buffers of one size that are kept; a trainer that holds more batches gets fresh memory.
_KEEP = 8
#: But no more bytes than this, as they are kept while the loader lives: who reads a dataset as one
#: batch, or holds many, has the memory back when the batches are gone.
_KEEP_NBYTES = 256 << 20
_ALIGN = 4096
#: Rows of so many bytes, in so many pages together, are touched before they are copied.
_TOUCHED_NBYTES = 1024
_TOUCHED_PAGES = 2048


class Ring:
    """Memory for batches, used again when the last tensor over it is gone. Thread-safe.

    A page written for the first time costs the kernel several times the copy that goes into it.
    """

    def __init__(self) -> None:
        self._shelf = _Shelf(0)

    def lease(self, nbytes: int) -> Any:
        """A writable buffer of at least `nbytes`; its memory comes back when it dies."""
        shelf = self._shelf
        if nbytes > shelf.size:
            shelf = self._shelf = _Shelf(-(-nbytes // _ALIGN) * _ALIGN)
        return shelf.lease()

    def take(self, nbytes: int) -> torch.Tensor:
        """(nbytes,) uint8 over a lease; without room for one, memory of torch's."""
        try:
            return over(self.lease(nbytes), nbytes)
        except OSError:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


class _Shelf:
    """Memory of one size that nobody uses; what comes back to a shelf that is gone is freed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._kind = _lent(size)
        self._free: deque[mmap.mmap] = deque(maxlen=min(_KEEP, _KEEP_NBYTES // max(size, 1)))
        self._back = weakref.ref(self._free)

    def lease(self) -> Any:
        try:
            memory = self._free.pop()
        except IndexError:
            # Private: what a fork of this process sees of a batch stays as it was, as torch's does.
            memory = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        buffer = self._kind.from_buffer(memory)
        buffer.memory, buffer.back = memory, self._back
        return buffer


@functools.cache
def _lent(size: int) -> Any:
    """The class of buffers of this size, kept for good as ctypes keeps its own.

    An mmap cannot say when its last view ends; a ctypes array with `__del__` can.
    """

    def ended(self: Any) -> None:
        free = self.back()
        if free is not None:
            free.append(self.memory)

    return type("Lent", (ctypes.c_char * size,), {"__del__": ended})


class Gatherer:
    """Builds the batches of one dataset whose samples are nothing but bytes of one size."""

    def __init__(
        self,
        gather: Gather,
        client: Client,
        session: Session,
        memory: Callable[[int], torch.Tensor],
    ) -> None:
        """`memory` gives (nbytes,) uint8 to build a batch in."""
        self._gather = gather
        self._offset = session.table.offset
        self._rows = client.arena.rows(gather.nbytes)
        self._arena = client.arena.array
        # (p, 1): one byte in every page of a row, wherever it begins.
        self._pages = np.append(np.arange(0, gather.nbytes, _ALIGN), gather.nbytes - 1)[:, None]
        self._memory = memory

    def batch(self, ids: NDArray[np.int32], indices: NDArray[np.int64]) -> Any | None:
        """What default_collate would give for these samples; None when one is not in the arena.

        The objects must be pinned: their step in [DONE, READY). None without samples, too.

        Args:
            ids: (n,) objects, one per sample.
            indices: (n,) numbers of the samples; None is the answer to a lone number, ().
        """
        n, nbytes = len(ids), self._gather.nbytes
        if not n or indices.ndim != 1:  # torch has its own word for no samples, and for no group
            return None
        offset = self._offset.take(ids)
        row, rest = np.divmod(offset, nbytes)
        if np.count_nonzero(rest) or row.min() < 0:  # pages of mixed sizes; an absent one
            return None
        if nbytes >= _TOUCHED_NBYTES and n * len(self._pages) <= _TOUCHED_PAGES:
            # Scattered rows cost a page-table walk and a memory latency each, one after the other
            # as they are copied. Independent loads overlap: a fifth less time for 3 KB x 256.
            self._arena.take(offset + self._pages, mode="clip")
        rows = self._memory(n * nbytes).view(n, nbytes)
        np.take(self._rows, row, axis=0, out=rows.numpy(), mode="clip")
        return self._gather.collate(rows, indices)
