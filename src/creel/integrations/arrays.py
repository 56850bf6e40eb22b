"""Batches and samples as numpy arrays, for frameworks that know no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def arrays(value: Any) -> Any:
    """Return a batch or a sample with numpy arrays for tensors, which share their memory.

    Args:
        value: tensors in mappings, named tuples, lists and tuples. Lists become tuples, as Keras
            takes only these for (x, y); other values stay as they are.

    >>> arrays([torch.ones(2), {"y": 3}])
    (array([1., 1.], dtype=float32), {'y': 3})
    """
    if isinstance(value, torch.Tensor):
        return value.numpy()
    if isinstance(value, Mapping):
        return {key: arrays(part) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(arrays, value))
    if isinstance(value, (list, tuple)):
        return tuple(map(arrays, value))
    return value
