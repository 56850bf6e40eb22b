"""What a batch costs before it is read: how often `objects` is asked, how many calls it passes."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, Dataset, SequentialSampler, get_worker_info

import creel
from creel.loader.line.options.loader_args import LoaderArgs
from creel.loader.line.order.epoch_order import (
    CombinedOrder,
    EpochOrder,
    OrderCombinator,
    OrderState,
)
from creel.loader.line.order.epoch_plan import EpochPlan, PredictedEpoch
from creel.loader.line.order.generators import RandomSource
from creel.loader.line.order.streams import FromArray
from creel.loader.making.places.here import Here
from creel.loader.making.places.processes import WorkerPool
from creel.loader.making.stage import Stage

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

FILES, BATCH = 64, 4
ROOT = Path(creel.__file__).resolve().parents[2]
FOLDERS = tuple(f"{ROOT}/{folder}/" for folder in ("cache", "loader", "policies", "src"))
#: Most calls of creel's functions while a batch of bytes is taken from memory. Each costs training
#: 50 to 100 ns, and a reader of the code a jump.
MOST_CALLS = 32


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    for i in range(FILES):
        (tmp_path / f"{i:02}").write_bytes(bytes([i]) * 100)
    return sorted(map(str, tmp_path.iterdir()))


class Counted(Dataset[torch.Tensor]):
    """Declares its files, and counts the calls of `objects`: in workers, and in the trainer."""

    def __init__(self, files: list[str]) -> None:
        self.creel_uris = files
        self.calls = torch.zeros(2, len(files), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]  # torch's

    def objects(self, index: int) -> list[int]:
        self.calls[int(get_worker_info() is None), index] += 1
        return [index]

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(creel.read(self.creel_uris[index])), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.creel_uris)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.usefixtures("served")
def test_a_persons_objects_are_asked_once_a_sample_and_never_in_a_worker(
    workers: int, files: list[str]
) -> None:
    dataset = Counted(files)
    loader = creel.DataLoader(dataset, BATCH, shuffle=True, num_workers=workers)
    for epoch in range(3):
        assert sorted(int(sample[0]) for batch in loader for sample in batch) == [*range(FILES)]
        in_workers, here = dataset.calls
        assert not in_workers.any()
        # Once for this epoch and each before, and once for the next one, which is published ahead.
        assert epoch + 1 <= int(here.min()) <= int(here.max()) <= epoch + 2
    assert loader.stats()["direct_reads"] == 0


def calls_of(batches: Iterator[object]) -> Counter[str]:
    """Return the calls of creel's functions while the next batch is taken."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        name = str(Path(code.co_filename).resolve()) if event == "call" else ""
        if name.startswith(FOLDERS):
            calls[f"{Path(name).name}:{code.co_name}"] += 1

    sys.setprofile(note)
    try:
        next(batches)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.usefixtures("served")
def test_a_batch_of_bytes_in_memory_passes_few_calls(files: list[str]) -> None:
    dataset = creel.FileDataset(files, nbytes=[100] * FILES)
    loader = creel.DataLoader(dataset, BATCH, num_workers=1)
    for _ in loader:  # the daemon reads the files
        pass
    batches: Any = iter(loader)
    assert isinstance(batches._place, Here)
    counts = [calls_of(batches) for _ in range(FILES // BATCH // 2)]
    fewest = min(counts, key=lambda calls: sum(calls.values()))  # others wait, or publish a piece
    assert sum(fewest.values()) <= MOST_CALLS, fewest


class Doubled(Dataset[torch.Tensor]):
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> torch.Tensor:
        sample: torch.Tensor = self.dataset[index]
        return 2 * sample

    def __len__(self) -> int:
        return len(self.dataset)


class Doubling(Stage):
    """An option that nobody has: each sample is twice as large."""

    def inside(self, dataset: Any, collate: Any) -> tuple[Any, Any]:
        return Doubled(dataset), collate


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.usefixtures("served")
def test_no_sample_gets_past_the_stage_of_an_option(
    workers: int, files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it, these batches are bytes, copied from memory without the dataset's code."""
    monkeypatch.setattr(LoaderArgs, "stages", lambda *_: (Doubling(),))
    dataset = creel.FileDataset(files, nbytes=[100] * FILES)
    ours = creel.DataLoader(dataset, BATCH, num_workers=workers)
    for _ in range(2):
        theirs = torch.utils.data.DataLoader(Doubled(dataset), BATCH)
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("workers, kind", [(0, Here), (1, Here), (1, WorkerPool)])
@pytest.mark.usefixtures("served")
def test_a_batch_that_raised_leaves_nothing_behind(
    workers: int, kind: type, files: list[str]
) -> None:
    data = creel.FileDataset(files, nbytes=[100] * FILES)
    for lost in files[:: 2 * BATCH]:
        Path(lost).unlink()
    init = print if kind is WorkerPool else None
    it: Any = iter(creel.DataLoader(data, BATCH, num_workers=workers, worker_init_fn=init))
    assert type(it._place) is kind
    delivered = 0
    for _ in range(FILES // BATCH):
        with suppress(OSError):
            next(it)
            delivered += 1
    assert next(it, None) is None
    assert delivered == FILES // BATCH // 2
    assert not it._run.pulled.by_batch


class Backwards(OrderCombinator):
    """An order that nobody has: each batch the other way round."""

    changes, digest = True, "backwards"

    def __init__(self, batches: Any) -> None:
        self.batches, self.sampler = batches, batches.sampler
        self.batch_size, self.drop_last = batches.batch_size, batches.drop_last

    def __iter__(self) -> Iterator[list[int]]:
        return (batch[::-1] for batch in self.batches)

    def around(self, order: EpochOrder, saved: OrderState | None) -> CombinedOrder:
        del saved
        return BackwardsOrder(order)

    def check(self, saved: OrderState) -> None:
        del saved

    resume = check


class BackwardsOrder(CombinedOrder):
    def __next__(self) -> Any:
        return super().__next__()[::-1]

    def predict(self, epochs_ahead: int = 0) -> EpochPlan | None:
        plan = super().predict(epochs_ahead)
        return plan and plan.changed(backwards)


def backwards(epoch: PredictedEpoch) -> PredictedEpoch:
    items = np.asarray(epoch.stream.fork(RandomSource()).items(0, epoch.stream.total))
    return epoch._replace(stream=FromArray(items.reshape(-1, BATCH)[:, ::-1].ravel()))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.usefixtures("served")
def test_an_order_of_an_option_is_foreseen_and_resumed(workers: int, files: list[str]) -> None:
    def loader(cls: Any) -> Any:
        batches = BatchSampler(SequentialSampler(range(FILES)), BATCH, drop_last=False)
        data = creel.FileDataset(files, nbytes=[100] * FILES)
        return cls(data, batch_sampler=Backwards(batches), num_workers=workers)

    theirs, ours = list(loader(torch.utils.data.DataLoader)), loader(creel.DataLoader)
    for _ in range(2):
        assert all(map(torch.equal, ours, theirs))
    assert ours.stats()["direct_reads"] == 0
    for _ in zip(range(FILES // BATCH // 2), ours, strict=False):
        pass
    again = loader(creel.DataLoader)
    again.load_state_dict(ours.state_dict())
    assert all(map(torch.equal, again, theirs[FILES // BATCH // 2 :]))
