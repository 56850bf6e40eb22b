"""Tensors over memory that torch does not own: slots and buffers."""

from __future__ import annotations

from typing import Any, cast

import torch


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
