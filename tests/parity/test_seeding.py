# ruff: noqa: NPY002  the global generators are what a dataset draws from
"""`seeding="sample"`: random augmentation that depends on the sample, not on who reads it.

The oracle is torch's own DataLoader over a dataset that seeds the generators by itself.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkContext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_with_daemon import embedded
from torch.utils.data import (
    Dataset,
    IterableDataset,
    Subset,
    WeightedRandomSampler,
    get_worker_info,
)

import creel
from creel.errors import ConfigError
from creel.loader.making.seeding.by_sample import next_epoch, sample_seed

pytestmark = [pytest.mark.timeout(180)]

shared = pytest.fixture(scope="module")(embedded)
_N = 23


class Noisy(Dataset[Any]):
    """A sample is its number, and a draw of each generator, of which a sample may take many."""

    def __init__(self, n: int = _N) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        for _ in range(i % 3):
            _ = torch.rand(5), np.random.rand(3), random.random()
        return i, torch.rand(2), np.random.rand(), random.random()


class SeededByHand(Noisy):
    """What a person would write: the generators are seeded before each sample, and put back."""

    base_seed = 0

    def __getitem__(self, i: int) -> Any:
        kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
        seed = sample_seed(self.base_seed, i)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        try:
            return super().__getitem__(i)
        finally:
            random.setstate(kept[0])
            np.random.set_state(kept[1])
            torch.set_rng_state(kept[2])


class Grouped(Noisy):
    """A dataset that reads its batches itself."""

    def __getitems__(self, indices: list[int]) -> Any:
        noise = torch.rand(len(indices))
        return [(i, noise[k]) for k, i in enumerate(indices)]


class Single(Grouped):
    """A dataset that reads no batches itself, unlike its base class."""

    __getitems__ = None  # type: ignore[assignment]  # torch then reads samples one by one


class Named(Noisy):
    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(int(key))


class Broken(Noisy):
    """Some samples cannot be read, which is noticed after a draw."""

    def __getitem__(self, i: int) -> Any:
        sample = super().__getitem__(i)
        if i % 7 == 2:
            raise OSError(f"sample {i} is broken")
        return sample


def noisy_collate(samples: list[Any]) -> Any:
    return [s[0] for s in samples], torch.rand(1), random.random()


def epochs(make: Callable[..., Any], count: int = 2, **given: Any) -> list[Any]:
    """Return all batches of some epochs of a loader that is made from a fixed seed."""
    torch.manual_seed(5)
    random.seed(6)
    np.random.seed(7)
    loader = make(**given)
    values = [[_plain(batch) for batch in loader] for _ in range(count)]
    values.append([torch.rand(1).item(), random.random(), np.random.rand()])  # the trainer's own
    return values


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [_plain(part) for part in value] if isinstance(value, (list, tuple)) else value


def loader(dataset: Any = None, **given: Any) -> Any:
    given = {"batch_size": 4, "shuffle": True, "seeding": "sample", **given}
    return creel.DataLoader(Noisy() if dataset is None else dataset, **given)


def test_batches_are_those_of_a_dataset_that_seeds_itself_for_any_number_of_workers() -> None:
    def by_hand() -> Any:
        dataset = SeededByHand()
        torchs = torch.utils.data.DataLoader(dataset, batch_size=4, shuffle=True)
        for _ in range(2):
            batches = iter(torchs)
            dataset.base_seed = int(batches._base_seed)
            yield batches

    torchs = epochs(lambda: _Flat(by_hand()))
    assert torchs[0] != torchs[1]
    for workers in range(5):
        assert epochs(loader, num_workers=workers) == torchs, workers


class _Flat:
    """Iterates iterators in turn."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return next(self._batches)


