"""`workers="shared"`: the same batches whoever makes them, and whoever dies meanwhile."""

from __future__ import annotations

import os
import random
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import Batched, Mixed, Nones, Plain, Ragged, Raising
from test_seeding import Endless, Grouped, Noisy, epochs, jittered, noisy_collate
from test_with_daemon import embedded
from torch.utils.data import Dataset, WeightedRandomSampler

import creel
from creel.cache.memory.memfd import memfd
from creel.errors import ConfigError
from creel.loader.client.cluster.ranks import rank_and_world
from creel.policies import concurrency
from creel.policies.concurrency import workers_auto
from creel.system.limits import cores
from kit import seeds, until
from shown import plain

pytestmark = [pytest.mark.timeout(180)]

shared = pytest.fixture(scope="module")(embedded)


def loader(dataset: Any = None, **given: Any) -> Any:
    given = {"batch_size": 4, "shuffle": True, "workers": "shared", "num_workers": 2, **given}
    return creel.DataLoader(Noisy() if dataset is None else dataset, **given)


@pytest.mark.parametrize(
    "given, persistent",
    [
        ({}, False),
        ({}, True),
        ({"batch_size": None}, False),
        ({"batch_size": None}, True),
        ({"collate_fn": noisy_collate}, False),
        ({"dataset": Grouped()}, False),
        ({"batch_sampler": [deque([0, 3, 2]), {5, 9}], "batch_size": 1, "shuffle": None}, False),
        ({"shuffle": False, "sampler": WeightedRandomSampler([1, 2, 3, 4] * 5, 60)}, False),
        ({"shuffle": False, "sampler": WeightedRandomSampler([1, 2, 3, 4] * 5, 60)}, True),
        # a long message
        ({"dataset": Noisy(6000), "batch_size": 2500, "prefetch_factor": 1}, False),
    ],
    ids=lambda options: (
        (",".join(options) or "plain") if isinstance(options, dict) else str(options)
    ),
)
def test_batches_are_those_of_own_workers_with_seeds_per_sample(
    given: dict[str, Any], persistent: bool
) -> None:
    more = {**given, "persistent_workers": persistent}
    wanted = epochs(loader, workers="own", seeding="sample", **more)
    for workers in (1, 4):
        assert epochs(loader, num_workers=workers, **more) == wanted, workers


