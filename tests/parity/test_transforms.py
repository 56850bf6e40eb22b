"""RecordDataset's transform, to and batch_transform: torch's batches, in any process.

One oracle is the same dataset object under torch's own loader. The other is a plain torch dataset
over the same bytes, whose samples go through the same code one by one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from test_with_daemon import embedded
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset

import creel
from creel.loader.data.datasets.records import RecordDataset

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

shared = pytest.fixture(scope="module")(embedded)
_COUNT, _LENGTH = 90, 24


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


_BUFFER = torch.zeros(64, _LENGTH, dtype=torch.int64)


def widen(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.int64)


def add_in_place(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1)


def same_memory(x: torch.Tensor) -> torch.Tensor:
    """Write all batches to one buffer."""
    return torch.mul(x, 2, out=_BUFFER[: x.numel() // _LENGTH].view(x.shape))


def shifted(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x[..., :-1], x[..., 1:]


def twice(x: torch.Tensor) -> dict[str, Any]:
    return {"a": x, "b": Pair(x, x * 2)}


def backwards(x: torch.Tensor) -> torch.Tensor:
    return x.expand(3, *x.shape).transpose(0, -2)[..., ::2].flip(-1)


def as_numpy(x: torch.Tensor) -> Any:
    return x.numpy() * np.float64(0.5)


def means(x: torch.Tensor) -> list[float]:
    return [float(row.double().mean()) for row in x]


def with_gradient(x: torch.Tensor) -> torch.Tensor:
    return x.float().requires_grad_()


class Mapped(Dataset[Any]):
    """A dataset as torch users write it."""

    def __init__(self, path: Path, fn: Callable[[torch.Tensor], Any], labels: Any) -> None:
        self.rows = np.memmap(path, np.int32, mode="r").reshape(-1, _LENGTH)
        self.fn, self.labels = fn, labels

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        sample = self.fn(torch.from_numpy(np.array(self.rows[index])))
        return sample if self.labels is None else (sample, self.labels[index])


#: Arguments of RecordDataset, and the code of a torch user's `__getitem__` for a record.
WAYS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], Any]]] = {
    "transform": ({"transform": widen}, widen),
    "transform in place": ({"transform": add_in_place}, add_in_place),
    "transform to two": ({"transform": shifted}, shifted),
    "to": ({"to": torch.int64}, widen),
    "to itself": ({"to": "int32"}, lambda x: x),
    "to, then transform": ({"to": "f4", "transform": torch.sin}, lambda x: x.float().sin()),
    "batch": ({"batch_transform": widen}, widen),
    "batch as it is": ({"batch_transform": torch.detach}, lambda x: x),
    "batch in place": ({"batch_transform": add_in_place}, add_in_place),
    "batch in kept memory": ({"to": "i8", "batch_transform": same_memory}, lambda x: x.long() * 2),
    "batch to two": ({"batch_transform": shifted}, shifted),
    "batch to a dict": ({"batch_transform": twice}, twice),
    "batch to arrays": ({"batch_transform": as_numpy}, as_numpy),
    "batch to a list": ({"batch_transform": means}, lambda x: float(x.double().mean())),
    "batch with gradients": ({"batch_transform": with_gradient}, with_gradient),
    "to, then batch": (
        {"to": torch.float64, "batch_transform": torch.cos},
        lambda x: x.double().cos(),
    ),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "records.bin"
    rng = np.random.default_rng(0)
    rng.integers(-1000, 1000, (_COUNT, _LENGTH), dtype=np.int32).tofile(path)
    return path


def records(path: Path, **more: Any) -> RecordDataset:
    return RecordDataset(path, "int32", _LENGTH, **more)


def described(batch: Any) -> Any:
    """Return everything observable of a batch: types, dtypes, shapes, strides and bits."""
    if isinstance(batch, torch.Tensor):
        seen = batch.detach()
        return str(seen.dtype), batch.stride(), batch.requires_grad, seen.tolist()
    if isinstance(batch, dict):
        return type(batch), [(k, described(v)) for k, v in batch.items()]
    if isinstance(batch, (list, tuple)):
        return type(batch), [described(v) for v in batch]
    return type(batch), batch


def epochs(cls: Any, data: Any, **more: Any) -> list[Any]:
    """Return two epochs; all batches are kept until the end, so that reuse of memory shows."""
    torch.manual_seed(3)
    loader = cls(data, **more)
    kept = [list(loader) for _ in range(2)]
    return [described(batch) for epoch in kept for batch in epoch]


LABELS = (None, range(_COUNT), [str(i) for i in range(_COUNT)])


@pytest.mark.parametrize(
    "way, labels, workers",
    [
        *((way, LABELS[1], 0) for way in WAYS),
        *((way, LABELS[1], 2) for way in list(WAYS)[::2]),
        *product(("transform", "to", "batch in place"), (LABELS[0], LABELS[2]), (0,)),
    ],
)
def test_batches_are_those_of_a_plain_dataset_and_of_torchs_loader(
    way: str, labels: Any, workers: int, path: Path, shared: dict[str, Any]
) -> None:
    given, fn = WAYS[way]
    if way == "batch with gradients" and workers:
        pytest.skip("torch sends no gradients between processes")
    data = records(path, labels=labels, **given)
    more: dict[str, Any] = {"batch_size": 7, "shuffle": True, "num_workers": workers}
    ours = epochs(creel.DataLoader, data, creel=shared, **more)
    assert ours == epochs(torch.utils.data.DataLoader, data, **more)
    if way not in {"batch to arrays", "batch to a dict"}:  # default_collate differs
        assert ours == epochs(torch.utils.data.DataLoader, Mapped(path, fn, labels), **more)


TREES: dict[str, Callable[[Any], Any]] = {
    "subset": lambda data: Subset(data, range(_COUNT - 1, 3, -2)),
    "concatenation": lambda data: ConcatDataset([data, Subset(data, [5, 6])]),
    "stack": lambda data: StackDataset(data, data),
    "wrapped": creel.wrap,
    "transformed": lambda data: creel.datasets.Transformed(data, lambda x: x * 2),
}


@pytest.mark.parametrize(
    "way, workers, tree",
    [
        *(("transform in place", 0, tree) for tree in TREES),
        *(("batch in place", 0, tree) for tree in ("concatenation", "wrapped")),
        *(("to", 2, tree) for tree in ("subset", "stack", "transformed")),
    ],
)
def test_below_other_datasets_too(
    way: str, tree: str, workers: int, path: Path, shared: dict[str, Any]
) -> None:
    more: dict[str, Any] = {"batch_size": 7, "shuffle": True, "num_workers": workers}
    whole = TREES[tree](records(path, **WAYS[way][0]))
    plain = TREES[tree](Mapped(path, WAYS[way][1], None)) if tree != "wrapped" else None
    ours = epochs(creel.DataLoader, whole, creel=shared, **more)
    assert ours == epochs(torch.utils.data.DataLoader, whole, **more)
    assert plain is None or ours == epochs(torch.utils.data.DataLoader, plain, **more)


OTHER_BATCHES: list[dict[str, Any]] = [
    {"batch_size": None},
    {"batch_size": 8, "drop_last": True},
    {"batch_size": _COUNT},
    {"batch_size": 6, "collate_fn": list},
    {"batch_sampler": [[-1], [3, 3, 3], [0, -_COUNT]]},
]


@pytest.mark.parametrize(
    "way, workers, more",
    [
        *(("to", 0, more) for more in OTHER_BATCHES[::2]),
        *(("batch to two", 0, more) for more in OTHER_BATCHES),
        *(("batch in place", 2, more) for more in OTHER_BATCHES[1:4]),
    ],
    ids=str,
)
def test_with_other_batches(
    way: str, more: dict[str, Any], workers: int, path: Path, shared: dict[str, Any]
) -> None:
    data = records(path, **WAYS[way][0])
    ours = epochs(creel.DataLoader, data, creel=shared, num_workers=workers, **more)
    assert ours == epochs(torch.utils.data.DataLoader, data, num_workers=workers, **more)


@pytest.mark.parametrize(
    "way, workers", [("transform", 0), ("to", 0), ("batch in place", 0), ("batch in place", 2)]
)
def test_batches_that_cannot_be_fail_as_torchs(
    way: str, workers: int, path: Path, shared: dict[str, Any]
) -> None:
    def tell(cls: Any, **more: Any) -> list[str]:
        data = records(path, **WAYS[way][0])
        batches: list[Any] = [[3, 4], [], [5, _COUNT], [-_COUNT - 1], ["a"], [1.5], [[1]]]
        loader = cls(data, batch_sampler=batches, num_workers=workers, **more)
        out, it = [], iter(loader)
        for _ in batches:
            try:
                out.append(repr(next(it)))
            except Exception as e:  # noqa: BLE001, PERF203  any error of torch
                out.append(f"{type(e).__name__}: {str(e).splitlines()[-1]}")
        assert next(it, None) is None
        return out

    assert tell(creel.DataLoader, creel=shared) == tell(torch.utils.data.DataLoader)


def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(x.shape)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("given", [{"transform": noisy}, {"batch_transform": noisy}], ids=list)
def test_random_numbers_are_drawn_where_and_when_torch_draws_them(
    given: dict[str, Any], workers: int, path: Path, shared: dict[str, Any]
) -> None:
    data = records(path, **given)
    more: dict[str, Any] = {"batch_size": 7, "shuffle": True, "num_workers": workers}
    ours = epochs(creel.DataLoader, data, creel=shared, **more)
    assert ours == epochs(torch.utils.data.DataLoader, data, **more)


def assigned(path: Path) -> Iterator[tuple[RecordDataset, Callable[[], None]]]:
    """Yield datasets, and functions that assign to them in the middle of an epoch."""
    for name, before, after in [
        ("to", torch.int64, torch.float32),
        ("to", None, torch.float32),
        ("batch_transform", widen, add_in_place),
        ("batch_transform", widen, None),
        ("batch_transform", None, widen),
        ("transform", None, widen),
        ("transform", widen, add_in_place),
        ("transform", widen, None),
    ]:
        data = records(path, **{name: before})
        yield data, lambda d=data, n=name, v=after: setattr(d, n, v)  # type: ignore[misc]


def test_attributes_assigned_within_an_epoch_are_seen_where_torch_sees_them(
    path: Path, shared: dict[str, Any]
) -> None:
    def run(cls: Any, **more: Any) -> list[Any]:
        out = []
        for data, assign in assigned(path):
            loader = cls(data, 9, **more)
            for epoch in range(2):
                for i, batch in enumerate(loader):
                    out.append(described(batch))
                    if (epoch, i) == (0, 4):
                        assign()
        return out

    assert run(creel.DataLoader, creel=shared) == run(torch.utils.data.DataLoader)


def test_a_sample_changed_in_place_changes_no_other(path: Path, shared: dict[str, Any]) -> None:
    """Neither its neighbours in the batch nor later batches and epochs change."""
    data = records(path)
    loader = creel.DataLoader(data, 9, collate_fn=list, creel=shared)
    truth = np.fromfile(path, np.int32).reshape(-1, _LENGTH)
    kept: list[torch.Tensor] = []
    for epoch in range(3):
        for i, row in enumerate(row for batch in loader for row in batch):
            assert row.tolist() == truth[i].tolist()
            assert row.untyped_storage().nbytes() == row.nbytes
            row.fill_(-epoch * _COUNT - i)
            kept.append(row)
    assert [int(row[-1]) for row in kept] == [-i for i in range(3 * _COUNT)]


def test_a_transform_may_keep_and_change_what_it_is_given(
    path: Path, shared: dict[str, Any]
) -> None:
    """Each record is memory of its own, as long as anyone holds it."""
    kept: list[torch.Tensor] = []

    def keep(row: torch.Tensor) -> torch.Tensor:
        assert row.untyped_storage().nbytes() == row.nbytes
        kept.append(row)
        return row.clone()

    loader = creel.DataLoader(records(path, transform=keep), 9, creel=shared)
    truth = np.fromfile(path, np.int32).reshape(-1, _LENGTH)
    for epoch in range(3):
        for batch in loader:
            n = len(batch)
            start = len(kept) % _COUNT or _COUNT
            assert batch.tolist() == truth[start - n : start].tolist()
            for i, row in enumerate(kept[-n:]):
                row.fill_(epoch * _COUNT + start - n + i)
    assert [row[0].item() for row in kept] == list(range(3 * _COUNT))


def test_a_batch_of_more_bytes_than_are_transformed_at_once(
    path: Path, shared: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("creel.loader.data.binding.gather", "creel.loader.data.datasets.records"):
        monkeypatch.setattr(f"{module}.MAX_ROWS_NBYTES", 3 * 4 * _LENGTH)
    data = records(path, transform=add_in_place)
    ours = epochs(creel.DataLoader, data, creel=shared, batch_size=7, shuffle=True)
    assert ours == epochs(torch.utils.data.DataLoader, data, batch_size=7, shuffle=True)


def changing(x: torch.Tensor) -> torch.Tensor:
    """Assign another transform to the dataset of this worker."""
    from torch.utils.data import get_worker_info

    info: Any = get_worker_info()
    if x[0] % 5 == 0:
        info.dataset.transform = widen
    return x * 3


def test_a_transform_assigned_in_a_worker_is_the_next_batchs(
    path: Path, shared: dict[str, Any]
) -> None:
    more: dict[str, Any] = {"batch_size": 7, "num_workers": 2, "persistent_workers": True}
    ours = epochs(creel.DataLoader, records(path, transform=changing), creel=shared, **more)
    data = records(path, transform=changing)
    assert ours == epochs(torch.utils.data.DataLoader, data, **more)
    assert {dtype for dtype, *_ in ours} == {"torch.int32", "torch.int64"}


@pytest.mark.parametrize("workers", [0, 1])
def test_the_time_of_a_transform_is_not_called_collation(
    path: Path, shared: dict[str, Any], workers: int
) -> None:
    def slow(x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.001)
        return x

    loader = creel.DataLoader(records(path, transform=slow), 9, num_workers=workers, creel=shared)
    for _ in range(2):
        assert sum(1 for _ in loader) == _COUNT // 9
    spent: Any = loader.stats()["busy_s" if workers else "stall_s"]
    assert spent["decode"] >= 2 * _COUNT * 0.001
