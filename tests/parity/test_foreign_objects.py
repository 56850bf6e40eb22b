"""Objects of which everything raises that torch does not call: batches are torch's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, get_worker_info

import creel

pytestmark = pytest.mark.timeout(120)

N = 20
RAISES = [ValueError, KeyError, RuntimeError, AttributeError, NotImplementedError, TypeError]


class Untouchable:
    """Raises whatever is asked of it; torch asks only what a subclass defines."""

    error: type[Exception] = RuntimeError

    def __getattr__(self, name: str) -> NoReturn:
        if name == "__getitems__":  # torch looks for it
            raise AttributeError(name)
        raise self.error(f"torch does not ask for {name}")

    def _raises(self, *_: object) -> NoReturn:
        raise self.error("torch does not call this")

    __len__ = __bool__ = __eq__ = __hash__ = __repr__ = __str__ = _raises
    __copy__ = __deepcopy__ = __reduce_ex__ = __length_hint__ = __call__ = _raises
    epoch = sampler = batch_size = drop_last = generator = data_source = property(_raises)
    set_epoch = state_dict = load_state_dict = foreseeable = rank = property(_raises)
    num_replicas = num_processes = batch_sampler = dataset = datasets = property(_raises)
    transform = labels = targets = creel_uris_ = keeping = property(_raises)


class Samples(Untouchable, Dataset[int]):
    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(1)


class Batches(Untouchable):
    def __iter__(self) -> Iterator[Any]:
        for at in range(0, N, 4):
            yield Batch(range(at, at + 4))


class Singles(Untouchable):
    def __iter__(self) -> Iterator[Any]:
        return iter(range(N))


class Batch(list[int]):
    """A batch that only iterates."""

    def _raises(self, *_: object) -> NoReturn:
        raise RuntimeError("torch does not call this")

    __len__ = __eq__ = __repr__ = __getitem__ = _raises


def batches_of(cls: Any, dataset: Any, **arguments: Any) -> list[list[Any]]:
    torch.manual_seed(7)
    loader = cls(dataset, **arguments)
    return [[part.tolist() for part in batch] for _ in range(2) for batch in loader]


@pytest.mark.parametrize("arguments", [{"batch_sampler": Batches}, {"sampler": Singles}], ids=str)
@pytest.mark.parametrize("workers, error", [*((0, error) for error in RAISES), (2, ValueError)])
def test_what_torch_does_not_call_may_raise(
    workers: int, error: type[Exception], arguments: dict[str, Any], monkeypatch: Any
) -> None:
    monkeypatch.setattr(Untouchable, "error", error)
    given = {name: make() for name, make in arguments.items()} | {"num_workers": workers}
    wanted = batches_of(DataLoader, Samples(), **given)
    for more in ({}, {"creel": False}, {"on_error": "skip"}):
        assert batches_of(creel.DataLoader, Samples(), **given, **more) == wanted
    loader: Any = creel.DataLoader(Samples(), **given)
    for more in ({"seeding": "sample"}, {"workers": "shared"}):
        assert len(batches_of(creel.DataLoader, Samples(), **given, **more)) == len(wanted)
    loader.set_epoch(3)
    assert "Samples" in loader._repr_html_()


class Unfinished(Subset[Any]):
    """Opens the dataset below in each worker only."""

    def __init__(self) -> None:
        self.indices = range(N)


def finish(worker: int) -> None:
    del worker
    info: Any = get_worker_info()
    info.dataset.dataset = list(range(100, 100 + N))


def test_a_dataset_may_be_unfinished_until_a_worker_has_it() -> None:
    given: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "worker_init_fn": finish}
    wanted, got = ([b.tolist() for b in cls(Unfinished(), **given)] for cls in CLASSES)
    assert got == wanted


class OfOnesOwn(DistributedSampler[Any]):
    """Derives from torch's class without a call of its constructor."""

    def __init__(self, numbers: range) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[Any]:
        return iter(self.numbers)


CLASSES = (DataLoader, creel.DataLoader)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_may_be_one_of_torch_s_in_name_only(workers: int) -> None:
    data: Any = range(9)
    given: Any = {"sampler": OfOnesOwn(range(9)), "batch_size": 2, "num_workers": workers}
    wanted, got = ([b.tolist() for b in cls(data, **given)] for cls in CLASSES)
    assert got == wanted