def test_batches_are_the_same_with_creel_off_and_after_a_resume(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = epochs(loader, 1)
    torch.manual_seed(5)
    first = loader(num_workers=4)
    it = iter(first)
    head = [next(it) for _ in range(2)]
    resumed = loader(num_workers=1)
    resumed.load_state_dict(first.state_dict())
    del it
    numbers = [batch[0].tolist() for batch in head + list(resumed)]
    assert numbers == [batch[0] for batch in wanted[0]]
    monkeypatch.setenv("CREEL_DISABLE", "1")
    assert epochs(loader, 1) == wanted


def test_batches_out_of_order_are_the_same_ones() -> None:
    in_order = epochs(loader, 1)[0]
    assert sorted(epochs(loader, 1, in_order=False, num_workers=3)[0]) == sorted(in_order)


class Meeting(Dataset[Any]):
    """The first sample waits until all others have been read, and the last ones do not."""

    def __init__(self, n: int) -> None:
        self.read = torch.zeros(n, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self.read)

    def __getitem__(self, i: int) -> Any:
        if i == 0:
            until(lambda: int(self.read.sum()) == len(self) - 1, 60, "the others were read")
        self.read[i] = 1
        return i


def test_an_idle_worker_makes_what_a_busy_one_would_have_made() -> None:
    """With workers of their own, batches 0 and 2 would wait for each other."""
    batches = list(loader(Meeting(4), batch_size=1, shuffle=False))
    assert [int(batch) for batch in batches] == [0, 1, 2, 3]


class Together(Dataset[Any]):
    """Each of the two samples waits until the other is being read."""

    def __init__(self) -> None:
        self.begun = torch.zeros(2, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return 2

    def __getitem__(self, i: int) -> Any:
        self.begun[i] = 1
        until(lambda: int(self.begun.sum()) == 2, 60, "both are read at once")
        return i, "text", {"x": torch.full((3,), float(i))}


def test_the_first_batch_is_made_by_all_workers_at_once() -> None:
    [(numbers, texts, rows)] = loader(Together(), batch_size=2, shuffle=False)
    assert numbers.tolist() == [0, 1]
    assert texts == ("text", "text")
    assert rows["x"].tolist() == [[0.0] * 3, [1.0] * 3]


class Uneven(Noisy):
    """Every seventh sample takes much longer; a sample says which worker made it."""

    def __getitem__(self, i: int) -> Any:
        time.sleep(0.06 if i % 7 == 0 else 0.004)
        info = torch.utils.data.get_worker_info()
        assert info is not None
        return super().__getitem__(i), info.id


def test_several_workers_make_each_batch_where_their_times_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else workers would be idle while one makes a long batch, as batches come in order."""
    # Of batches as short as these, joining takes more than that where the cores are busy.
    monkeypatch.setattr(concurrency, "_JOIN", float("inf"))
    given: dict[str, Any] = {"dataset": Uneven(60), "num_workers": 4}
    torch.manual_seed(3)
    batches = [(plain(batch), len(set(makers.tolist()))) for batch, makers in loader(**given)]
    torch.manual_seed(3)
    own = [plain(batch) for batch, _ in loader(**given, workers="own", seeding="sample")]
    assert [batch for batch, _ in batches] == own
    assert max(count for _, count in batches[8:]) > 1


@pytest.mark.parametrize(
    "kind, workers",
    [(Ragged, 3), (Raising, 2), (Raising, 3), (Nones, 2), (Mixed, 3), (Batched, 2), (Plain, 3)],
)
def test_parts_of_any_samples_end_as_own_workers_do(kind: type[Any], workers: int) -> None:
    def outcome(batches: Any) -> Any:
        try:
            return plain(next(batches))
        except Exception as e:  # noqa: BLE001  any of the dataset's, or the end
            return type(e), str(e).strip().rpartition("\n")[2]

    def outcomes(**given: Any) -> list[Any]:
        batches = iter(loader(kind(20), shuffle=False, **given))
        return [outcome(batches) for _ in range(6)]

    own = outcomes(num_workers=2, workers="own", seeding="sample")
    assert outcomes(num_workers=workers) == own


def test_a_collate_of_ones_own_sees_whole_batches() -> None:
    """Also of the first batches, which all workers would make at once."""
    given = {"collate_fn": len, "shuffle": False, "num_workers": 4}
    assert list(loader(Noisy(10), **given)) == [4, 4, 2]


def test_rows_of_the_daemon_are_the_same(shared: dict[str, Any], tmp_path: Path) -> None:
    np.arange(40 * 6, dtype=np.float32).tofile(tmp_path / "rows")
    rows = creel.RecordDataset(tmp_path / "rows", torch.float32, (6,), transform=jittered)
    options: dict[str, Any] = {"dataset": rows, "creel": shared, "persistent_workers": True}
    wanted = epochs(loader, workers="own", seeding="sample", **options)
    assert epochs(loader, **options) == wanted == epochs(loader, num_workers=3, **options)


# --- deaths ---------------------------------------------------------------------------------------


class Slow(Noisy):
    seconds, times = 0.002, 1  # every fifth sample takes so many times as long

    def __getitem__(self, i: int) -> Any:
        time.sleep(self.seconds * (self.times if i % 5 == 0 else 1))
        return super().__getitem__(i)


@pytest.mark.parametrize("seed", seeds(4))
def test_killed_workers_cost_no_batch(seed: int) -> None:
    r = random.Random(seed)
    slow = Slow(60)
    # In parts: none, the first batches, all.
    slow.seconds, slow.times = ((0.002, 1), (0.01, 1), (0.005, 8))[seed % 3]
    given: dict[str, Any] = {"dataset": slow, "num_workers": 4, "persistent_workers": True}
    trained, got = loader(**given), []
    torch.manual_seed(5)
    wanted = epochs(loader, **given)
    torch.manual_seed(5)
    for epoch in range(2):  # two workers die, and two go on
        at, batches = r.randrange(15), []
        it: Any = iter(trained)
        for number in range(15):
            if number == at:
                time.sleep(r.random() * 0.02)  # at any moment of a worker
                it._workers[epoch].kill()
            batch = next(it)
            batches.append([part.tolist() for part in batch])
        assert next(it, None) is None
        got.append(batches)
    assert got == wanted[:2]


class Deadly(Noisy):
    """Sample 13 ends its process, as a crash in C does."""

    def __getitem__(self, i: int) -> Any:
        if i == 13:
            os._exit(7)
        return i


def test_the_third_death_at_a_batch_is_torchs_error() -> None:
    it: Any = iter(loader(Deadly(), num_workers=4, shuffle=False))
    got: list[Any] = []
    with pytest.raises(RuntimeError, match=r"pid\(s\) \d+, \d+, \d+\) exited unexpectedly") as e:
        got.extend(batch.tolist() for batch in it)
    assert "exit code 7" in str(e.value.__cause__)
    got += [batch.tolist() for batch in it]  # those that had arrived, as under torch
    assert got == sorted(got)
    assert not any(13 in batch for batch in got)


def test_without_any_worker_left_it_is_torchs_error() -> None:
    trained = loader(Slow(), num_workers=2)
    it: Any = iter(trained)
    next(it)
    for process in it._workers:
        process.kill()
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        list(it)


class Once(Noisy):
    """Sample 6 ends the first process that reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.fd = memfd("test-once")

    def __getitem__(self, i: int) -> Any:
        if i == 6 and not os.pread(self.fd, 1, 0):
            os.pwrite(self.fd, b"x", 0)
            os._exit(1)
        return super().__getitem__(i)


def test_a_batch_at_which_one_worker_died_is_made_again() -> None:
    dataset = Once()
    try:
        got = epochs(loader, 1, dataset=dataset)
    finally:
        os.close(dataset.fd)
    assert got == epochs(loader, 1)


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"dataset": Endless(), "shuffle": None}, 'workers="shared" needs a map-style dataset'),
        ({"workers": "pooled"}, 'workers=\'pooled\': give "own" or "shared"'),
        ({"seeding": "batch"}, "seeding='batch': give \"sample\" or None"),
        ({"workers": "own", "num_workers": "auto"}, 'needs workers="shared"'),
    ],
)
def test_settings_that_cannot_be_shared_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        loader(**given)


def test_auto_is_twice_a_ranks_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank_and_world()[1] == 1
    assert loader(num_workers="auto").num_workers == workers_auto(cores(), 1)
    for name, value in {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    assert loader(num_workers="auto").num_workers == workers_auto(cores(), 8)


@pytest.mark.parametrize("ranks", range(1, 20))
def test_all_ranks_together_have_workers_for_all_cores(ranks: int) -> None:
    for tenths in range(1, 400):
        own = workers_auto(tenths / 10, ranks)
        assert own >= 1
        assert own * ranks >= min(tenths / 10 * ranks, tenths / 10 * 2)
        assert own <= max(tenths / 10 + 1, 1)