@pytest.mark.parametrize(
    "given, persistent",
    [
        ({}, False),
        ({}, True),
        ({"batch_size": None}, False),
        ({"collate_fn": noisy_collate}, False),
        ({"dataset": Grouped()}, False),
        ({"dataset": Single()}, False),
        ({"dataset": Single()}, True),
        ({"dataset": Subset(Noisy(), range(3, 20))}, False),
        ({"dataset": Subset(Grouped(), range(3, 20)), "drop_last": True}, False),
        ({"dataset": Named(), "shuffle": False, "sampler": [str(i) for i in range(_N)]}, False),
        ({"shuffle": False, "sampler": WeightedRandomSampler([1, 2, 3, 4] * 5, 60)}, False),
        ({"shuffle": False, "sampler": WeightedRandomSampler([1, 2, 3, 4] * 5, 60)}, True),
        ({"dataset": "wrapped"}, False),
        ({"dataset": "wrapped"}, True),
    ],
    ids=lambda options: (
        (",".join(options) or "plain") if isinstance(options, dict) else str(options)
    ),
)
def test_batches_are_equal_for_any_workers_with_creel_on_or_off(
    given: dict[str, Any], persistent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given.get("dataset") == "wrapped":  # made here: while it lives, each fork prepares it
        given = {"dataset": creel.wrap(Noisy())}
    ways = [0, 1, 3] if not persistent else [1, 2]
    results = []
    for off, numbers in (("0", ways), ("1", ways[-1:])):
        monkeypatch.setenv("CREEL_DISABLE", off)
        for workers in numbers:
            more = {"num_workers": workers, "persistent_workers": persistent}
            results.append(epochs(loader, count=3, **given, **more))
    for result in results[1:]:
        assert result == results[0]
    first, second, third, _ = results[0]
    assert first != second != third != first


def test_a_sample_that_is_read_twice_differs() -> None:
    sampler = WeightedRandomSampler([1.0] * 3, 40)
    batches, _ = epochs(loader, 1, dataset=Noisy(3), shuffle=False, sampler=sampler)
    noise = [tuple(x) for batch in batches for x in batch[1]]
    assert len(set(noise)) == len(noise) == 40


def test_a_sample_is_the_same_in_batches_of_another_size() -> None:
    def by_number(batches: list[Any]) -> dict[int, Any]:
        return {i: x for batch in batches for i, x in zip(batch[0], batch[1], strict=True)}

    small, large = (epochs(loader, 1, batch_size=size)[0] for size in (2, 7))
    assert by_number(small) == by_number(large)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_resume_in_mid_epoch_is_exact_with_another_number_of_workers(
    weighted: bool, persistent: bool
) -> None:
    def loader_of(workers: int) -> Any:
        generator = torch.Generator().manual_seed(11)
        order: dict[str, Any] = {"generator": generator}
        if weighted:
            sampler = WeightedRandomSampler([1, 2, 3] * 5, 30, generator=generator)
            order |= {"shuffle": False, "sampler": sampler}
        stays = persistent and workers > 0
        return loader(num_workers=workers, persistent_workers=stays, **order)

    whole = loader_of(2)
    wanted = [[_plain(batch) for batch in whole] for _ in range(3)]
    for workers in (0, 1, 3) if not persistent else (1, 3):
        first = loader_of(2)
        _ = list(first)
        it = iter(first)
        for _ in range(3):
            next(it)
        state = first.state_dict()
        del it, first
        torch.manual_seed(99)
        resumed = loader_of(workers)
        resumed.load_state_dict(state)
        assert [_plain(batch) for batch in resumed] == wanted[1][3:]
        assert [_plain(batch) for batch in resumed] == wanted[2]


def test_an_epoch_after_a_finished_one_goes_on_as_persistent_workers_would() -> None:
    def loader_of() -> Any:
        return loader(num_workers=1, persistent_workers=True, shuffle=False)

    whole = loader_of()
    wanted = [[_plain(batch) for batch in whole] for _ in range(3)]
    state = whole.state_dict()
    wanted.append([_plain(batch) for batch in whole])
    resumed = loader_of()
    resumed.load_state_dict(state)
    assert [_plain(batch) for batch in resumed] == wanted[3]


@pytest.mark.parametrize("kill_at", range(3))
def test_training_goes_on_exactly_after_a_worker_was_killed(kill_at: int) -> None:
    torch.manual_seed(5)
    wanted = [_plain(batch) for batch in loader(num_workers=2, batch_size=1)]
    torch.manual_seed(5)
    trained = loader(num_workers=2, batch_size=1)
    it: Any = iter(trained)
    batches = [_plain(next(it)) for _ in range(kill_at + 1)]
    it._workers[kill_at % 2].kill()
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        batches.extend(map(_plain, it))
    state = trained.state_dict()
    resumed = loader(num_workers=3, batch_size=1)
    resumed.load_state_dict(state)
    assert batches + [_plain(batch) for batch in resumed] == wanted


@pytest.mark.parametrize("on_error", ["skip", "substitute"])
@pytest.mark.parametrize("repeats", [False, True])
def test_batches_with_bad_samples_are_equal_for_any_workers(on_error: str, repeats: bool) -> None:
    def batches_of(workers: int) -> Any:
        order: dict[str, Any] = {"shuffle": True}
        if repeats:
            order = {"shuffle": False, "sampler": WeightedRandomSampler([1.0] * _N, 40)}
        return epochs(loader, dataset=Broken(), on_error=on_error, num_workers=workers, **order)

    inline = batches_of(0)
    assert inline == batches_of(1) == batches_of(3)


@pytest.mark.parametrize("workers", [0, 1])
def test_good_samples_beside_a_bad_one_are_seeded_as_ever(workers: int) -> None:
    order: dict[str, Any] = {"shuffle": False, "sampler": [5, 2, 5, 5], "num_workers": workers}
    good, bad = (
        epochs(loader, 1, dataset=kind(), on_error="substitute", **order)[0][0]
        for kind in (Noisy, Broken)
    )
    assert bad[0][1] != 2
    assert len({tuple(good[1][k]) for k in range(4)}) == 4
    assert all(bad[field][k] == good[field][k] for field in range(4) for k in (0, 2, 3))


def set_up(worker: int) -> None:
    del worker
    info = get_worker_info()
    assert info is not None
    assert type(info.dataset) is Noisy
    info.dataset.n += 1


@pytest.mark.parametrize("off", ["0", "1"])
def test_an_init_fn_sees_the_dataset_and_spawned_workers_seed_alike(
    off: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = epochs(loader, 1)
    monkeypatch.setenv("CREEL_DISABLE", off)
    # Off, they are torch's own workers: forks start sooner.
    method = "fork" if off == "1" else "spawn"
    given = {"worker_init_fn": set_up, "multiprocessing_context": method, "num_workers": 1}
    assert epochs(loader, 1, collate_fn=torch.utils.data.default_collate, **given) == here


def test_the_last_batch_has_numbers_with_creel_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CREEL_DISABLE", "1")
    for size in (4, None):
        trained = loader(batch_size=size, num_workers=1)
        for batch in trained:
            assert trained.indices.tolist() == np.atleast_1d(np.asarray(batch[0])).tolist()


def jittered(row: torch.Tensor) -> torch.Tensor:
    return row + torch.rand(1)


def jittered_batch(rows: torch.Tensor) -> torch.Tensor:
    return rows + torch.rand(1)


@pytest.mark.system
@pytest.mark.parametrize(
    "code",
    [{"transform": jittered}, {"batch_transform": jittered_batch}, {}],
    ids=lambda code: "".join(code) or "plain",
)
def test_rows_of_the_daemon_are_transformed_alike(
    code: dict[str, Any], shared: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.arange(40 * 6, dtype=np.float32).tofile(tmp_path / "rows")
    rows = creel.RecordDataset(tmp_path / "rows", torch.float32, (6,), **code)
    ways = [epochs(loader, dataset=rows, creel=shared, num_workers=k) for k in (0, 1, 2)]
    monkeypatch.setenv("CREEL_DISABLE", "1")
    ways += [epochs(loader, dataset=rows, num_workers=k) for k in (0, 2)]
    assert all(way == ways[0] for way in ways)


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class Threads(ForkContext):
    Process = threading.Thread  # type: ignore[assignment]  # as in MONAI


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"dataset": Endless(), "shuffle": None}, "map-style dataset: samples of Endless"),
        ({"seeding": "batch"}, "seeding='batch': give \"sample\" or None"),
        ({"num_workers": 1, "multiprocessing_context": Threads()}, "threads share generators"),
    ],
)
def test_settings_that_cannot_be_seeded_are_refused(
    given: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for off in ("0", "1"):
        monkeypatch.setenv("CREEL_DISABLE", off)
        with pytest.raises(ConfigError, match=says):
            loader(**given)


def test_seeds_are_pinned_and_far_apart() -> None:
    assert sample_seed(1, 2) == 13917986115785351914
    assert sample_seed(1, 2, 3, 4) == 6046382886445265815
    near = [
        sample_seed(e, n, b, p) for e in (0, 1) for n in range(4) for b in (0, 1) for p in (0, 1)
    ]
    assert len(set(near)) == len(near)
    assert next_epoch(-1) == next_epoch(2**64 - 1)
