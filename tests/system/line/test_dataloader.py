"""creel.DataLoader beyond parity: class, platform, pinning, the next epoch, resuming."""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

import creel
from creel.errors import ConfigError
from creel.loader.line.batches.iterator import WorkerIter
from squares import Squares, pids

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("nothing_stays_behind")]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(5) if info is None or info.id == 0 else ())


def test_a_loader_pickles_and_copies_without_its_workers() -> None:
    loader = creel.DataLoader(Squares(), 4, num_workers=1, creel={"daemon.name": "x"})
    list(loader)
    for other in (pickle.loads(pickle.dumps(loader)), copy.copy(loader)):
        assert other.creel == {"daemon.name": "x"}
        assert [int(b[0]) for b in other] == [(4 * i) ** 2 for i in range(10)]
    with pytest.raises(NotImplementedError):
        pickle.dumps(iter(loader))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("name", "value"), [("_index_sampler", [[3, 4], [8]]), ("_auto_collation", False)]
)
def test_a_subclass_may_say_what_is_iterated(name: str, value: object, workers: int) -> None:
    def batches(cls: type[Any]) -> list[Any]:
        torch.manual_seed(1)
        mine = type("Mine", (cls,), {name: property(lambda _: value)})
        loader = mine(Squares(), 8, shuffle=True, num_workers=workers)
        return [[b.tolist() for b in loader] for _ in range(2)]

    assert batches(creel.DataLoader) == batches(torch.utils.data.DataLoader)


def test_the_type_can_be_subscribed_and_arguments_stay_attributes() -> None:
    assert creel.DataLoader[int] is not None
    loader = creel.DataLoader(Squares(), creel=False)
    assert vars(loader) | {"creel": False} == vars(loader)
    with pytest.raises(ValueError, match="batch_size attribute should not be set"):
        loader.batch_size = 3
    with pytest.raises(TypeError, match="nonsense"):
        creel.DataLoader(Squares(), nonsense=1)


def test_iterable_datasets_go_to_torchs_own_workers() -> None:
    loader = creel.DataLoader(Stream(), 2, num_workers=2)
    assert [b.tolist() for b in loader] == [[0, 1], [2, 3], [4]]
    assert not isinstance(iter(loader), WorkerIter)


@pytest.mark.parametrize(
    "env, given, disabled",
    [
        ("1", None, True),
        ("yes", None, True),
        ("no", None, False),
        ("", {"loader.disable": True}, True),
        ("1", {"loader.disable": False}, True),
    ],
)
def test_disabled_it_is_torchs(
    monkeypatch: pytest.MonkeyPatch, env: str, given: dict[str, object] | None, disabled: bool
) -> None:
    monkeypatch.setenv("CREEL_DISABLE", env)
    iterator = iter(creel.DataLoader(Squares(), 4, num_workers=1, creel=given))
    torchs = torch.utils.data.dataloader._MultiProcessingDataLoaderIter
    assert (type(iterator) is torchs) == disabled


@pytest.mark.parametrize(
    "workers, given, wrong",
    [
        (1, None, {"MEMORY__BUGDET": "1GB"}),
        (0, True, {"MEMORY__BUDGET": "rubbish"}),
        (1, {"loader.nonsense": 1}, {"CONFIG": "creel.toml"}),
    ],
)
def test_disabled_nothing_of_ours_can_be_wrong(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    wrong: dict[str, str],
    given: Any,
    workers: int,
) -> None:
    """Whichever method of a loader or of a wrapped dataset is called."""
    monkeypatch.chdir(tmp_path)
    Path("creel.toml").write_text("nonsense = 1")
    monkeypatch.setenv("CREEL_DISABLE", "1")
    for name, value in wrong.items():
        monkeypatch.setenv(f"CREEL_{name}", value)
    for whole in (False, True):
        wrapped = creel.wrap(Squares(), whole=whole)
        assert torch.equal(wrapped[3], Squares()[3])
        for kind in (creel.DataLoader, torch.utils.data.DataLoader):
            assert len(list(kind(wrapped, 4, num_workers=workers))) > 0
        assert len(pickle.loads(pickle.dumps(wrapped))) == len(wrapped)
    ours = creel.DataLoader(Squares(), 4, num_workers=workers, creel=given, on_error="skip")
    for _ in range(2):
        with pytest.warns(UserWarning, match="cannot be resumed"):
            ours.load_state_dict(ours.state_dict())
        ours.set_epoch(1)
        assert ours.stats()
        assert copy.copy(ours).stats()
        assert len(list(ours)) == len(ours)


