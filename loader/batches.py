"""Many samples of one shape at once: bytes seen as numbers, cast, stacked, and taken apart again.

What is done to a batch here is, to the bit, what would be done to each of its samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import default_collate

from creel.errors import ConfigError

#: Up to so many numbers torch works without its other threads (at::internal::GRAIN_SIZE).
_ALONE = 32767
#: Gives (nbytes,) uint8 to build a batch in.
Memory = Callable[[int], torch.Tensor]


def numbers(rows: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """(n, *shape) view of (n, nbytes) uint8, contiguous and aligned to the dtype's size."""
    return rows.view(dtype).reshape(len(rows), *shape)


def cast(batch: torch.Tensor, to: torch.dtype | None, memory: Memory | None = None) -> torch.Tensor:
    """(n, ...) what `row.to(to)` is of each row, contiguous, in that memory.

    The batch itself where there is nothing to do.
    """
    if to is None or to == batch.dtype:
        return batch
    if memory is None:
        return _copied(batch, torch.empty(batch.shape, dtype=to, device="cpu"))
    return _copied(batch, memory(batch.numel() * to.itemsize).view(to).view(batch.shape))


def _copied(batch: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`out.copy_(batch)`, to the bit what copying each row gives, and by this thread alone.

    What an integer cannot hold becomes of a float whatever the processor's instruction makes of it,
    and which one torch takes depends on where the number stands: so such rows go one by one. Where
    other processes use the cores, torch's threads wait for each other: a batch of 64 records took
    up to 20 ms in place of 0.05. For a single sample torch does it alone, too.
    """
    exact = out.dtype.is_floating_point or out.dtype.is_complex or out.dtype == torch.bool
    exact |= not (batch.dtype.is_floating_point or batch.dtype.is_complex)
    rows = max(_ALONE // max(batch[0].numel(), 1), 1) if exact else 1
    if rows >= len(batch):
        return out.copy_(batch)
    for start in range(0, len(batch), rows):
        out[start : start + rows].copy_(batch[start : start + rows])
    return out


def rows_of(batch: torch.Tensor) -> list[torch.Tensor]:
    """The rows of a contiguous batch, each a tensor whose storage is that row alone.

    So a sample that is pickled, or grown in place, takes no other along. The batch's memory stays
    as long as any of them.
    """
    try:
        array = batch.numpy()
    except TypeError:  # bfloat16 and its kin
        flat = batch.reshape(len(batch), -1).view(torch.uint8).numpy()
        return [torch.from_numpy(r).view(batch.dtype).reshape(batch.shape[1:]) for r in flat]
    if array.ndim > 1:
        return list(map(torch.from_numpy, array))
    return [torch.from_numpy(array[i, ...]) for i in range(len(array))]  # of numbers, still arrays


def unstacked(batch: Any, n: int) -> list[Any]:
    """Sample i is row i of the batch; of a tuple or dict, the tuple or dict of their rows i.

    Raises:
        ConfigError: it has not n rows.
    """
    if isinstance(batch, dict):
        columns = {key: unstacked(value, n) for key, value in batch.items()}
        return [{key: column[i] for key, column in columns.items()} for i in range(n)]
    if isinstance(batch, tuple):
        rows = zip(*(unstacked(value, n) for value in batch), strict=True)
        kind: Any = type(batch)
        return [kind(*row) if hasattr(batch, "_fields") else tuple(row) for row in rows]
    try:
        count = len(batch)
    except TypeError:
        count = -1
    if count != n:
        what = f"{count} rows" if count >= 0 else f"a {type(batch).__name__} without rows"
        raise ConfigError(
            f"batch_transform got {n} samples and gave {what}: it gives one row per sample, in a "
            "tensor, a sequence, or a tuple or dict of these"
        )
    return [batch[i] for i in range(n)]


def stacked(batch: Any, n: int, memory: Memory) -> Any:
    """`default_collate(unstacked(batch, n))`, with one copy where it is made of plain tensors.

    A copy there must be: the person may keep what they gave, or give the same memory twice.
    """
    if type(batch) is tuple and batch:
        return [stacked(value, n, memory) for value in batch]
    if type(batch) is dict and batch:
        return {key: stacked(value, n, memory) for key, value in batch.items()}
    if _is_plain(batch) and len(batch) == n:
        out = memory(batch.numel() * batch.itemsize).view(batch.dtype).view(batch.shape)
        return _copied(batch, out)
    return default_collate(unstacked(batch, n))


def _is_plain(batch: object) -> bool:
    """Whether rows of this, stacked, are a copy of it and nothing more."""
    return (
        type(batch) is torch.Tensor
        and batch.device.type == "cpu"
        and batch.layout == torch.strided
        and not batch.requires_grad
        and not batch.is_quantized
        and not batch.is_nested
        and batch.numel() > 0
        and batch.dim() > 0
    )
