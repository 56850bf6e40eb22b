"""A dataset that says which bytes its samples map finds their pages in memory, in any order."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Subset,
)

import creel
from creel.loader.line.steps import mapped_pages
from creel.loader.line.steps.mapped_pages import BLOCK_NBYTES
from kit import descriptors, until
from programs import Program
from testbed.same import needs_fuse, same
from testbed.slowfs import SlowFS

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

N, NBYTES = 24, 2 * BLOCK_NBYTES


class Mapped(Dataset[Any]):
    """Samples of a file that a person has mapped; the kernel reads nothing around a fault."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self.rows: Any = None

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return torch.from_numpy(np.array(self.mapped()[i]))

    def mapped(self) -> Any:
        if self.rows is None:
            self.rows = np.memmap(self.path, np.uint8, "r", shape=(N, NBYTES))
            self.rows._mmap.madvise(mmap.MADV_RANDOM)
        return self.rows

    def ranges(self, i: int) -> Any:
        return [(self.path, i * NBYTES, NBYTES // 2), (Path(self.path), i * NBYTES, NBYTES)]

    def resident(self) -> set[int]:
        """Return the samples of which memory has all pages."""
        pages = (ctypes.c_ubyte * (N * NBYTES // mmap.PAGESIZE))()
        address = ctypes.c_void_p(self.mapped().ctypes.data)
        assert not ctypes.CDLL(None).mincore(address, ctypes.c_size_t(N * NBYTES), pages)
        whole = (np.frombuffer(bytes(pages), np.uint8).reshape(N, -1) & 1).all(1)
        return set(np.flatnonzero(whole).tolist())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    path = tmp_path / "data/rows"
    np.random.default_rng(0).integers(0, 256, N * NBYTES, np.uint8).tofile(path)
    return path


@pytest.fixture
def slow(source: Path, tmp_path: Path) -> Iterator[Any]:
    fs: Any = SlowFS(str(source.parent), str(tmp_path / "mount"), page_cache=True, read_latency=1.0)  # type: ignore[no-untyped-call]
    with fs:
        yield fs


@contextmanager
def nothing_stays(path: str) -> Iterator[None]:
    """Fail unless the thread has ended and has closed a file, beside one mapping of it."""
    yield
    assert "creel-pages" not in {thread.name for thread in threading.enumerate()}
    assert sum(opened == path for _, opened in descriptors()) <= 1


def shuffled(dataset: Any) -> Any:
    return RandomSampler(dataset, generator=torch.Generator().manual_seed(3))


ORDERS: dict[str, Callable[[Any], Any]] = {
    "in order": lambda _: None,
    "shuffled": shuffled,
    "a rank's": lambda dataset: DistributedSampler(dataset, 2, 1, shuffle=True),
}
TREES: dict[str, Callable[[Any], Any]] = {
    "alone": lambda dataset: dataset,
    "a subset": lambda dataset: Subset(dataset, list(range(N - 1, 3, -1))),
    "parts": lambda dataset: ConcatDataset([Subset(dataset, [3, 1, 2]), dataset]),
}


@needs_fuse
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "order, tree",
    [*((order, "alone") for order in ORDERS), ("shuffled", "a subset"), ("shuffled", "parts")],
)
def test_pages_are_there_before_a_sample_is_read(
    slow: Any, source: Path, workers: int, order: str, tree: str
) -> None:
    dataset, theirs = Mapped(f"{slow.mountpoint}/rows"), TREES[tree](Mapped(source))
    ours = TREES[tree](dataset)
    more: Any = {"batch_size": 2, "num_workers": workers}
    expected = list(DataLoader(theirs, sampler=ORDERS[order](theirs), **more))
    used = {
        i for i in range(N) if any((Mapped(source)[i] == row).all() for b in expected for row in b)
    }
    with nothing_stays(dataset.path):
        batches = iter(creel.DataLoader(ours, sampler=ORDERS[order](ours), **more))
        found = [next(batches)]
        until(lambda: used <= dataset.resident())  # of its own accord: nobody asks for a batch
        reads = slow.totals()["reads"]
        found += batches
        assert slow.totals()["reads"] == reads
        del batches
    assert same(found, expected)


@needs_fuse
def test_no_more_than_the_window_is_ahead(slow: Any) -> None:
    dataset, ahead = Mapped(f"{slow.mountpoint}/rows"), 4
    order = list(shuffled(dataset))
    window = {"window.bytes": ahead * NBYTES}
    loader = creel.DataLoader(dataset, 1, sampler=shuffled(dataset), creel=window)
    for done, _ in enumerate(loader, 1):
        soon = set(order[: done + ahead // 2])
        until(lambda soon=soon: soon <= dataset.resident())  # type: ignore[misc]
        assert dataset.resident() <= set(order[: done + ahead])


@needs_fuse
def test_a_program_ends_in_the_middle_of_an_epoch(slow: Any) -> None:
    code = """
    import sys, torch, creel
    from system.test_mapped_pages import Mapped

    batches = iter(creel.DataLoader(Mapped(sys.argv[1]), 1))
    print(len(next(batches)))
    """
    slow.set(read_latency=5.0)
    program = Program(code, f"{slow.mountpoint}/rows")
    assert program.communicate() == ("1\n", "")
    assert program.returncode == 0


def _raises(_: int) -> Any:
    raise KeyError("ranges of a person")


WRONG: dict[str, Callable[[int], Any]] = {
    "raises": _raises,
    "no list": lambda _: None,
    "no range": lambda i: [("rows", i)],
    "no path": lambda i: [(i, 0, 1)],
    "before the file": lambda _: [("rows", -1, 1)],
}
HARMLESS: dict[str, Callable[[int], Any]] = {
    "nothing": lambda _: [],
    "a missing file": lambda i: [(f"/nowhere/{i}", 0, 1 << 60)],
    "behind the end": lambda _: [(__file__, 1 << 40, 1 << 40), (__file__, 10, 1 << 60)],
    "a folder": lambda _: [("/", 0, 4096)],
    "a device": lambda _: [(os.devnull, 0, 4096)],
    "elsewhere": lambda i: [(f"s3://bucket/{i}", 0, 4096), ("a\0b", 0, 1)],
    "many files": lambda i: [(__file__, i, 1)] + [(f"/proc/self/{k}", 0, 1) for k in range(40)],
}


@pytest.mark.parametrize("kind", [*WRONG, *HARMLESS])
def test_what_a_dataset_says_wrongly_never_reaches_training(
    source: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    class Odd(Mapped):
        def ranges(self, i: int) -> Any:
            return (WRONG | HARMLESS)[kind](i)

    monkeypatch.setattr(mapped_pages, "_warned", set[str]())
    with caplog.at_level(logging.WARNING, "creel"), nothing_stays(__file__):
        for workers in 0, 2:
            ours, theirs = Odd(source), Mapped(source)
            loader = creel.DataLoader(ours, 4, sampler=shuffled(ours), num_workers=workers)
            assert same(list(loader), list(DataLoader(theirs, 4, sampler=shuffled(theirs))))
    lines = [one for one in caplog.messages if "ahead" in one]
    assert len(lines) == (kind in WRONG), lines


def test_a_loader_that_is_switched_off_asks_nothing(source: Path) -> None:
    class Asked(Mapped):
        def ranges(self, i: int) -> Any:
            raise AssertionError(i)

    assert len(list(creel.DataLoader(Asked(source), 4, creel=False))) == N // 4


def test_an_order_that_was_foreseen_wrongly_ends_it(source: Path) -> None:
    class Other:
        foreseeable = True

        def __init__(self) -> None:
            self.order = list(range(N))

        def __iter__(self) -> Iterator[int]:
            return iter(self.order)

        def __len__(self) -> int:
            return N

        def __deepcopy__(self, memo: object) -> Other:
            copied = Other()
            copied.order = self.order[::-1]
            return copied

    asked = []

    class Asked(Mapped):
        def ranges(self, i: int) -> Any:
            asked.append(i)
            return super().ranges(i)

    window = {"window.min_steps": 1, "window.max_steps": 2}
    loader = creel.DataLoader(Asked(source), 1, sampler=Other(), creel=window)
    assert [int(i) for b in loader for i in loader.indices] == list(range(N))
    assert len(asked) <= 4
