"""Batches of samples of one shape: view bytes as numbers, cast, stack and unstack.

Results equal, to the bit, those of doing the same to each sample.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate

from creel.errors import ConfigError

#: Up to this many elements torch uses one thread only (at::internal::GRAIN_SIZE).
_TORCH_GRAIN = 32767
_INTEGERS = frozenset(
    (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64)
)
_CAST_BY_NUMPY = _INTEGERS | {torch.float32, torch.float64}
#: Bytes read at once of a batch whose samples are transformed one by one (samples may be small
#: parts of large records), and the largest buffer that is kept for the next batch.
MAX_ROWS_NBYTES = 4 << 20
#: A function from nbytes to (nbytes,) uint8 memory for a batch.
Memory = Callable[[int], torch.Tensor]


def numbers(rows: torch.Tensor, n: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """View the uint8 bytes of n rows as (n, *shape); contiguous, aligned to the dtype's size."""
    typed = rows if dtype == torch.uint8 else rows.view(dtype)  # a view costs 1 us
    return typed if typed.shape == (n, *shape) else typed.view(n, *shape)


def cast(batch: torch.Tensor, to: torch.dtype | None, memory: Memory | None = None) -> torch.Tensor:
    """`row.to(to)` for each row of (n, ...), contiguous, in memory from `memory`.

    Returns the batch itself if no cast is needed.
    """
    if to is None or to == batch.dtype:
        return batch
    if memory is None:
        return _copied(batch, torch.empty(batch.shape, dtype=to, device="cpu"))
    return _copied(batch, memory(batch.numel() * to.itemsize).view(to).view(batch.shape))


def _copied(batch: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`out.copy_(batch)`, to the bit as if row by row, in this thread only.

    numpy casts integers as torch does, to integers and to floats no narrower than float32, in a
    third of the time torch takes row group by row group (64 x 1,024 int32 to int64: 11 us, not 36).

    The cast of a float that does not fit the integer depends on the processor's instruction. torch
    chooses the instruction by the element's position, so such rows are copied one by one. torch's
    other threads are avoided because they wait for each other if other processes use the cores: a
    batch of 64 records took up to 20 ms instead of 0.05. torch also copies a single sample in one
    thread.
    """
    as_bytes = batch.dtype == out.dtype  # numpy copies these as they are
    if out.dtype in _CAST_BY_NUMPY and (as_bytes or batch.dtype in _INTEGERS):
        np.copyto(out.numpy(), batch.numpy(), casting="unsafe")
        return out
    exact = out.dtype.is_floating_point or out.dtype.is_complex or out.dtype == torch.bool
    exact |= not (batch.dtype.is_floating_point or batch.dtype.is_complex)
    rows = max(_TORCH_GRAIN // max(batch[0].numel(), 1), 1) if exact else 1
    if rows >= len(batch):
        return out.copy_(batch)
    for start in range(0, len(batch), rows):
        out[start : start + rows].copy_(batch[start : start + rows])
    return out


@functools.cache
def numpy_type(dtype: torch.dtype) -> np.dtype[Any] | None:
    """Return numpy's type of the same numbers; None for bfloat16 and others that numpy lacks."""
    try:
        return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    except TypeError:
        return None


def rows_of(
    rows: NDArray[np.uint8], dtype: torch.dtype, shape: tuple[int, ...]
) -> Iterator[torch.Tensor]:
    """Yield each row as a tensor whose storage is that row only.

    Pickling a sample, or growing it in place, then does not involve other rows. The memory of all
    rows is kept as long as any of these tensors.

    Args:
        rows: (n, nbytes), contiguous, aligned to the dtype's size.
        dtype, shape: of the numbers in a row.
    """
    kind = numpy_type(dtype)
    if kind is None:
        return (torch.from_numpy(row).view(dtype).reshape(shape) for row in rows)
    typed = rows.view(kind).reshape(len(rows), *shape)
    if shape:
        return map(torch.from_numpy, typed)
    return (torch.from_numpy(typed[i, ...]) for i in range(len(typed)))  # 0-d arrays, not scalars


def rows_cast(
    rows: NDArray[np.uint8],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    to: torch.dtype | None,
    memory: Memory | None = None,
) -> Iterator[torch.Tensor]:
    """Yield each of `rows_of`, cast to `to` in memory from `memory`, all at once."""
    if to is None or to == dtype:
        return rows_of(rows, dtype, shape)
    n = len(rows)
    batch = cast(numbers(torch.from_numpy(rows.reshape(-1)), n, dtype, shape), to, memory)
    return rows_of(batch.reshape(n, -1).view(torch.uint8).numpy(), to, shape)


def unstacked(batch: Any, n: int) -> list[Any]:
    """Split a batch into n samples: row i, or for a tuple or dict the tuple or dict of rows i.

    Raises:
        ConfigError: a part does not have n rows.
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
        result = f"{count} rows" if count >= 0 else f"a {type(batch).__name__} without rows"
        raise ConfigError(
            f"batch_transform got {n} samples and gave {result}: it gives one row per sample, in a "
            "tensor, a sequence, or a tuple or dict of these"
        )
    return [batch[i] for i in range(n)]


def stacked(batch: Any, n: int, memory: Memory) -> Any:
    """`default_collate(unstacked(batch, n))`, with a single copy for plain tensors.

    The copy is needed: user code may keep what it returned, or return the same memory twice.
    """
    if type(batch) is tuple and batch:
        return [stacked(value, n, memory) for value in batch]
    if type(batch) is dict and batch:
        return {key: stacked(value, n, memory) for key, value in batch.items()}
    if _stacks_to_a_copy(batch) and len(batch) == n:
        out = memory(batch.numel() * batch.itemsize).view(batch.dtype).view(batch.shape)
        return _copied(batch, out)
    return default_collate(unstacked(batch, n))


def _stacks_to_a_copy(batch: object) -> bool:
    """Whether stacking the rows of this batch gives just a copy of it."""
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
