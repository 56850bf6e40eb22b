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

from creel.cache.arena import Rows
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
        buffer.memory = memory
        buffer.back = self._back
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

    # Ctrl-C may come before a lease has its memory: then `back` gives nothing.
    return type("Lent", (ctypes.c_char * size,), {"__del__": ended, "back": lambda _: None})


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
        self.gather = gather
        self._offset = session.table.offset
        self._rows = Rows(client.arena, gather.nbytes)
        self._memory = memory
        # What a batch is made of that is not its rows themselves.
        self._raw = Ring().take if gather.converts else memory

    def rows(self, ids: NDArray[np.int32], indices: NDArray[np.int64]) -> torch.Tensor | None:
        """(n, nbytes) uint8, the bytes of these objects; None when one is not in the arena.

        They must be pinned: their step in [DONE, READY), also afterwards. Nor without samples.

        Args:
            ids: (n,) objects, one per sample.
            indices: (n,) numbers of the samples; None is the answer to a lone number, ().
        """
        n, nbytes = len(ids), self.gather.nbytes
        if not n or indices.ndim != 1:  # torch has its own word for no samples, and for no group
            return None
        rows = self._raw(n * nbytes).view(n, nbytes)
        return rows if self._rows.copy(self._offset.take(ids), rows.numpy()) else None

    def batch(self, rows: torch.Tensor, indices: NDArray[np.int64]) -> Any:
        """What default_collate would give for these samples; the person's code may run here."""
        return self.gather.collate(rows, indices, self._memory)
