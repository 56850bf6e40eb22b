"""Access traces of datasets against brute force; the parts of a dataset."""

from __future__ import annotations

import errno
import io
import mmap
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset

import creel
from creel.cache.memory.memfd import Descriptor
from creel.cache.storage.version import UNKNOWN
from creel.loader.data.binding.adapters import Addressed, Blocks
from creel.loader.data.binding.bind import bound
from creel.loader.data.datasets.base import CreelDataset, fetch_many
from creel.loader.data.files.file_objects import in_memory
from creel.loader.data.tracing.journal import (
    EndOfTrace,
    JournalFile,
    JournalPlace,
    Reads,
    TraceJournal,
    joined,
    new_journal,
    own_place,
    record_of,
)
from creel.loader.data.tracing.observed import ObservedReads
from creel.loader.data.tracing.recorder import AccessRecorder
from creel.loader.data.tracing.trace import AccessTrace, parts_of

ADDRESSES = ["/a", "/b", "/c"]
LARGE = 200_000  # bytes: four blocks


class Part(CreelDataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


class Holder(Dataset[Any]):
    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)

    def __len__(self) -> int:
        return 12


items = st.one_of(
    st.sampled_from(ADDRESSES),
    st.tuples(st.just(0), st.integers(0, 4)),
    st.tuples(st.just(1), st.integers(0, 6)),
    st.sampled_from([("/c", 0, 32, LARGE), ("/d", 16, 32, LARGE), ("/d", 40, 9, LARGE)]),
)


@given(
    st.lists(st.tuples(st.integers(0, 11), st.lists(items, max_size=5)), min_size=1),
    st.lists(st.integers(-12, 11)),
)
def test_each_sample_has_the_objects_that_were_heard_first(
    heard: list[tuple[int, list[Any]]], indices: list[int]
) -> None:
    parts: list[CreelDataset] = [Part(5), Part(97)]  # files have other numbers of blocks
    known = dict(reversed(heard))
    recorded = joined([record_of([(i, [(item, 7) for item in items])]) for i, items in heard])
    binding = bound(Holder(), AccessTrace(12, recorded, parts))
    names: list[Any] = []
    for leaf in binding.leaves:
        if isinstance(leaf, Blocks):
            for number in range(leaf.object_count):
                ((address, first, size, _),) = leaf.in_blocks(np.array([number]))
                names.append((address, (number - first) * size, size))
        elif isinstance(leaf, Addressed):
            names += leaf.addresses(np.arange(leaf.object_count))
        else:
            names += [(parts.index(leaf), i) for i in range(leaf.object_count)]
    ids, counts = binding.objects(np.array(indices, np.int64))
    assert len(names) == sum(leaf.object_count for leaf in binding.leaves)
    sizes = {name[0]: name[2] for name in names if len(name) == 3}

    def objects(item: Any) -> list[Any]:
        address = item if isinstance(item, str) else item[0]
        if address not in sizes:
            return [item]
        size, end = sizes[address], LARGE
        start, stop = (0, end) if isinstance(item, str) else (4096 * item[1], 4096 * sum(item[1:3]))
        return [(address, k * size, size) for k in range(start // size, -(-stop // size))]

    expected = [[x for item in known.get(i % 12, []) for x in objects(item)] for i in indices]
    assert [names[i] for i in ids] == [x for sample in expected for x in sample]
    assert counts.tolist() == [len(sample) for sample in expected]
    heard_of = {x[0] for heard in known.values() for x in heard if len(x) == 2 and x[0] in {0, 1}}
    assert {parts.index(leaf) for leaf in binding.leaves if leaf in parts} == heard_of


def test_parts_are_found_wherever_a_dataset_keeps_them() -> None:
    a, b, c, d = (Part(i + 1) for i in range(4))
    inner = Holder(one=a, many=[Subset(b, [0]), ("x", {"k": creel.wrap(Holder(c=c, again=a))})])
    inner.itself = inner  # type: ignore[attr-defined]
    whole = Holder(parts=ConcatDataset([inner, d]), numbers=list(range(100_000)), other=object())
    parts = parts_of(whole)
    assert sorted(map(len, parts)) == [1, 2, 3, 4]
    assert parts == parts_of(whole)


def test_a_part_is_found_beside_long_lists() -> None:
    a, *pairs = Part(1), *([(i, i) for i in range(9_000)] for _ in range(2))
    assert parts_of(Holder(files=a, images=pairs[0], masks=pairs[1])) == [a]


def step(f: Any, name: str, n: int) -> Any:
    if name == "seek":
        return f.seek(n)
    if name == "readinto":
        buffer = bytearray(n)
        return f.readinto(buffer), buffer
    if name == "rest":
        return list(f)
    if name == "peek":
        return f.peek(n)[:n]
    return getattr(f, name)(n)


STEPS = ("read", "read1", "readline", "readinto", "peek", "seek", "rest")


@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 700))))
def test_a_file_that_is_listened_to_and_its_copy_are_like_any(steps: list[tuple[str, int]]) -> None:
    data = bytes(range(7, 20)) * 50
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(data)
        listener = ObservedReads()
        with listener, creel.open(file.name) as ours, Path(file.name).open("rb") as real:
            copy = io.BufferedReader(in_memory(data, file.name))
            assert ours.name == copy.name == real.name
            for name, n in steps:
                expected = step(real, name, n)
                assert step(ours, name, n) == step(copy, name, n) == expected
                assert ours.tell() == copy.tell() == real.tell()
            assert os.pread(copy.fileno(), len(data), 0) == data
            assert copy.raw.tell() == os.lseek(copy.fileno(), 0, os.SEEK_CUR)
            for name, n in steps:
                assert step(copy, name, n) == step(real, name, n)
            copy.close()
        assert listener.end_sample() == [file.name]


