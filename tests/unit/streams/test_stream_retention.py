"""How far producers of a stream are ahead of readers, what is deleted, and what stays."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stream_rig import FIELDS, NBYTES, filled, record, samples, taken
from torch.utils.data import DataLoader

import creel
from creel.errors import SourceError, UnavailableError
from creel.loader.extras.streams import reader_notes
from creel.loader.extras.streams.stream import Stream
from creel.streams import cursors, memories
from creel.streams.cursors import Cursor
from creel.streams.log import Log, medium_of
from creel.streams.memories import Needed
from creel.streams.producer import Producer
from kit import until
from testbed.redis_server import Address

Place = Path | Address


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "stream"


def held(place: Place) -> int:
    """Bytes of the chunks of a stream, and of files that are being written."""
    if not isinstance(place, Path):
        log = Log.open(place)
        return sum(max(log.size(number), 0) for number in log.numbers())
    total = 0
    for path in place.iterdir():
        with suppress(FileNotFoundError):  # deleted or linked meanwhile
            total += path.stat().st_size if path.name[0] in ".0" else 0
    return total


@pytest.fixture
def consumer(place: Place) -> Iterator[Any]:
    """A function that begins to read a stream in a thread; what was read is appended to a list."""
    threads = []

    def begin(name: str, batch: int, out: list[int], **options: Any) -> threading.Thread:
        def read() -> None:
            stream = Stream(place, name, timeout_s=30, **options)
            for b in creel.DataLoader(stream, batch, creel=False):
                out.extend(b["i"].tolist())

        threads.append(threading.Thread(target=read))
        threads[-1].start()
        return threads[-1]

    yield begin
    for thread in threads:
        thread.join(60)


@pytest.mark.parametrize("ahead, keep, batch", [(20, 30, 4), (20, 0, 4), (8, 0, 30), (0, 5, 1)])
def test_the_folder_never_holds_more_than_ahead_and_keep_and_a_chunk(
    place: Place, consumer: Any, ahead: int, keep: int, batch: int
) -> None:
    """Also with less `ahead` than a batch needs: then the reader gets a batch and a chunk."""
    n, chunk, got = 300, 5, list[int]()
    most = 0
    with Producer(
        place, FIELDS, ahead=ahead * NBYTES, keep=keep * NBYTES, chunk=chunk, timeout_s=30
    ) as producer:
        consumer("a", batch, got)
        for i in range(n):
            producer.put(**record(i))
            most = max(most, held(place))
    assert most <= (max(ahead, batch + chunk) + keep + chunk) * NBYTES
    until(lambda: len(got) == n // batch * batch, event="all is read")
    assert got == list(range(len(got)))


def test_in_memory_a_passed_chunk_becomes_the_next_one(in_memory: Path) -> None:
    """New memory costs the kernel several times the copy into it."""
    options: dict[str, Any] = {"ahead": 100 * NBYTES, "keep": 0, "chunk": 8, "readers": ("a",)}
    options["linger_s"] = 1e9
    inodes = set()
    with Producer(in_memory, FIELDS, **options) as producer:
        for i in range(0, 800, 8):
            for k in range(8):
                producer.put(**record(i + k))
            log = Log.open(in_memory)
            inodes.add(Path(log.chunk(log.numbers()[-1])).stat().st_ino)
            passed = max(i // 8 - 1, 0)
            cursors.write(log.medium, "a", 0, Cursor(passed, 0, 0))
            assert held(in_memory) <= 108 * NBYTES
    assert len(inodes) <= 14
    numbers = taken(Stream(in_memory, None, begin=log.numbers()[0]).batches(8))
    assert samples(in_memory, numbers)[-1] == list(range(792, 800))


@pytest.mark.parametrize("call", ["preadv", "open"])
def test_a_chunk_that_became_another_one_is_not_read_as_the_first(
    in_memory: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """By a reader that holds nobody back, while it reads."""
    log = filled(in_memory, [8, 8], producers=2)
    stream, do = Stream(in_memory, None), getattr(os, call)

    def overtaken(*args: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(os, call, do)
            first = do(*args) if call == "open" else None
            log.medium.append([memoryview(bytes(8 * NBYTES))], 2, spare=0)
            return do(*args) if first is None else first

    monkeypatch.setattr(os, call, overtaken)
    with pytest.raises(SourceError, match="chunk 0 has been deleted"):
        stream[3]
    monkeypatch.undo()
    assert log.numbers() == [1, 2]
    assert int(stream[8 + 3]["i"]) == 8 + 3


def test_chunks_that_a_memory_needs_are_not_written_over(in_memory: Path) -> None:
    """Even if it needs nothing of what comes."""
    options: dict[str, Any] = {"keep": 0, "chunk": 8, "readers": ("a",), "linger_s": 1e9}
    with Producer(in_memory, FIELDS, **options) as producer:
        for i in range(80):
            producer.put(**record(i))
        log = Log.open(in_memory)
        memories.write(log.medium, "a", 0, Needed(10, np.array([3, 21])))
        cursors.write(log.medium, "a", 0, Cursor(9, 0, 0))
        for i in range(80, 120):
            producer.put(**record(i))
        records = Stream(in_memory, None).__getitems__([3, 21, 119])
        assert [int(record["i"]) for record in records] == [3, 21, 119]
        producer.close()


def test_a_chunk_of_which_a_memory_holds_records_does_not_become_another(in_memory: Path) -> None:
    log = filled(in_memory, [8, 8], producers=2)
    log.delete(0, np.array([3]))
    assert log.medium.append([memoryview(bytes(8 * NBYTES))], 2, spare=0) == 2
    assert int(Stream(in_memory, None)[3]["i"]) == 3


def test_producers_and_readers_at_once_lose_nothing(place: Place, consumer: Any) -> None:
    """Numbers of chunks that are read and deleted are not used again (see `Log.append`)."""
    each, producers = 150, 3
    got: tuple[list[int], list[int]] = [], []
    limits: dict[str, Any] = {"ahead": 6 * NBYTES, "keep": 2 * NBYTES, "timeout_s": 60}

    def produce(k: int) -> None:
        with Producer(
            place, FIELDS, chunk=2, producers=producers, readers=("a", "b"), **limits
        ) as producer:
            for i in range(each):
                producer.put(**record(k * each + i))

    threads = [threading.Thread(target=produce, args=(k,)) for k in range(producers)]
    for thread in threads:
        thread.start()
    readers = [consumer("a", 5, got[0]), consumer("b", 3, got[1])]
    for thread in threads + readers:
        thread.join(60)
    assert got[0] == got[1]
    assert sorted(got[0]) == list(range(each * producers))


@pytest.mark.parametrize("workers", [0, 2])
def test_torchs_loader_finds_what_it_asked_for_long_before(place: Place, workers: int) -> None:
    """It does not say which batches its workers have read."""
    n, got = 400, list[int]()

    def read() -> None:
        data = Stream(place, "a", timeout_s=30)
        for b in DataLoader(data, batch_sampler=data.batches(2), num_workers=workers):
            got.extend(b["i"].tolist())

    reader = threading.Thread(target=read)
    with Producer(place, FIELDS, ahead=0, keep=0, chunk=3, timeout_s=30) as producer:
        reader.start()
        for i in range(n):
            producer.put(**record(i))
        assert held(place) < n * NBYTES / 2
    reader.join(60)
    assert got == list(range(n))


def test_a_shuffled_reader_gets_a_whole_window(place: Place, consumer: Any) -> None:
    got: list[int] = []
    with Producer(place, FIELDS, ahead=NBYTES, keep=0, chunk=3, timeout_s=30) as producer:
        consumer("a", 4, got, shuffle=10)
        for i in range(100):
            producer.put(**record(i))
    until(lambda: len(got) == 100, event="all is read")
    assert sorted(got) == list(range(100))


def test_the_slowest_reader_and_rank_hold_producers_back(place: Place) -> None:
    limits: dict[str, Any] = {"ahead": 10 * NBYTES, "keep": 0, "chunk": 2, "timeout_s": 0}
    producer = Producer(place, FIELDS, readers=("a", "b"), linger_s=1e9, **limits)

    def fill() -> int:
        """Put until producers must wait; return how many were put."""
        count = 0
        while True:
            try:
                producer.put(**record(0))
            except UnavailableError:
                return count
            count += 1

    fill()
    cursors.write(medium_of(place), "a", 0, Cursor(3, 0, NBYTES))
    assert fill() == 0  # b has not begun
    cursors.write(medium_of(place), "b", 0, Cursor(4, 0, NBYTES, ranks=2))
    assert fill() == 0  # its rank 1 has not
    with pytest.raises(UnavailableError, match=r"waiting for b \(not begun: rank 1\) for 0 s"):
        producer.put(**record(0))
    cursors.write(medium_of(place), "b", 1, Cursor(2, 0, NBYTES, ranks=2))
    assert fill() == 4
    assert Log.open(place).numbers()[0] == 2
    cursors.write(medium_of(place), "b", 0, Cursor(5, 0, NBYTES))  # of one rank now
    assert fill() == 2
    assert Log.open(place).numbers()[0] == 3


def test_a_reader_that_leaves_holds_nobody_back(place: Place) -> None:
    limits: dict[str, Any] = {"ahead": 4 * NBYTES, "keep": 0, "chunk": 1, "timeout_s": 0}
    producer = Producer(place, FIELDS, readers=("a", "b"), **limits)
    stream = Stream(place, "b", timeout_s=0)
    cursors.write(medium_of(place), "a", 0, Cursor(0, 0, 9 * NBYTES))
    items: Any = iter(stream.batches(8))
    items.reports = True
    assert not items.arrived()  # now it counts
    for i in range(8):
        producer.put(**record(i))  # b needs eight
    with pytest.raises(UnavailableError, match="waiting for b"):
        producer.put(**record(8))
    stream.leave()
    cursors.write(medium_of(place), "a", 0, Cursor(8, 0, NBYTES))
    producer.put(**record(8))


def test_a_reader_behind_retention_is_told_so(place: Place, consumer: Any) -> None:
    limits: dict[str, Any] = {"ahead": 10 * NBYTES, "keep": 0}
    got: list[int] = []
    with Producer(place, FIELDS, chunk=1, timeout_s=30, **limits) as producer:
        consumer("a", 1, got)
        for i in range(60):
            producer.put(**record(i))
    oldest = Log.open(place).numbers()[0]
    with pytest.raises(SourceError, match=rf"chunk 0 has been deleted.*begin={oldest}\)"):
        taken(Stream(place, "late").batches(1))
    assert "late" not in cursors.read(medium_of(place))  # it holds back nobody
    with pytest.raises(SourceError, match="chunk 0 has been deleted"):
        Stream(place, None)[0]
    late = Stream(place, "late", begin=oldest)
    assert samples(place, taken(late.batches(1))) == [[i] for i in range(oldest, 60)]


def test_processes_that_read_as_one_rank_do_not_disturb_each_other(place: Place) -> None:
    """Whoever wrote last counts."""
    place.mkdir()
    failed: list[OSError] = []

    def write(k: int) -> None:
        try:
            for i in range(200):
                cursors.write(medium_of(place), "a", 0, Cursor(i, k, 1))
        except OSError as e:
            failed.append(e)

    threads = [threading.Thread(target=write, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed
    assert cursors.read(medium_of(place))["a"].chunk == 199
    assert list(medium_of(place).notes("readers")) == ["a.0"]


def test_a_note_that_cannot_be_written_leaves_no_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = filled(folder, [1])

    def broken(*_: object) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "rename", broken)
    with pytest.raises(SourceError, match="Permission denied"):
        cursors.write(log.medium, "a", 0, Cursor(0, 0, NBYTES))
    assert not list(folder.glob(".*"))


def test_a_reader_that_cannot_write_its_cursor_any_more_reads_on(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    filled(place, [1] * 100, chunk=1)
    monkeypatch.setattr(reader_notes, "_CURSOR_S", 0)

    def broken(*_: object) -> None:
        raise SourceError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(place))

    items = iter(Stream(place, "a").batches(1))
    next(items)
    monkeypatch.setattr(cursors, "write", broken)
    assert len(list(items)) == 99
    assert caplog.text.count("producers are not told") == 1
    with pytest.raises(SourceError, match="No space left"):  # producers would not wait for it
        next(iter(Stream(place, "b").batches(1)))
