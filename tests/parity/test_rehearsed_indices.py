"""Which samples a batch of a loader that rehearses has, and what such a loader refuses."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from test_rehearsal import NEW, OLD, Noisy, memory, switched_off
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)

import creel
from creel.errors import ConfigError

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


@pytest.mark.parametrize("mode", ["creel", "no daemon", "disabled"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.usefixtures("either_way")
def test_indices_name_the_samples_of_each_batch(
    workers: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = switched_off(monkeypatch, mode)
    loader: Any = creel.DataLoader(Noisy(NEW), 4, True, num_workers=workers, **options)
    for _ in range(2):
        for step, batch in enumerate(loader):
            assert loader.indices.tolist() == batch[0].tolist()
            assert loader.indices.dtype == np.int64
            assert len(loader.replayed) == 0
            if step == 4:
                break
    single: Any = creel.DataLoader(Noisy(NEW), None, sampler=[5, 3], num_workers=workers, **options)
    assert [loader.indices.tolist() for loader in [single] for _ in single] == [[5], [3]]


@pytest.mark.parametrize("mode", ["no daemon", "disabled"])
def test_indices_fit_batches_that_come_as_they_are_ready(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = switched_off(monkeypatch, mode)
    loader: Any = creel.DataLoader(
        Noisy(NEW), 3, True, num_workers=3, in_order=False, rehearsal=memory(2), **options
    )
    for batch in loader:
        assert loader.indices[:-2].tolist() == batch[0][:-2].tolist()
        old = loader.rehearsal.dataset
        assert [old[k][0] for k in loader.replayed.tolist()] == batch[0][-2:].tolist()


class Meeting(BatchSampler):
    """Its iterators are begun by three threads at the same time."""

    barrier = threading.Barrier(3)

    def __iter__(self) -> Iterator[list[int]]:
        self.barrier.wait(30)
        return super().__iter__()


def test_a_loader_that_is_switched_off_counts_and_serves_threads_as_torchs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = switched_off(monkeypatch, "disabled")
    batches = Meeting(SequentialSampler(range(NEW)), 4, False)
    loader: Any = creel.DataLoader(Noisy(NEW), batch_sampler=batches, **options)
    with ThreadPoolExecutor(3) as pool:
        iterators = [future.result(30) for future in [pool.submit(iter, loader) for _ in range(3)]]
    assert [len(it) for it in iterators] == [len(loader)] * 3
    for it in iterators:
        assert [loader.indices.tolist() for batch in it] == [
            list(range(first, min(first + 4, NEW))) for first in range(0, NEW, 4)
        ]


class Keyed(Dataset[Any]):
    def __getitem__(self, key: str) -> str:
        if key == "b":
            raise KeyError(key)
        return key


@pytest.mark.parametrize("mode", ["no daemon", "disabled"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_that_raised_is_not_the_last_one(
    workers: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = switched_off(monkeypatch, mode)

    class Broken(Noisy):
        def __getitem__(self, index: int) -> Any:
            if index == 5:
                raise ValueError("broken")
            return super().__getitem__(index)

    loader: Any = creel.DataLoader(Broken(12), 2, num_workers=workers, **options)
    it, shown = iter(loader), []
    for _ in range(6):
        with contextlib.suppress(ValueError):
            assert next(it)[0].tolist() == loader.indices.tolist()
        shown.append(loader.indices.tolist())
    assert shown == [[0, 1], [2, 3], [2, 3], [6, 7], [8, 9], [10, 11]]


def test_keys_are_no_numbers() -> None:
    loader: Any = creel.DataLoader(Keyed(), 1, sampler=["a", "c"], creel=False)
    for _ in loader:
        with pytest.raises(ConfigError, match="no numbers"):
            _ = loader.indices
    stream: Any = creel.DataLoader(Stream(), creel=False)
    with pytest.raises(ConfigError, match="no numbers"):
        _ = stream.indices


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Bad(Noisy):
    """Every seventh sample cannot be read."""

    def __getitem__(self, index: int) -> Any:
        if index % 7 == 3:
            raise OSError(f"cannot read {index}")
        return self.first + index, index


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("on_error", ["skip", "substitute"])
@pytest.mark.usefixtures("either_way")
def test_indices_and_rows_fit_batches_without_bad_samples(workers: int, on_error: Any) -> None:
    rows = creel.Rehearsal(4)
    rows.add(Bad(OLD, 1000))
    loader: Any = creel.DataLoader(
        Bad(NEW), 8, True, num_workers=workers, rehearsal=rows, on_error=on_error, creel=False
    )
    for batch in itertools.chain(loader, loader):
        old = (1000 + loader.replayed).tolist()
        new = loader.indices[loader.indices < NEW].tolist()
        assert batch[0].tolist() == new + old
        if on_error == "substitute":
            assert len(old) == 4, "a row takes the place of a row"


def test_a_memory_that_grows_replays_what_was_just_read() -> None:
    """One pass over new data: no task ends, and the first block has nothing to replay."""
    rows = creel.Rehearsal(3, budget=10, every=2)
    data = Noisy(40, 500)
    loader: Any = creel.DataLoader(data, 5, True, rehearsal=rows, creel=False)
    assert loader.dataset is data
    next(iter(loader))
    loader.set_epoch(1)
    read: list[int] = []
    for step, batch in enumerate(loader):
        assert loader.indices.tolist() == [x - 500 for x in batch[0].tolist()]
        assert len(batch[0]) == (5 if step < 2 else 8)
        assert set(batch[0][5:].tolist()) <= set(read[: step // 2 * 10])
        assert len(loader.replayed) == 0, "they are no rows of the memory"
        read += batch[0][:5].tolist()
    assert [len(batch[0]) for batch in loader] == [5] * 8, "the memory keeps nothing of it"
    rows.add(data)
    assert len(rows.uids) == 10


# --- errors and warnings ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: creel.Rehearsal(0), "per_batch=0"),
        (lambda: creel.Rehearsal(4, budget=0), "budget=0"),
        (lambda: creel.Rehearsal(4, seed=-1), "seed=-1"),
        (lambda: creel.Rehearsal(4, every=0), "every=0"),
        (lambda: creel.Rehearsal(4, every=5).add(Noisy(2), order=[1, 2]), "every="),
        (lambda: creel.Rehearsal(4).add(Noisy(5), [1, 2]), r"shape \(2,\)"),
        (lambda: creel.Rehearsal(4).add(Noisy(2), [1.5, 2.0]), "numbers or texts"),
        (lambda: creel.Rehearsal(4).add(Noisy(2), order=[1.0, float("nan")]), "NaN"),
        (lambda: creel.Rehearsal(4).add(Noisy(2), order=[1.0]), r"shape \(1,\)"),
        (lambda: creel.Rehearsal(4).add(Stream()), "map-style"),
        (lambda: creel.Rehearsal(4).add(Keyed()), "with a length"),
        (lambda: creel.DataLoader(Stream(), rehearsal=memory()), "IterableDataset"),
        (lambda: creel.DataLoader(Noisy(5), None, rehearsal=memory()), "needs batches"),
        (lambda: creel.DataLoader(Noisy(5), remap="global-batch", rehearsal=memory()), "remap"),
        (lambda: creel.DataLoader(Keyed(), sampler=["a"], rehearsal=memory()), "with a length"),
    ],
)
def test_bad_arguments_are_said(make: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make()


def test_an_order_is_given_to_all_or_none() -> None:
    rows = creel.Rehearsal(4)
    rows.add(Noisy(3), order=[1, 2, 3])
    with pytest.raises(ConfigError, match="order="):
        rows.add(Noisy(3))


def test_a_dataset_that_grows_is_said() -> None:
    data = Noisy(8)
    loader = creel.DataLoader(data, 4, True, rehearsal=memory(), creel=False)
    data.n = 9
    with pytest.raises(ConfigError, match="8 samples"):
        list(loader)


def test_a_memory_that_nothing_is_added_to_is_said_once() -> None:
    rows = creel.Rehearsal(4)
    creel.DataLoader(data := Noisy(5), rehearsal=rows, creel=False)
    creel.DataLoader(data, rehearsal=rows, creel=False)
    with pytest.warns(UserWarning, match="nothing was added"):
        creel.DataLoader(Noisy(5), rehearsal=rows, creel=False)
    creel.DataLoader(Noisy(5), rehearsal=rows, creel=False)


def test_a_rehearsed_dataset_without_its_memory_is_said() -> None:
    """As accelerate makes a loader again: without arguments that it does not know."""
    loader = creel.DataLoader(Noisy(8), 4, rehearsal=memory(), creel=False)
    with pytest.warns(UserWarning, match="nothing replays them"):
        again: Any = creel.DataLoader(loader.dataset, 4, creel=False)
    assert [len(batch[0]) for batch in again] == [4, 4]


def test_a_memory_smaller_than_a_step_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    rows = creel.Rehearsal(16, budget=7, seed=1234)
    rows.add(Noisy(20, 1000), ["text", "other"] * 10)
    with caplog.at_level(logging.WARNING, "creel.loader"):
        for _ in range(2):
            loader: Any = creel.DataLoader(Noisy(8), 4, rehearsal=rows, creel=False)
            for batch in loader:
                counts = np.unique(batch[0][-16:].numpy(), return_counts=True)[1]
                assert sorted(counts.tolist()) == [2, 2, 2, 2, 2, 3, 3]
    assert caplog.text.count("it repeats them") == 1


def test_texts_are_balanced_like_numbers() -> None:
    rows = creel.Rehearsal(1, budget=9)
    rows.add(Noisy(90), ["a"] * 80 + ["b", "c"] * 5)
    labels = np.array(["a"] * 80 + ["b", "c"] * 5)[rows.uids]
    assert np.unique(labels, return_counts=True)[1].tolist() == [3, 3, 3]


def test_rows_of_tensors_are_read_like_any() -> None:
    rows = creel.Rehearsal(2)
    rows.add(TensorDataset(torch.arange(100, 110)))
    data = TensorDataset(torch.arange(4))
    loader: Any = creel.DataLoader(data, 2, sampler=SequentialSampler(data), rehearsal=rows)
    batches = [(batch[0].tolist(), (100 + loader.replayed).tolist()) for batch in loader]
    assert batches == [
        ([0, 1, *batches[0][1]], batches[0][1]),
        ([2, 3, *batches[1][1]], batches[1][1]),
    ]
    assert len({*batches[0][1], *batches[1][1]}) == 4