def test_files_are_worth_caching_by_the_share_that_is_read(tmp_path: Path) -> None:
    all_of_them = ("whole", "a quarter", "little", "twice", "all and a little", "mapped", "array")
    for name in all_of_them:
        (tmp_path / name).write_bytes(bytes(1 << 20))
    (tmp_path / "small").write_bytes(bytes(1 << 16))
    reads = {"whole": [1 << 20], "a quarter": [1 << 18], "little": [1 << 17], "small": [1]}
    reads |= {"twice": [1 << 17, 1 << 17]}
    with ObservedReads() as listener:
        creel.read(tmp_path / "all and a little")
        for name, sizes in {**reads, "all and a little": [1]}.items():
            for size in sizes:
                with creel.open(tmp_path / name) as f:
                    assert len(f.read(size)) == size
        with creel.open(tmp_path / "mapped") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ):
            pass
        with creel.open(tmp_path / "array") as f:
            assert len(np.fromfile(f, np.uint8)) == 1 << 20
    asked = listener.end_sample()
    whole = {Path(item).name for item in asked if isinstance(item, str)}
    assert whole == {"whole", "a quarter", "small", "all and a little", "array"}
    assert [item for item in asked if not isinstance(item, str)] == [
        (str(tmp_path / name), 0, 32, 1 << 20) for name in ("little", "twice")
    ]


def test_absent_files_are_not_told_of(tmp_path: Path) -> None:
    """A daemon would look for the missing file in each epoch."""
    (tmp_path / "gone").touch()
    gone = creel.FileDataset([tmp_path / "gone"])
    (tmp_path / "gone").unlink()
    with ObservedReads() as listener:
        for read in (lambda: creel.read(tmp_path / "gone"), lambda: gone[0]):
            with pytest.raises(FileNotFoundError):
                read()
    assert listener.end_sample() == []


class Numbered(Holder):
    files: Any
    hidden: Any

    def __getitem__(self, i: int) -> bytes:
        if not 0 <= i < 12:
            raise IndexError(i)
        return bytes(self.files[np.int64(i)] + self.hidden().read(0))


def test_numbers_of_any_kind_are_heard_and_what_is_no_part_is_not(tmp_path: Path) -> None:
    for i in range(12):
        (tmp_path / f"{i:02}").write_bytes(b"%d" % i)
    files = creel.FileDataset(tmp_path, decode=bytes)
    rows = creel.RecordDataset(tmp_path / "00", np.uint8, 1)
    learner = AccessRecorder(Numbered(files=files, hidden=lambda: rows))
    for i in range(12):
        assert learner[i] == b"%d0" % i
        learner.write()
    with pytest.raises(IndexError):
        learner[12]
    learnt = learner.trace()
    assert learnt is not None
    assert learnt.counts.tolist() == [1] * 12
    assert [leaf.object_count for leaf in learnt.leaves] == [12]


class Telling(Dataset[Any]):
    """Writes a line for each call; sample i reads file i."""

    def __init__(self, calls: list[Any], files: creel.FileDataset) -> None:
        self.calls, self.files = calls, files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> Any:
        self.calls.append(i)
        return len(self.calls), self.files[i]

    def change(self, sample: Any) -> Any:
        self.calls.append("change")
        return len(self.calls), sample, self.files[5]


def around(leaf: Telling, shapes: list[str]) -> Dataset[Any]:
    """Return the leaf in torch's and creel's wrappers that `by_sample` sees through."""
    dataset: Dataset[Any] = leaf
    for shape in shapes:
        if shape == "subset":
            dataset = Subset(dataset, [3, 1, 4, 0, 5, 2])
        elif shape == "stack":
            dataset = StackDataset(dataset, leaf)
        elif shape == "named":
            dataset = StackDataset(x=leaf, y=dataset)
        elif shape == "wrapped":
            dataset = creel.wrap(dataset)
        else:
            dataset = creel.datasets.Transformed(dataset, leaf.change)
    return dataset


