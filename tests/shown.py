# ruff: noqa: NPY002  compares the global generators
"""Observable results of a loader, in forms that compare to the bit."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def plain(value: Any) -> Any:
    """Return a value as nested tuples of plain values, with classes, dtypes, shapes and bits."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().reshape(-1).contiguous()
        bits = flat.view(torch.uint8).numpy().tobytes() if value.numel() else b""
        return ("tensor", str(value.dtype), tuple(value.shape), bits)
    if isinstance(value, np.ndarray):
        return ("array", str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, dict):
        return (type(value).__name__, tuple((k, plain(v)) for k, v in value.items()))
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, tuple(plain(v) for v in value))
    return (type(value).__name__, repr(value))


def states(loader: Any) -> Any:
    """Return a digest of all random generators; equal in processes forked from one."""
    generator = loader.generator
    state = np.random.get_state()
    return (
        "rng",
        hash(torch.get_rng_state().numpy().tobytes()),
        hash((state[1].tobytes(), state[2])),  # type: ignore[index]
        hash(random.getstate()),
        hash(generator.get_state().numpy().tobytes()) if generator is not None else 0,
    )
