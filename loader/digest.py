"""Turn a batch into leaves (path, type, hash) that can be compared across processes."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
import xxhash

#: One leaf of a batch: its path, its type and shape, and the hash of its bytes.
Leaf: TypeAlias = tuple[str, str, str]


def digest(batch: object) -> list[Leaf]:
    """Return the leaves of a batch, in order.

    >>> digest([torch.zeros(2), "a"])[2]
    ('[1]', 'str', "'a'")
    """
    return list(_leaves(batch, ""))


def _leaves(value: Any, where: str) -> Iterator[Leaf]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        yield where, type(value).__name__, str(len(value))
        for i, item in enumerate(value):
            yield from _leaves(item, f"{where}[{i}]")
    elif hasattr(value, "__dict__") and not isinstance(value, torch.Tensor):
        for name, item in vars(value).items():
            yield from _leaves(item, f"{where}.{name}")
    else:
        yield where, *_value(value)


def _value(value: Any) -> tuple[str, str]:
    """Return (type and shape, hash or the value itself) of a value without parts."""
    if isinstance(value, torch.Tensor):
        kind = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        return kind, _hash(_tensor_bytes(value))
    if isinstance(value, np.ndarray) and value.dtype != object:
        return f"{value.dtype} {list(value.shape)}", _hash(np.ascontiguousarray(value).tobytes())
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"bytes [{len(value)}]", _hash(bytes(value))
    if isinstance(value, (str, int, float, complex, bool, type(None))):
        return type(value).__name__, repr(value)
    return type(value).__name__, _hash(pickle.dumps(value))


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach()
    if plain.layout != torch.strided:
        plain = plain.to_dense()
    flat = plain.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _hash(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)
