"""Gatherer: copies batches of plain bytes out of the arena."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate

from creel.cache.memory.arena import Rows
from creel.loader.data.buffers import BufferPool, over_array
from creel.loader.data.datasets.base import Sample
from creel.loader.data.datasets.batches import MAX_ROWS_NBYTES

if TYPE_CHECKING:
    from creel.loader.client.session import Session
    from creel.loader.data.binding.bind import Gather


class Gatherer:
    """Builds the batches of one dataset whose samples are bytes of one size (see `Gather`)."""

    def __init__(
        self,
        gather: Gather,
        session: Session,
        memory: Callable[[int], torch.Tensor],
        collate: Callable[[list[Sample]], Any] = default_collate,
    ) -> None:
        """Make a gatherer for one thread.

        Args:
            memory: returns (nbytes,) uint8 to build a batch in; a pool's takes fewer calls.
            collate: default_collate, or what does the same; for samples that user code made.
        """
        self.gather = gather
        self.per_sample = gather.per_sample
        self._nbytes = gather.nbytes
        self._offset = session.table.offset
        self._rows = Rows(session.client.arena, gather.nbytes)
        self.memory = memory
        # Memory for rows. Rows that are converted do not stay in the batch.
        self._raw = memory
        self._collate = collate
        if self.per_sample:
            self._raw = BufferPool(MAX_ROWS_NBYTES)
        elif gather.converts:
            self._raw = BufferPool()
        self._pool = self._raw if isinstance(self._raw, BufferPool) else None

    def rows(self, ids: NDArray[np.int32], indices: NDArray[np.int64]) -> torch.Tensor | None:
        """Return the bytes of these objects, (n, nbytes) uint8; None if one is not in the arena.

        None also for more than MAX_ROWS_NBYTES whose samples are transformed one by one.

        The objects must be pinned: their step in [DONE, READY), also after the call.

        Args:
            ids: (n,) objects, one per sample; the result is None for n = 0.
            indices: (n,) numbers of the samples; the result is None for a single number, ().
        """
        n, nbytes = len(ids), self._nbytes
        if not n or indices.ndim != 1:  # torch's own fetcher handles these
            return None
        if self.per_sample and n * nbytes > MAX_ROWS_NBYTES:
            return None
        where = self._offset.rows(ids, nbytes)
        if where is None:
            return None
        if self._pool is not None:
            array = self._pool.array(n * nbytes).reshape(n, nbytes)
            self._rows.copy_rows(where, array)
            return over_array(array)
        rows = self._raw(n * nbytes).view(n, nbytes)
        self._rows.copy_rows(where, rows.numpy())
        return rows

    def decoded(self, rows: torch.Tensor, indices: NDArray[np.int64]) -> Any:
        """Batch these samples as default_collate would, each `per_sample` by the user's code."""
        return self.gather.labelled(self._collate(self.gather.samples(rows)), indices)
