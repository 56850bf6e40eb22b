"""DirectBatches: batches of a stream on a local file system, built in the training process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from creel.loader.data.buffers import BufferPool, over_array

if TYPE_CHECKING:
    import torch

    from creel.loader.data.binding.bind import Gather
    from creel.loader.extras.streams.stream import Stream
    from creel.policies.arrays import Ints


#: Bytes of a field that are read to their place in the batch; smaller ones are read by record and
#: then copied, since a read takes longer.
_LARGE = 16 << 10


class DirectBatches:
    """Reads records into a batch as default_collate would make it; for one thread.

    torch's own collation takes a tensor for each field of each record, and stacks large ones in
    several threads, which wait for each other on busy cores.
    """

    def __init__(
        self,
        gather: Gather,
        stream: Stream,
        memory: Callable[[int], torch.Tensor],
        frozen: bool,
    ) -> None:
        """Make a reader.

        Args:
            gather: of the stream, without user code.
            memory: returns (nbytes,) uint8 for a batch.
            frozen: whether later changes to the stream are ignored, as a worker would.
        """
        self._gather = gather
        self._stream = copy.copy(stream) if frozen else stream
        self._memory = memory
        self._rows = BufferPool()

    def batch(self, index: object) -> Any:
        """Return a batch; None if the index is not a list of samples, or the stream was changed.

        Raises:
            SourceError: as `Stream.read_rows`.
        """
        ids: Ints = np.asarray(index)
        if ids.ndim != 1 or ids.dtype.kind != "i" or not len(ids):
            return None
        if not self._gather.raw.same(self._stream.raw()):
            return None
        if self._gather.nbytes >= _LARGE * len(self._stream.fields.parts):
            return self._stream.read_fields(ids, self._memory)
        rows = self._rows.array(len(ids) * self._gather.nbytes)
        self._stream.read_rows(ids, rows.reshape(len(ids), -1))
        return self._gather.collate(over_array(rows), ids, self._memory)