SHAPES = ("subset", "stack", "named", "wrapped", "transformed")


@given(
    st.lists(st.sampled_from(SHAPES), max_size=4),
    st.lists(st.integers(0, 5), max_size=8),
)
def test_a_batch_calls_the_persons_code_in_torchs_order(
    shapes: list[str], indices: list[int]
) -> None:
    """The order of calls determines the random numbers."""
    with tempfile.TemporaryDirectory() as home:
        for i in range(6):
            (Path(home) / str(i)).write_bytes(b"%d" % i)
        files = creel.FileDataset(home, decode=bytes)
        calls: list[Any] = []
        plain, heard = (around(Telling(calls, files), shapes) for _ in range(2))
        expected = list(fetch_many(plain, indices)), calls.copy()
        calls.clear()
        learner: Any = AccessRecorder(heard)
        assert (list(fetch_many(learner, indices)), calls) == expected
        alone = AccessRecorder(heard)
        for i in indices:
            alone[i]
        # reads are assigned to samples within a batch, too
        for each in (learner, alone):
            each.write()
            TraceJournal(each.place).append(EndOfTrace())
            each.write()
        ours, theirs = learner.trace(), alone.trace()
        assert (ours is None) == (theirs is None) == (not indices)
        if ours is not None and theirs is not None:
            assert ours.counts.tolist() == theirs.counts.tolist()
            samples = np.array(sorted(set(indices)), np.int64)
            wanted = [bound(heard, x).objects(samples)[0].tolist() for x in (ours, theirs)]
            assert sorted(wanted[0]) == sorted(wanted[1])


def test_a_journal_that_has_no_room_ends_the_learning_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "00").write_bytes(b"0")
    files = creel.FileDataset(tmp_path, decode=bytes)

    def sample(learner: AccessRecorder) -> bytes:
        learner.write()
        return bytes(learner[0])

    full = AccessRecorder(Numbered(files=files, hidden=lambda: files))
    with mock.patch("os.write", side_effect=OSError(errno.ENOSPC, "No space left on device")):
        assert [sample(full) for _ in range(3)] == [b"00"] * 3
    place = JournalPlace(JournalFile(new_journal()))
    torn = AccessRecorder(Numbered(files=files, hidden=lambda: files), place)
    with mock.patch("os.write", side_effect=lambda fd, data: os.pwrite(fd, data[:-1], 0)):
        TraceJournal(torn.place).append(record_of([(1, [("/a/file", 7)])]))
    assert [sample(torn) for _ in range(3)] == [b"00"] * 3
    assert full.trace() is None
    assert torn.trace() is None


def pair(first: Dataset[Any], other: Dataset[Any]) -> tuple[AccessRecorder, AccessRecorder]:
    """Return the recorders of two ranks."""
    file, number, _ = own_place()
    journal = os.open(f"/proc/self/fd/{file.descriptor.fd}", os.O_RDWR | os.O_APPEND)
    files = file, JournalFile(Descriptor(journal))
    places = (JournalPlace(each, number, joint=True) for each in files)
    return AccessRecorder(first, next(places)), AccessRecorder(other, next(places))


def numbered(folder: Path) -> Numbered:
    for i in range(12):
        (folder / f"{i:02}").write_bytes(b"%d" % i)
    files = creel.FileDataset(folder, decode=bytes)
    return Numbered(files=files, hidden=lambda: files)


def test_recordings_of_two_ranks_are_one_trace(tmp_path: Path) -> None:
    ranks = pair(numbered(tmp_path), numbered(tmp_path))
    for i in range(12):
        _ = ranks[i % 2][i]
        ranks[i % 2].write()
    traces = [rank.trace() for rank in ranks]
    assert [trace.counts.tolist() for trace in traces if trace] == [[1] + [2] * 11] * 2


@pytest.mark.parametrize("together", [False, True])
def test_ranks_that_read_other_files_as_a_sample_do_not_learn_from_each_other(
    tmp_path: Path, *, together: bool
) -> None:
    """`together`: neither has read the other one's journal before it writes its own."""
    homes = [tmp_path / "a", tmp_path / "b"]
    ranks = pair(*(Opening(home) for home in homes))
    for i in range(12):
        for rank in ranks:
            _ = rank[i]
            if not together:
                rank.write()
    for rank in (*ranks, *ranks):
        rank.write()
    for rank, home in zip(ranks, homes, strict=True):
        trace = rank.trace()
        assert rank.void == (trace is None)
        for files in [] if trace is None else trace.leaves:
            assert isinstance(files, Addressed)
            assert {Path(path).parent for path in files.addresses(np.arange(12))} == {home}
    assert ranks[1].void