def test_elsewhere_than_on_linux_it_is_torchs_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("creel.loader.dataloader.sys.platform", "darwin")
    monkeypatch.setattr("creel.loader.dataloader._warned", False)  # once in a process
    with pytest.warns(UserWarning, match="creel needs Linux") as warned:
        loader = creel.DataLoader(Squares(), 4, num_workers=1)
    assert warned[0].filename == __file__
    assert not isinstance(iter(loader), WorkerIter)
    creel.DataLoader(Squares(), 4)


def test_what_only_a_newer_torch_knows_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `worker_method="thread"` and `stateful=` of the releases to come, on its workers."""
    begin = torch.utils.data.DataLoader.__init__

    def newer(loader: Any, *args: Any, worker_method: str = "multiprocessing", **more: Any) -> None:
        loader.worker_method = worker_method
        begin(loader, *args, **more)

    monkeypatch.setattr(torch.utils.data.DataLoader, "__init__", newer)
    known = dict(inspect.signature(newer).parameters)
    monkeypatch.setattr("creel.loader.dataloader._OF_TORCH", known)
    monkeypatch.setattr("creel.loader.dataloader._warned", False)
    new: Any = {"worker_method": "thread"}
    with pytest.warns(UserWarning, match="worker_method= is of a newer torch"):
        loader = creel.DataLoader(Squares(), 4, num_workers=1, **new)
    assert not isinstance(iter(loader), WorkerIter)
    assert [len(batch) for batch in loader] == [len(b) for b in creel.DataLoader(Squares(), 4)]
    with pytest.raises(ConfigError, match="do not go with worker_method="):
        creel.DataLoader(Squares(), 4, num_workers=1, replicate=2, **new)
    default: Any = {"worker_method": "multiprocessing"}
    assert isinstance(iter(creel.DataLoader(Squares(), 4, num_workers=1, **default)), WorkerIter)


def test_elsewhere_than_on_linux_it_can_be_imported() -> None:
    """Imports need nothing that Windows lacks; torch and others are imported first, as usual."""
    program = (
        "import sys, os, mmap, torch.utils.data, pyarrow.fs, zmq, msgspec, xxhash, psutil;"
        "del os.register_at_fork, os.memfd_create, os.sched_getaffinity, os.fork, os.getuid;"
        "del mmap.MAP_SHARED, mmap.MAP_PRIVATE, mmap.PROT_READ, mmap.PROT_WRITE;"
        "sys.modules.update(fcntl=None, resource=None, termios=None);"
        "import sysconfig; [sysconfig.get_path(p) for p in sysconfig.get_path_names()];"
        "sys.platform = 'win32'; import creel;"
        "assert [b.tolist() for b in creel.DataLoader(range(3), 2)] == [[0, 1], [2]]"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert out.stderr.count("creel needs Linux") == 1


def test_a_state_that_cannot_be_kept_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = creel.DataLoader(Squares(), 4)
    next(iter(loader))
    state = loader.state_dict()
    assert state["batches"] == 1
    monkeypatch.setenv("CREEL_DISABLE", "1")
    disabled = creel.DataLoader(Squares(), 4)
    with pytest.warns(UserWarning, match="cannot be resumed"):
        disabled.load_state_dict(state)
    assert len(list(disabled)) == len(disabled)
    with pytest.warns(UserWarning, match="cannot be resumed"):
        assert disabled.state_dict()["batches"] == 0  # the loaded state was not used, either


@pytest.mark.skipif(
    not hasattr(getattr(torch, "accelerator", None), "current_device_index"),
    reason="torch < 2.8 asks torch.cuda",
)
def test_batches_may_be_pinned_by_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
    loader = creel.DataLoader(
        Squares(), 4, num_workers=2, pin_memory=True, collate_fn=Pinnable, prefetch_factor=1
    )
    for _ in range(2):
        assert [b.pinned for b in loader] == ["pt_data_pin"] * 10
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(ValueError, match="Caught ValueError in pin memory thread for device 0"):
        list(creel.DataLoader(Squares(), 4, num_workers=1, pin_memory=True, collate_fn=Unpinnable))


class Pinnable:
    pinned = ""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def pin_memory(self) -> Pinnable:
        self.pinned = threading.current_thread().name
        return self


class Unpinnable(Pinnable):
    def pin_memory(self) -> Pinnable:
        raise ValueError("no")


# --- the next epoch -------------------------------------------------------------------------------


class Noisy(Squares):
    def __getitem__(self, i: int) -> Any:
        return torch.rand(3) + i, self.n


def epochs(cls: Any, between: Any, n: int = 3) -> list[Any]:
    torch.manual_seed(3)
    loader = cls(Noisy(), 4, shuffle=True, num_workers=2)
    out = []
    for epoch in range(n):
        out += [b[0].tolist() for b in loader]
        between(loader, epoch)
    return out


@pytest.mark.parametrize("change", ["nothing", "draw", "mutate", "prefetch", "reseed", "sampler"])
def test_changes_between_epochs_are_seen_as_under_torch(change: str) -> None:
    def between(loader: Any, epoch: int) -> None:
        if epoch == 1 and change == "draw":
            torch.rand(1)
        elif epoch == 1 and change == "mutate":
            loader.dataset.n -= 7
        elif epoch == 1 and change == "prefetch":
            loader.prefetch_factor = 1
        elif epoch == 1 and change == "reseed":
            torch.manual_seed(99)
        elif epoch == 1 and change == "sampler":
            loader.sampler.replacement = True

    assert epochs(creel.DataLoader, between) == epochs(torch.utils.data.DataLoader, between)


def test_a_left_epoch_and_a_failing_worker_do_not_mix_with_the_next_epoch() -> None:
    loader = creel.DataLoader(Squares(8), 2, num_workers=2, prefetch_factor=3)
    for _ in range(3):
        iterator = iter(loader)
        assert next(iterator).tolist() == [0, 1]
    os.kill(pids(iterator)[1], signal.SIGKILL)
    del iterator
    assert [b.tolist() for b in loader] == [[0, 1], [4, 9], [16, 25], [36, 49]]


# --- resuming ---------------------------------------------------------------------------------


#: Workers before and after a run is resumed, and where it stops: 10 is the end of the epoch.
RESUMED = [(0, 2, 3), (2, 0, 3), (2, 3, 3), (0, 2, 0), (2, 0, 0), (0, 0, 10), (2, 3, 10)]


@pytest.mark.parametrize(
    "workers, later, stop, seeded",
    [(*case, False) for case in RESUMED] + [(0, 0, 3, True), (2, 3, 10, True)],
)
def test_a_run_resumes_to_the_bit(workers: int, later: int, seeded: bool, stop: int) -> None:
    def make(n: int) -> Any:
        generator = torch.Generator().manual_seed(5) if seeded else None
        return creel.DataLoader(Squares(), 4, shuffle=True, num_workers=n, generator=generator)

    torch.manual_seed(1)
    whole = make(workers)
    first = [b.tolist() for b in whole]
    second, state = [], whole.state_dict()
    for i, batch in enumerate(whole):
        if i == stop:
            break
        second.append(batch.tolist())
        state = whole.state_dict()
    if stop == 10:  # the end: a new epoch follows
        state = whole.state_dict()
    torch.manual_seed(1)
    straight = make(workers)
    assert [b.tolist() for b in straight] == first
    expected = [b.tolist() for b in straight]
    after = [b.tolist() for b in straight]
    assert second == expected[:stop]

    torch.manual_seed(77)
    resumed = make(later)
    resumed.load_state_dict(pickle.loads(pickle.dumps(state)))
    assert resumed.state_dict() == state or stop in (0, 10)
    if 0 < stop < 10:
        assert [b.tolist() for b in resumed] == expected[stop:]
        if seeded:
            assert [b.tolist() for b in resumed] == after
    elif seeded:
        assert [b.tolist() for b in resumed] == (after if stop == 10 else expected)
    assert len(list(resumed)) == 10


class Faulty(Squares):
    """Batch 1, of four samples, always fails."""

    def __getitem__(self, i: int) -> Any:
        if 4 <= i < 8:
            raise OverflowError(i)
        return super().__getitem__(i)


@pytest.mark.parametrize(("workers", "stop", "follows"), [(0, 2, 4), (2, 3, 12), (2, 4, 16)])
def test_a_batch_that_raised_is_tried_again_unless_training_went_on(
    workers: int, stop: int, follows: int
) -> None:
    loader = creel.DataLoader(Faulty(), 4, num_workers=workers)
    iterator = iter(loader)
    for i in range(stop):
        with pytest.raises(OverflowError) if i == 1 else contextlib.nullcontext():
            next(iterator)
    state = loader.state_dict()
    resumed: Any = creel.DataLoader(Squares(), 4, num_workers=workers)
    resumed.load_state_dict(state)
    assert next(iter(resumed)).tolist()[0] == follows**2


class Counting:
    """Another order in each epoch, which it counts itself."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        self.epoch += 1
        yield from torch.randperm(40, generator=generator).tolist()


