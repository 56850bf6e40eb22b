"""The global generators of `random`, NumPy and torch's CPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_here(seed: int) -> None:
    """Seed this process's generators of `random`, NumPy and torch's CPU (8 us)."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002  datasets use the global one
    torch.default_generator.manual_seed(seed)


@contextmanager
def restored_generators() -> Iterator[None]:
    """Put the generators that `seed_here` seeds back at the end: the trainer's own stay its own."""
    ours, numpys = random.getstate(), np.random.get_state()  # noqa: NPY002  the same
    torchs = torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(ours)
        np.random.set_state(numpys)  # noqa: NPY002
        torch.default_generator.set_state(torchs)