class Opening(Dataset[Any]):
    """Opens a file of its folder; the first read of a process opens another one before that."""

    def __init__(self, home: Path, *, lazily: bool = False) -> None:
        home.mkdir(exist_ok=True)
        self.home, self.lazily = home, lazily
        for i in range(13):
            (home / f"{i:02}").write_bytes(b"%d" % i)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> bytes:
        if self.lazily:
            self.lazily = False
            creel.read(self.home / "12")
        return creel.read(self.home / f"{i:02}")


def test_files_read_beside_the_samples_make_no_other_dataset(tmp_path: Path) -> None:
    ranks = pair(Opening(tmp_path), Opening(tmp_path, lazily=True))
    for rank in ranks:
        for i in (3, *range(12)):
            _ = rank[i]
            rank.write()
    assert [rank.trace() is None for rank in ranks] == [False, False]


class Pieces(Opening):
    """Each sample also reads a 64th of a large file."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        (home / "large").write_bytes(bytes(1 << 20))

    def __getitem__(self, i: int) -> bytes:
        with creel.open(self.home / "large") as file:
            return super().__getitem__(i) + file.read(1 << 14)


def same_traces(dataset: Dataset[Any], recorders: Sequence[AccessRecorder]) -> bool:
    """Whether all have a trace, and workers and trainer bind the dataset by it in the same way."""
    traces = [recorder.trace() for recorder in recorders]
    bindings = [trace and bound(dataset, trace) for trace in traces]
    return len({binding and binding.digest() for binding in bindings} | {None}) == 2


@pytest.mark.parametrize("late", [False, True])
def test_a_worker_and_its_trainer_have_one_trace_after_the_ranks_have_met(
    tmp_path: Path, *, late: bool
) -> None:
    """`late`: the other one, which read its samples twice, has ended the recording before."""
    dataset = Pieces(tmp_path)
    worker = AccessRecorder(dataset, seals=False)
    trainer, other = pair(dataset, dataset)
    for i in (0, 2, 4, 6, 8, 10):
        _ = worker[i]
        worker.write()
    workers = TraceJournal(worker.place)
    if not late:
        assert trainer.take_over(workers)
    for i in (1, 3, 5, 7, 9, 11) * (1 + late):
        _ = other[i]
        other.write()
    if late:
        trainer.take_over(workers)
    trainer.give(workers)
    assert same_traces(dataset, [worker, trainer, other])


def test_a_sample_that_was_recorded_twice_counts_once(tmp_path: Path) -> None:
    dataset = Pieces(tmp_path)
    once, five_times = AccessRecorder(dataset), AccessRecorder(dataset, seals=False)
    for i in range(12):
        _ = once[i]
        once.write()
    records = [record for record in TraceJournal(once.place).new() if isinstance(record, Reads)]
    for record in 5 * records:
        TraceJournal(five_times.place).append(record)
    TraceJournal(five_times.place).append(EndOfTrace())
    assert same_traces(dataset, [once, five_times])


def test_a_record_of_another_version_ends_the_learning_and_nothing_else(tmp_path: Path) -> None:
    dataset = Opening(tmp_path)
    for taken_over in (False, True):
        recorder, other = AccessRecorder(dataset), AccessRecorder(dataset)
        odd = Reads(0, b"odd", b"", b"", "")
        TraceJournal((other if taken_over else recorder).place).append(odd)
        assert not recorder.take_over(TraceJournal(other.place))
        for i in range(12):
            assert recorder[i] == dataset[i]
            recorder.write()
        recorder.give(TraceJournal(other.place))
        assert (recorder.trace() is None) == (not taken_over)


def test_samples_that_only_another_process_has_are_left_out(tmp_path: Path) -> None:
    dataset = Opening(tmp_path)
    recorder = AccessRecorder(dataset)
    beyond = [(i, [(str(tmp_path / "00"), UNKNOWN)]) for i in (12, 1 << 40)]
    assert TraceJournal(recorder.place).append(record_of(beyond))
    for i in range(12):
        assert recorder[i] == dataset[i]
        recorder.write()
    trace = recorder.trace()
    assert trace is not None
    assert trace.counts.tolist() == [1] * 12


def test_a_forked_child_does_not_write_what_its_parent_has_read(tmp_path: Path) -> None:
    recorder = AccessRecorder(Opening(tmp_path))
    _ = recorder[3]
    pid = os.fork()
    if pid == 0:
        try:
            recorder.write()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert recorder.place.empty
    recorder.write()
    assert not recorder.place.empty


def test_a_journal_is_closed_where_nothing_can_be_recorded() -> None:
    before = set(Path("/proc/self/fd").iterdir())
    with suppress(TypeError):
        AccessRecorder(object())  # type: ignore[arg-type]  # it has no length
    assert set(Path("/proc/self/fd").iterdir()) == before