class Told(Counting):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Saved(Counting):
    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


class Placed(Saved):
    """Continues in mid-epoch, by a state that is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.state = {"epoch": 0, "place": 0}

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.state["epoch"])
        for i in torch.randperm(40, generator=generator).tolist()[self.state["place"] :]:
            self.state["place"] += 1
            yield i
        self.state["epoch"] += 1
        self.state["place"] = 0

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = dict(state)


@pytest.mark.parametrize(
    "workers, later, stop, kind",
    [(*case, Placed) for case in RESUMED]
    + [(*case, kind) for case in [(0, 0, 3), (0, 0, 10)] for kind in (Told, Saved)],
)
def test_a_sampler_of_ones_own_is_resumed_by_what_it_says_of_itself(
    workers: int, later: int, stop: int, kind: Any
) -> None:
    batched = later > 0

    def make(n: int) -> Any:
        own = kind()
        batches = torch.utils.data.BatchSampler(own, 4, False) if batched else None
        more: Any = {"batch_sampler": batches} if batched else {"batch_size": 4, "sampler": own}
        return creel.DataLoader(Squares(), num_workers=n, **more)

    straight = make(0)
    epochs = [[b.tolist() for b in straight] for _ in range(4)]
    assert epochs[0] != epochs[1]
    whole = make(workers)
    list(whole)
    iterator = iter(whole)
    for _ in range(stop):
        next(iterator)
    assert next(iterator, None) is not None or stop == 10
    state = whole.state_dict() if stop == 10 else whole.state_dict(delivered=stop)

    resumed = make(later)
    resumed.load_state_dict(json.loads(json.dumps(state)))
    remaining = [b.tolist() for b in resumed]
    assert remaining == (epochs[2] if stop == 10 else epochs[1][stop:])
    assert [b.tolist() for b in resumed] == epochs[3 if stop == 10 else 2]


def test_a_sampler_that_says_nothing_of_itself_is_told_of() -> None:
    loader = creel.DataLoader(Squares(), 4, sampler=Counting())
    list(loader)
    state = loader.state_dict()
    resumed = creel.DataLoader(Squares(), 4, sampler=Counting())
    with pytest.warns(UserWarning, match="Counting has neither .* are not resumed") as warned:
        resumed.load_state_dict(state)
    assert warned[0].filename == __file__


def test_a_state_dict_of_a_sampler_that_fails_costs_no_batch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing(Saved):
        def state_dict(self) -> dict[str, int]:
            raise ValueError("here")

    loader = creel.DataLoader(Squares(), 4, sampler=Failing())
    assert len(list(loader)) == 10
    assert "Failing.state_dict() fails" in caplog.text


def test_a_state_of_another_sampler_is_refused_at_once() -> None:
    loader = creel.DataLoader(Squares(), 4, sampler=Told())
    next(iter(loader))
    with pytest.raises(ConfigError, match="is of a Told, this loader has a Seq"):
        creel.DataLoader(Squares(), 4).load_state_dict(loader.state_dict())


def test_a_state_before_the_first_epoch_and_an_empty_one_are_fine() -> None:
    loader = creel.DataLoader(Squares(), 4)
    loader.load_state_dict(loader.state_dict())
    loader.load_state_dict({})
    assert len(list(loader)) == 10
    with pytest.raises(ConfigError, match="version 7"):
        loader.load_state_dict({"version": 7})


def test_a_caller_that_runs_ahead_says_what_it_used() -> None:
    loader = creel.DataLoader(Squares(), 4, num_workers=1)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    other = creel.DataLoader(Squares(), 4)
    other.load_state_dict(loader.state_dict(delivered=4))
    assert next(iter(other)).tolist() == [i * i for i in range(16, 20)]


def test_set_epoch_reaches_sampler_and_dataset_once() -> None:
    class Told(Squares):
        def set_epoch(self, epoch: int) -> None:
            self.n += epoch

    sampler = torch.utils.data.DistributedSampler(Squares(), 2, 0)  # type: ignore[var-annotated]
    loader = creel.DataLoader(Told(), 4, sampler=sampler)
    loader.set_epoch(6)
    assert (sampler.epoch, loader.dataset.n) == (6, 46)  # type: ignore[attr-defined]
