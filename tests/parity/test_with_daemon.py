"""With a daemon batches also equal torch's: by rows, by samples, resumed, and if it is killed."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset

import creel
from creel.loader.client import connections
from creel.loader.data.datasets.files import FileDataset
from creel.loader.data.datasets.images import ImageFolder
from creel.loader.data.datasets.records import RecordDataset
from kit import unique_name
from shown import plain

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("either_way"),
]


def embedded() -> Iterator[dict[str, Any]]:
    """A daemon that the first loader starts; it is ended afterwards."""
    name = unique_name()
    yield {"daemon.name": name, "memory.budget": "64MB", "daemon.linger_s": "0.2"}
    connections.disconnect(name)


#: One daemon for all tests that do not disturb it, and one for each other test.
shared = pytest.fixture(scope="module")(embedded)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    rng.integers(0, 255, (500, 96), dtype=np.uint8).tofile(path / "records.bin")
    for i in range(60):
        (path / f"{i:03}.raw").write_bytes(rng.bytes(100 + i))
    for i in range(20):
        (path / "classes" / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        (path / "classes" / "ab"[i % 2] / f"{i}.png").write_bytes(rng.bytes(100 + i))
    return path


def dataset(kind: str, folder: Path) -> Any:
    if kind == "rows":
        return RecordDataset(folder / "records.bin", torch.uint8, 96)
    if kind == "labelled rows":
        return RecordDataset(folder / "records.bin", torch.float32, (4, 6), labels=range(500))
    if kind == "transformed":
        return RecordDataset(folder / "records.bin", torch.uint8, 96, transform=noisy)
    return FileDataset(folder, "*.raw", decode=bytes)


def noisy(x: torch.Tensor) -> torch.Tensor:
    return x.float() + torch.rand(1)


def run(cls: Any, data: Any, kind: str, workers: int, epochs: int = 3, **more: Any) -> list[Any]:
    torch.manual_seed(2)
    collate = list if kind == "files" else None
    loader = cls(data, 7, True, num_workers=workers, collate_fn=collate, **more)
    out = []
    for epoch in range(epochs):
        for i, batch in enumerate(loader):
            out.append(plain(batch))
            if epoch == 1 and i == 4:
                break
    return out


def other_indices(folder: Path) -> tuple[Any, list[Any]]:
    indices = list(range(30))
    data = Subset(dataset("rows", folder), indices)
    return data, [
        lambda: indices.__setitem__(slice(0, 5), [9, 8, 7, 6, 5]),
        lambda: setattr(data, "dataset", RecordDataset(folder / "records.bin", torch.uint8, 48)),
        lambda: setattr(data, "indices", torch.arange(400, 430)),
    ]


def other_parts(folder: Path) -> tuple[Any, list[Any]]:
    halves = [Subset(dataset("rows", folder), range(i, i + 20)) for i in (0, 100)]
    joined: Any = ConcatDataset(halves)
    both: Any = StackDataset(joined, ConcatDataset(halves[::-1]))
    whole: Any = Subset(both, range(40))
    return whole, [
        lambda: setattr(both, "datasets", (both.datasets[1], joined)),
        lambda: setattr(joined, "datasets", [*halves[::-1]]),
        lambda: setattr(whole, "dataset", joined),
    ]


def other_labels(folder: Path) -> tuple[Any, list[Any]]:
    data = RecordDataset(folder / "records.bin", "u1", 96, labels=range(500), transform=torch.neg)
    turned = RecordDataset(folder / "records.bin", "u1", 96, labels=range(500)[::-1])
    return data, [lambda: setattr(data, "labels", turned.labels)]


def other_samples(folder: Path) -> tuple[Any, list[Any]]:
    data = ImageFolder(folder / "classes", decode=bytes)
    return data, [lambda: setattr(data, "samples", list(data.samples)[::-1])]


@pytest.mark.parametrize(
    "make, workers",
    [
        *((make, 0) for make in (other_indices, other_parts, other_labels, other_samples)),
        *((make, 2) for make in (other_parts, other_labels)),
    ],
)
def test_a_dataset_changed_between_epochs_is_read_as_it_is_now(
    make: Any, workers: int, folder: Path, shared: dict[str, Any]
) -> None:
    def epochs(cls: Any, **more: Any) -> list[Any]:
        data, changes = make(folder)
        collate = list if make is other_samples else None
        loader = cls(data, 4, num_workers=workers, collate_fn=collate, **more)
        out = [plain(list(loader)), plain(list(loader))]
        for change in changes:
            change()
            out += [plain(list(loader)), plain(list(loader))]
        return out

    theirs = epochs(torch.utils.data.DataLoader)
    assert len(set(theirs)) == len(theirs) // 2, "a change that changes nothing shows nothing"
    assert epochs(creel.DataLoader, creel=shared) == theirs


@functools.cache
def remembered(i: int) -> float:
    return i + float(torch.rand(()))


class Remembering(torch.utils.data.Dataset[float]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> float:
        return remembered(i)


def test_a_worker_that_remembers_is_no_new_one(shared: dict[str, Any]) -> None:
    theirs = run(torch.utils.data.DataLoader, Remembering(), "", 2)
    assert run(creel.DataLoader, Remembering(), "", 2, creel=shared) == theirs


@pytest.mark.parametrize(
    "labels, workers",
    [(None, 0), (None, 2), (np.arange(500, dtype="u8"), 0), (np.arange(500, dtype=">i4"), 2)],
    ids=["-", "-, workers", "u8", ">i4, workers"],
)
def test_a_batch_that_cannot_be_collated_fails_in_torchs_words(
    labels: Any, workers: int, folder: Path, shared: dict[str, Any]
) -> None:
    """Batches without samples, and numbers that are not tensors."""

    def words(cls: Any, **more: Any) -> list[str]:
        data = RecordDataset(folder / "records.bin", "u1", 96, labels=labels)
        batches = [[3, 4], [], [5]]
        loader = cls(data, batch_sampler=batches, num_workers=workers, **more)
        out, it = [], iter(loader)
        for _ in batches:
            try:
                out.append(repr(next(it)))
            except Exception as e:  # noqa: BLE001, PERF203  any error of torch
                out.append(f"{type(e).__name__}: {str(e).splitlines()[-1]}")
        assert next(it, None) is None  # otherwise torch waits 10 s for its workers
        return out

    assert words(creel.DataLoader, creel=shared) == words(torch.utils.data.DataLoader)


@pytest.mark.parametrize(
    "kind, workers, persistent",
    [
        *((kind, 0, False) for kind in ("rows", "labelled rows", "transformed", "files")),
        *(("labelled rows", 2, False), ("transformed", 2, True), ("files", 2, True)),
    ],
)
def test_batches_are_torchs(
    kind: str, workers: int, persistent: bool, folder: Path, shared: dict[str, Any]
) -> None:
    more = {"persistent_workers": persistent}
    data = dataset(kind, folder)
    theirs = run(torch.utils.data.DataLoader, data, kind, workers, **more)
    assert run(creel.DataLoader, data, kind, workers, creel=shared, **more) == theirs


def test_a_resumed_run_reads_on_where_it_was(folder: Path, shared: dict[str, Any]) -> None:
    data = dataset("rows", folder)

    def make(workers: int) -> Any:
        generator = torch.Generator().manual_seed(4)
        return creel.DataLoader(
            data, 7, True, num_workers=workers, generator=generator, creel=shared
        )

    straight = [plain(b) for _ in range(2) for b in make(0)][:72]
    whole = make(2)
    iterator = iter(whole)
    head = [plain(next(iterator)) for _ in range(30)]
    later = make(0)
    later.load_state_dict(whole.state_dict())
    assert head + [plain(b) for b in later] == straight
