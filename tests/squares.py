"""Datasets that need no storage, for tests of workers."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.utils.data import Dataset


class Squares(Dataset[Any]):
    def __init__(self, n: int = 40) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        return torch.tensor(i * i)


class Pids(Squares):
    def __getitem__(self, i: int) -> Any:
        return os.getpid()


def pids(iterator: Any) -> list[int]:
    return [w.pid for w in iterator._workers]
