"""A sampler or dataset that changes during or after an epoch gives torch's batches."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import creel
from creel.loader.client.client import Client
from creel.loader.data.buffers import BufferPool
from creel.loader.making.transport.batch_message import Outbox

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]


class Fickle:
    """A sampler that may be advanced at any time, and may begin differently."""

    def __init__(self, rng: random.Random) -> None:
        self.shift, self.length, self.turn = 0, 96, 60
        self.seed = rng.randrange(1 << 30)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        order = random.Random(self.seed).sample(range(WIDE), WIDE)
        for i in range(self.length):
            yield (order[i] + (self.shift if i >= self.turn else 0)) % WIDE


WIDE = 400
ROW_NBYTES = 8192


def fickle(rng: random.Random) -> tuple[Any, list[Callable[[], None]]]:
    """Return a sampler, and changes to it during or after an epoch."""
    kind = rng.randrange(4)
    if kind == 0:
        moody = Fickle(rng)
        change = {"shift": range(3), "length": (72, 96, 120), "turn": (0, 24, 60)}
        return moody, [lambda: setattr(moody, n := rng.choice([*change]), rng.choice(change[n]))]
    if kind == 1:
        listed = [rng.randrange(WIDE) for _ in range(96)]
        return listed, [lambda: listed.__setitem__(rng.randrange(96), rng.randrange(WIDE))]
    if kind == 2:
        some = list(range(96))
        length = [lambda: some.append(0), lambda: some.__delitem__(slice(0, 12))]
        return torch.utils.data.SequentialSampler(some), length
    weights = torch.rand(WIDE, generator=torch.Generator().manual_seed(rng.randrange(99)))
    weighted = torch.utils.data.WeightedRandomSampler(weights, 96)  # type: ignore[arg-type]  # as torch
    return weighted, [
        lambda: setattr(weighted, "num_samples", rng.choice((72, 96, 120))),
        lambda: setattr(weighted, "weights", weighted.weights.flip(0)),
    ]


def dawdling(memory: Callable[..., Any]) -> Callable[..., Any]:
    def dawdled(*args: Any) -> Any:
        time.sleep(0.01)
        return memory(*args)

    return dawdled


def training(cls: Any, data: Any, seed: int) -> list[Any]:
    """Return the batches of a user who changes the order, leaves early, and reads two epochs."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    sampler, changes = fickle(rng)
    workers = rng.choice([0, 1, 2])
    more: dict[str, Any] = {"num_workers": workers, "collate_fn": rng.choice([as_they_are, None])}
    if isinstance(data, creel.FileDataset):
        more["collate_fn"] = as_they_are
    if workers:
        more["prefetch_factor"] = rng.choice([1, 2, 3])
        more["persistent_workers"] = rng.random() < 0.25
        more["worker_init_fn"] = rng.choice([None, nothing])  # worker_init_fn needs workers
    loader = cls(data, 6, sampler=sampler, **more)
    got: list[Any] = []
    for _ in range(4):
        streams = [iter(loader)]
        if not loader.persistent_workers and rng.random() < 0.3:
            streams.append(iter(loader))
        change = rng.choice([0, 3, 9, 99, 99])
        stop = rng.choice([1, 5, 11, 99, 99, 99])
        for i in range(stop):
            batches = [next(stream, None) for stream in streams]
            if not any(batch is not None for batch in batches):
                break
            got.append([None if b is None else [x.numpy().tobytes() for x in b] for b in batches])
            if i == change:
                rng.choice(changes)()
        del streams
        if rng.random() < 0.3:
            rng.choice(changes)()
    return got


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give daemons room for a fifth of the files."""
    monkeypatch.setenv("CREEL_MEMORY__BUDGET", "1MiB")


def nothing(worker: int) -> None:
    pass


def as_they_are(samples: list[torch.Tensor]) -> list[torch.Tensor]:
    return samples


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    home = tmp_path_factory.mktemp("files")
    rng = np.random.default_rng(5)
    for i in range(WIDE):
        (home / f"{i:04}").write_bytes(rng.bytes(int(rng.lognormal(8.5, 1))))
    return [f"{home}/{i:04}" for i in range(WIDE)]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> creel.RecordDataset:
    path = tmp_path_factory.mktemp("rows") / "rows"
    np.random.default_rng(4).integers(0, 256, (WIDE, ROW_NBYTES), np.uint8).tofile(path)
    return creel.RecordDataset(path, torch.uint8, ROW_NBYTES)


@pytest.mark.parametrize(
    "kind, seed", [*(("rows", seed) for seed in range(4)), ("files", 0), ("files", 3)]
)
def test_a_changed_order_gives_torchs_batches(
    paths: list[str], rows: Any, served: str, kind: str, seed: int, monkeypatch: Any
) -> None:
    if seed % 2:  # threads gather rows, and pause between looking them up and copying them
        monkeypatch.setattr("creel.loader.line.batches.places.INLINE_NBYTES", 0)
        monkeypatch.setattr(Outbox, "memory", dawdling(Outbox.memory))
        monkeypatch.setattr(BufferPool, "array", dawdling(BufferPool.array))
    data = rows if kind == "rows" else creel.FileDataset(paths)
    next(iter(creel.DataLoader(creel.FileDataset(paths))))
    stop = threading.Event()
    others = threading.Thread(target=_fill, args=(served, stop))
    others.start()
    try:
        assert training(creel.DataLoader, data, seed) == training(
            torch.utils.data.DataLoader, data, seed
        )
    finally:
        stop.set()
        others.join()


def _transform(subset: Any, rows: Any) -> None:
    rows.transform = None if rows.transform else torch.bitwise_not
    del subset


def _in_place(subset: Any, rows: Any) -> None:
    subset.indices[:] = subset.indices[7:] + subset.indices[:7]
    del rows


def _reordered(subset: Any, rows: Any) -> None:
    subset.indices = [*subset.indices[1:], *subset.indices[:1]]
    del rows


def _other(subset: Any, rows: Any) -> None:
    subset.dataset = torch.utils.data.ConcatDataset([rows, rows])


@pytest.mark.parametrize("change", [_transform, _in_place, _reordered, _other])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.usefixtures("served")
def test_a_dataset_changed_in_an_epoch_is_read_as_by_torch(
    rows: Any, workers: int, change: Callable[[Any, Any], None]
) -> None:
    """At once if the trainer reads itself; in the next epoch by workers, which have a copy."""

    def seen(cls: Any) -> list[float]:
        subset = torch.utils.data.Subset(rows, list(range(0, WIDE, 2)))
        data: Any = torch.utils.data.ConcatDataset([subset, rows])
        loader = cls(data, 20, num_workers=workers)
        out: list[float] = []
        try:
            for _ in range(2):
                for i, batch in enumerate(loader):
                    out.append(batch.double().mean().item())
                    if i % 8 == 3:
                        change(subset, rows)
        finally:
            rows.transform = None
        return out

    assert seen(creel.DataLoader) == seen(torch.utils.data.DataLoader)


def _fill(name: str, stop: threading.Event) -> None:
    """Evict all unpinned objects, and put others in their place, again and again."""
    with Client.connect(name, "cli") as client:
        while not stop.wait(0.002):
            for dataset in client.ask("datasets")["datasets"]:
                client.ask("drop", dataset=dataset["dataset"])
                client.ask("warm", dataset=dataset["dataset"])
