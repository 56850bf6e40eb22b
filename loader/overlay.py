"""Tensors over memory that comes from elsewhere: slots, rings, packets."""

from __future__ import annotations

from typing import Any, cast

import torch


def over(
    buffer: object, count: int, offset: int = 0, dtype: torch.dtype = torch.uint8
) -> torch.Tensor:
    """(count,) tensor over the writable `buffer`, which lives as long as any view of the tensor.

    `share_memory_()` and torch's queues exchange the memory below a tensor. torch lets go of the
    old one then, though a NumPy view taken before still points there: so its storage, which such a
    view keeps, holds the buffer as well.

    Args:
        count: elements.
        offset: bytes.
    """
    tensor = torch.frombuffer(cast(Any, buffer), dtype=dtype, count=count, offset=offset)
    cast(Any, tensor.untyped_storage()).buffer = buffer
    return tensor
