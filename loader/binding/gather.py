"""Gatherer: builds batches of plain bytes by one copy from the arena into reused memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from creel.cache.memory.arena import Rows
from creel.loader.buffers import BufferPool

if TYPE_CHECKING:
    from creel.loader.binding.bind import Gather
    from creel.loader.client.client import Client
    from creel.loader.client.session import Session


class Gatherer:
    """Builds the batches of one dataset whose samples are bytes of one size (see `Gather`)."""

    def __init__(
        self,
        gather: Gather,
        client: Client,
        session: Session,
        memory: Callable[[int], torch.Tensor],
    ) -> None:
        """`memory` returns (nbytes,) uint8 to build a batch in."""
        self.gather = gather
        self._offset = session.table.offset
        self._rows = Rows(client.arena, gather.nbytes)
        self._memory = memory
        # Memory for rows; where they are converted they do not stay in the batch.
        self._raw = BufferPool().take if gather.converts else memory

    def rows(self, ids: NDArray[np.int32], indices: NDArray[np.int64]) -> torch.Tensor | None:
        """(n * nbytes,) uint8, the bytes of these objects; None if one is not in the arena.

        The objects must be pinned: their step in [DONE, READY), also after the call.

        Args:
            ids: (n,) objects, one per sample; the result is None for n = 0.
            indices: (n,) numbers of the samples; the result is None for a single number, ().
        """
        n, nbytes = len(ids), self.gather.nbytes
        if not n or indices.ndim != 1:  # torch's own fetcher handles these
            return None
        where = self._offset.rows(ids, nbytes)
        if where is None:
            return None
        rows = self._raw(n * nbytes)
        self._rows.copy_rows(where, rows.numpy().reshape(n, nbytes))
        return rows

    def batch(self, rows: torch.Tensor, indices: NDArray[np.int64]) -> Any:
        """These samples as default_collate would batch them; runs any `batch_transform`."""
        return self.gather.collate(rows, indices, self._memory)
