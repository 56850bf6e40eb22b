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
import pyarrow as pa
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    StackDataset,
    Subset,
    TensorDataset,
)

import creel
from creel.loader.data.maps.arrow import spans_of
from creel.loader.data.maps.mappings import Mappings
from creel.loader.data.maps.page_files import BLOCK_NBYTES
from creel.loader.line.steps import mapped_pages
from creel.system import limits
from creel.system.limits import MemoryLimits
from kit import descriptors, until
from programs import Program
from testbed.pages import check_read_ahead, shuffled, slow_pages
from testbed.same import needs_fuse, same
from testbed.tokens import write_tokens

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
    with slow_pages(source.parent, tmp_path / "mount") as fs:
        yield fs


@contextmanager
def nothing_stays(path: str) -> Iterator[None]:
    """Fail unless the thread has ended and has closed a file, beside one mapping of it."""
    yield
    assert "creel-pages" not in {thread.name for thread in threading.enumerate()}
    assert sum(opened == path for _, opened in descriptors()) <= 1


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
@pytest.mark.parametrize(
    "order, tree, workers",
    [
        *((order, "alone", 0) for order in ORDERS),
        ("shuffled", "alone", 2),
        ("a rank's", "alone", 2),
        ("shuffled", "a subset", 2),
        ("shuffled", "parts", 0),
    ],
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
        batches_read = [next(batches)]
        until(lambda: used <= dataset.resident())  # of its own accord: nobody asks for a batch
        reads = slow.totals()["reads"]
        batches_read += batches
        assert slow.totals()["reads"] == reads
        del batches
    assert same(batches_read, expected)


def _memmap(folder: Path) -> Any:
    # Copy on write: torch warns of arrays that cannot be written to.
    return np.memmap(folder / "rows", np.uint8, "c", shape=(N, NBYTES))


def _tensor(folder: Path) -> torch.Tensor:
    path = str(folder / "rows")
    return torch.from_file(path, size=N * NBYTES, dtype=torch.uint8).view(N, NBYTES)


class Numbers(Dataset[int]):
    """Numbers of samples."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> int:
        return i


class Slices(Dataset[Any]):
    """Every second of overlapping stretches of a mapped file, found by `mapped_ranges`."""

    def __init__(self, folder: Path) -> None:
        self.data = _memmap(folder).reshape(-1)

    def __len__(self) -> int:
        return N - 1

    def _part(self, i: int) -> Any:
        return self.data[i * NBYTES : (i + 2) * NBYTES : 2]

    def __getitem__(self, i: int) -> Any:
        return torch.from_numpy(np.array(self._part(i)))

    def ranges(self, i: int) -> Any:
        return creel.mapped_ranges(self._part(i))


#: What needs no line but creel's loader, or one more.
LAYOUTS: dict[str, Callable[[Path], Any]] = {
    "an array": _memmap,
    "an array backwards": lambda folder: _memmap(folder)[::-1],
    "columns": lambda folder: _memmap(folder).reshape(-1, 8, NBYTES // 8)[:, ::4],
    ".npy": lambda folder: np.load(folder / "rows.npy", mmap_mode="c"),
    "a tensor": _tensor,
    "tensors": lambda folder: TensorDataset(_tensor(folder), torch.arange(N)),
    "saved tensors": lambda folder: TensorDataset(torch.load(folder / "rows.pt", mmap=True)),
    "a list": lambda folder: list(_tensor(folder)),
    "stacked": lambda folder: StackDataset(TensorDataset(_tensor(folder)), Numbers()),
    "documents": lambda folder: creel.TokenDataset(folder / "tokens"),
    "stretches": lambda folder: creel.TokenDataset(folder / "tokens", NBYTES + 1, overlap=1),
    "slices": Slices,
}


@needs_fuse
@pytest.mark.parametrize(
    "layout, workers",
    [*((layout, 0) for layout in LAYOUTS), ("an array", 2), ("tensors", 2), ("documents", 2)],
)
def test_what_layouts_map_is_known(source: Path, tmp_path: Path, layout: str, workers: int) -> None:
    folder = source.parent
    rows = np.fromfile(source, np.uint8).reshape(N, NBYTES)
    np.save(folder / "rows.npy", rows)
    torch.save(torch.from_numpy(rows), folder / "rows.pt")
    write_tokens(folder / "tokens", list(rows.view(np.uint16)))
    with slow_pages(folder, tmp_path / "mount") as fs:
        ours, theirs = (LAYOUTS[layout](place) for place in (tmp_path / "mount", folder))
        with nothing_stays(str(tmp_path / "mount/rows")):
            check_read_ahead(fs, ours, theirs, batch_size=2, num_workers=workers)
        del ours


class Holder(Dataset[Any]):
    """Sample i is row `of(i)` of an array that the dataset holds, and says nothing of."""

    def __init__(self, folder: Path, of: Callable[[int], int] = int) -> None:
        self.rows, self.of, self.name = _memmap(folder), of, "rows"

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return torch.from_numpy(np.array(self.rows[self.of(i)]))


@needs_fuse
@pytest.mark.parametrize("workers", [0, 2])
def test_rows_that_a_dataset_holds_are_read_ahead_once_it_has_read_some(
    slow: Any, source: Path, workers: int
) -> None:
    ours, theirs = Holder(Path(slow.mountpoint)), Holder(source.parent)
    check_read_ahead(slow, ours, theirs, first=5, batch_size=1, num_workers=workers)
    part = list(range(1, N))
    check_read_ahead(slow, Subset(ours, part), Subset(theirs, part), batch_size=1)


@needs_fuse
def test_of_a_dataset_that_reads_other_rows_nothing_is_read_ahead(
    source: Path, tmp_path: Path
) -> None:
    reads = []
    for kind in DataLoader, creel.DataLoader:
        with slow_pages(source.parent, tmp_path / "mount") as fs:
            dataset = Holder(tmp_path / "mount", lambda i: (7 * i + 5) % N)
            batches = list(kind(dataset, 1, sampler=shuffled(dataset)))
            reads.append(fs.totals()["reads"])
            del dataset
    assert len(batches) == N
    assert reads[0] == reads[1]


VALUES: dict[str, Any] = {
    "int64": pa.array(range(40)),
    "bool": pa.array([i % 3 == 0 for i in range(40)]),
    "half of a byte and nulls": pa.array([None if i % 5 else i for i in range(40)], pa.int8()),
    "decimal": pa.array(range(40), pa.int64()).cast(pa.decimal128(20)),
    "fixed": pa.array([bytes([i] * 9) for i in range(40)], pa.binary(9)),
    "text": pa.array(["x" * i * 100 for i in range(40)]),
    "large bytes": pa.array([b"x" * i * 100 for i in range(40)], pa.large_binary()),
    "no text": pa.array([""] * 40),
    "lists": pa.array([list(range(i * 50)) for i in range(40)]),
    "large lists": pa.array([[1.0] * i * 50 for i in range(40)], pa.large_list(pa.float32())),
    "fixed lists": pa.array([[i] * 100 for i in range(40)], pa.list_(pa.int32(), 100)),
    "chats": pa.array([[{"role": "a", "text": "b" * 999}] * (i % 4) for i in range(40)]),
    "images": pa.array([{"bytes": bytes([i]) * 3000, "path": f"{i}.png"} for i in range(40)]),
    "lists of lists": pa.array([[[k] * 99 for k in range(i % 5)] for i in range(40)]),
    "maps": pa.array([[("k" * i, i)] * 3 for i in range(40)], pa.map_(pa.string(), pa.int64())),
    "categories": pa.array(["a", "b"] * 20).dictionary_encode(),
    "null": pa.nulls(40),
}


@needs_fuse
@pytest.mark.parametrize("kind", VALUES)
def test_spans_are_where_arrows_values_lie(tmp_path: Path, kind: str) -> None:
    """Once they are read, a row is there without another read; and each span needs the earlier."""
    (tmp_path / "data").mkdir()
    values = pa.table({"before": pa.array(["y" * 5000] * 40), "x": VALUES[kind]})
    with pa.ipc.new_stream(tmp_path / "data/rows", values.schema) as out:
        out.write_table(values, max_chunksize=16)
    with slow_pages(tmp_path / "data", tmp_path / "mount") as fs:
        mapped = pa.memory_map(f"{fs.mountpoint}/rows")
        column = pa.ipc.open_stream(mapped).read_all()["x"]
        everything = mapped.read_buffer(mapped.seek(0) or mapped.size())
        with (tmp_path / "mount/rows").open("rb") as f:
            fd = f.fileno()
            os.pread(fd, everything.size, 0)  # Arrow has asked for some of it
            # From now on a read or fault reads no more than is asked for.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            for advice in mmap.MADV_RANDOM, mmap.MADV_DONTNEED:
                address = ctypes.c_void_p(everything.address)
                ctypes.CDLL(None).madvise(address, ctypes.c_size_t(everything.size), advice)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            if kind == "categories":
                column.chunk(0).dictionary.to_pylist()
            mappings = Mappings()
            for i in 7, 39, 20, 0, 16:
                cell = column.slice(i, 1)
                for spans in spans_of(cell.chunks):
                    reads = fs.totals()["reads"]
                    ranges = mappings.ranges(spans)
                    assert sum(span.nbytes for span in ranges) == sum(span.nbytes for span in spans)
                    assert fs.totals()["reads"] == reads
                    for _, offset, nbytes in ranges:
                        os.pread(fd, nbytes, offset)
                reads = fs.totals()["reads"]
                assert cell.to_pylist() == values["x"].slice(i, 1).to_pylist()
                assert fs.totals()["reads"] == reads


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
    from system.data.test_mapped_pages import Mapped

    batches = iter(creel.DataLoader(Mapped(sys.argv[1]), 1))
    print(len(next(batches)))
    """
    slow.set(read_latency=5.0)
    program = Program(code, f"{slow.mountpoint}/rows")
    assert program.communicate() == ("1\n", "")
    assert program.returncode == 0


class Stuck(Mapped):
    """Says that samples map a file that nobody can read at the moment."""

    def ranges(self, i: int) -> Any:
        return [(Path(self.path).with_name("stuck"), i % 9, 1)]


@needs_fuse
def test_storage_that_hangs_holds_up_neither_batches_nor_the_end(slow: Any, source: Path) -> None:
    source.with_name("stuck").write_bytes(bytes(9))
    code = """
    import sys, creel
    from system.data.test_mapped_pages import Stuck

    print(sum(len(batch) for batch in creel.DataLoader(Stuck(sys.argv[1]), 1)))
    """
    slow.set(stall_match="stuck", stall=600)
    program = Program(code, f"{slow.mountpoint}/rows")
    assert program.communicate()[0] == f"{N}\n"
    assert program.returncode == 0


def test_files_larger_than_memory_are_told_of_once(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    room = MemoryLimits(1 << 30, N * NBYTES // 2)
    monkeypatch.setattr(limits, "memory", lambda **_: room)
    monkeypatch.setattr(mapped_pages, "_too_large", set[str]())
    dataset = Mapped(source)
    with caplog.at_level(logging.WARNING, "creel"):
        for _ in range(2):
            loader = creel.DataLoader(dataset, 1, sampler=shuffled(dataset))
            assert same(list(loader), list(DataLoader(dataset, 1, sampler=shuffled(dataset))))
    (line,) = caplog.messages
    assert "6.00 MiB or more" in line
    assert "3.00 MiB of them" in line
    assert "15 %" in line
    assert "RecordDataset) stays by next use: 50 %" in line


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
    lines = [message for message in caplog.messages if "ahead" in message]
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
