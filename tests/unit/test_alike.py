"""Comparing a trainer's world with a worker's costs less than the new worker it saves."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import creel
from creel.loader import bench
from creel.loader.alike import CAP, UnlikeError, snapshot, world_of

_BIG = 32 << 20  # bytes, far beyond what a fork is worth
_reached: np.ndarray[Any, Any] = np.zeros(1)


def _reaches() -> object:
    return _reached


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.zeros(_BIG, np.uint8),
        lambda: np.zeros((_BIG >> 10, 1 << 10), np.uint8).T[::2],
        lambda: bytes(_BIG),
        lambda: bytearray(_BIG),
        lambda: torch.zeros(_BIG, dtype=torch.uint8),
        lambda: torch.zeros(_BIG, dtype=torch.uint8)[:10],
    ],
    ids=["array", "strided array", "bytes", "bytearray", "tensor", "view of a tensor"],
)
def test_what_is_too_big_to_compare_is_not_copied_either(make: Callable[[], object]) -> None:
    big = make()
    tracemalloc.start()
    try:
        with pytest.raises(UnlikeError, match="too big"):
            snapshot((big,), "fork")
        assert tracemalloc.get_traced_memory()[1] < CAP["fork"]
    finally:
        tracemalloc.stop()


def test_a_world_that_is_too_big_is_not_copied_either(monkeypatch: pytest.MonkeyPatch) -> None:
    assert world_of([_reaches], "fork") == world_of([_reaches], "fork")
    monkeypatch.setitem(globals(), "_reached", np.zeros(_BIG, np.uint8))
    tracemalloc.start()
    try:
        with pytest.raises(UnlikeError, match="too big"):
            world_of([_reaches], "fork")
        assert tracemalloc.get_traced_memory()[1] < CAP["fork"]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("make", [lambda: torch.zeros(1), lambda: np.zeros(1)])
def test_many_small_objects_are_too_much_as_well(make: Callable[[], object]) -> None:
    snapshot(([make() for _ in range(400)],), "fork")
    with pytest.raises(UnlikeError, match="too big"):
        snapshot(([make() for _ in range(4000)],), "fork")
    snapshot(([make() for _ in range(4000)],), "spawn")  # which costs a hundred times more


class _Large(Dataset[int]):
    def __init__(self) -> None:
        self.kept = np.zeros(_BIG, np.uint8)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return int(self.kept[index])


def test_what_could_not_be_compared_once_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries = 0

    def counted(*args: Any) -> Any:
        nonlocal tries
        tries += 1
        return snapshot(*args)

    monkeypatch.setattr(bench, "snapshot", counted)
    loader = creel.DataLoader(_Large(), batch_size=2, num_workers=1, creel=False)
    for _ in range(3):
        assert len(list(loader)) == 4
    assert tries == 1
    assert loader.stats()["workers_renewed_because"] == "too big to compare"
