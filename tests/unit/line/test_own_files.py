"""When a loader waits for files that its dataset opens itself: what the kernel says of a thread."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from creel.loader.line.observers import unwrapped_files
from creel.loader.line.observers.unwrapped_files import AwaitedFile, OwnFiles, ThreadSamples
from creel.loader.making.batch_times import READING
from creel.loader.making.workers.kernel_waits import KernelWait, Reader, awaited, this_thread
from kit import until

NOTHING = KernelWait(storage=False)


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[tuple[threading.Thread, Path]]:
    """A thread that waits in a read of a path, and this path: a pipe with a name."""
    path = tmp_path / "data"
    os.mkfifo(path)
    thread = threading.Thread(target=path.read_bytes)
    thread.start()
    with path.open("wb"):  # waits for the reader's open
        yield thread, path
    thread.join()


def test_the_file_that_a_thread_waits_for_is_the_one_it_reads(
    waiting: tuple[threading.Thread, Path],
) -> None:
    thread, path = waiting
    until(
        lambda: awaited(os.getpid(), thread.native_id or 0) == (True, str(path), False), event="it"
    )
    looks = looks_at(thread)
    until(lambda: looks.over, event="all looks are done")
    assert (looks.file, looks.share) == (AwaitedFile(str(path), False, frozenset({7})), 1.0)


def looks_at(thread: threading.Thread, serves: bool = False) -> ThreadSamples:
    reader = Reader(os.getpid(), lambda: [thread.native_id or 0], lambda: (READING, 7))
    return ThreadSamples([reader], lambda _: serves)


@pytest.mark.parametrize("mapped", ["/data/rows", ""])
def test_a_file_whose_pages_are_waited_for_is_mapped_though_its_opens_are_seen_more_often(
    mapped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel does not say whose page it is where several files are mapped."""
    waits = iter([KernelWait(True, mapped, True), *[KernelWait(True, "/data/rows")] * 1000])
    monkeypatch.setattr(Reader, "waits", lambda _: next(waits))
    looks = looks_at(threading.current_thread())
    until(lambda: looks.over, event="all looks are done")
    assert looks.file == AwaitedFile("/data/rows", True, frozenset({7}))


def test_a_file_that_creel_serves_is_not_named(waiting: tuple[threading.Thread, Path]) -> None:
    looks = looks_at(waiting[0], serves=True)
    until(lambda: looks.over, event="all looks are done")
    assert looks.file is None


@pytest.mark.parametrize("relative", [False, True])
def test_the_file_whose_open_a_thread_waits_for_is_named(
    relative: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has opened the other end of the pipe."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "data"
    os.mkfifo(path)
    thread = threading.Thread(target=Path(path.name if relative else path).read_bytes)
    thread.start()
    until(
        lambda: awaited(os.getpid(), thread.native_id or 0) == KernelWait(True, str(path)),
        event="open",
    )
    path.write_bytes(b"")
    thread.join()


def test_a_reader_waits_for_what_the_thread_that_it_waits_for_reads(
    waiting: tuple[threading.Thread, Path],
) -> None:
    """zarr reads in threads of its own."""
    readers, end = [], threading.Event()

    def read() -> None:
        readers.append(this_thread(lambda: 3))
        end.wait()

    thread = threading.Thread(target=read)
    thread.start()
    until(lambda: bool(readers) and readers[0].waits().path == str(waiting[1]), event="it waits")
    assert readers[0].stage() == (READING, 3)
    end.set()
    thread.join()


def test_a_thread_that_runs_or_waits_for_another_one_waits_for_no_file() -> None:
    assert awaited(os.getpid(), threading.get_native_id()) == NOTHING
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    assert awaited(os.getpid(), thread.native_id or 0) == NOTHING
    end.set()
    thread.join()
    assert awaited(os.getpid(), thread.native_id or 0) == NOTHING, "it has ended"


def test_looks_end_before_their_time_with_the_readers(
    waiting: tuple[threading.Thread, Path],
) -> None:
    looks = looks_at(waiting[0])
    looks.end()
    assert looks.over


class Sight(ThreadSamples):
    """Looks that are done at once and saw what a test says."""

    of = "/data/1", 1.0
    mapped, batches = False, 1

    def __init__(self, *_: object) -> None:
        self.over, self.file = True, None
        if self.of[0]:
            self.file = AwaitedFile(self.of[0], self.mapped, frozenset(range(self.batches)))

    @property
    def share(self) -> float:
        return self.of[1]


@pytest.mark.parametrize(
    ("path", "share", "waited_s", "batches", "unserved", "path_named"),
    [
        ("/data/1", 1.0, 2.0, 10, True, "/data/1"),
        ("/data/1", 1.0, 2.0, 10, False, ""),  # creel knows the dataset's objects
        ("/data/1", 1.0, 0.9, 10, True, ""),  # an epoch of a second or two
        ("/data/1", 0.3, 2.0, 10, True, ""),  # two thirds of the wait were for something else
        ("", 1.0, 2.0, 10, True, ""),  # it could not be seen which file
        ("/data/1", 1.0, 29.0, 0, True, ""),  # the length of an epoch is not known
        ("/data/1", 1.0, 31.0, 0, True, "/data/1"),
        ("/data/\udcff", 1.0, 2.0, 10, True, r"/data/\udcff"),  # no message could have it
    ],
)
def test_a_file_is_named_once_training_has_waited_long_for_storage(
    path: str,
    share: float,
    waited_s: float,
    batches: int,
    unserved: bool,
    path_named: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(unwrapped_files, "_said", set())
    monkeypatch.setattr(unwrapped_files, "ThreadSamples", Sight)
    monkeypatch.setattr(Sight, "of", (path, share))
    files = OwnFiles()
    for _ in range(2):
        files.epoch_begins(unserved=unserved, batches=batches, waited_s=5.0)
        for _ in range(3):
            files.delivered(5, 5.0 + waited_s, ())
    assert files.path == path_named
    said = [
        f"training waits for storage: this dataset opens files itself ({path_named}): creel.wrap"
    ]
    assert [m.partition("(dataset)")[0] for m in caplog.messages] == said * bool(path_named)
    assert files.remedy in caplog.text


@pytest.mark.parametrize(
    ("wrapped", "mapped", "batches", "says"),
    [
        (False, False, 1, "opens files itself (/data/1): creel.wrap(dataset) caches"),
        (False, True, 1, "reads /data/1 itself, and it is mapped into memory"),
        (False, False, 5, "opens files itself (/data/1): creel.wrap(dataset) caches"),
        (True, False, 1, "creel.wrap cannot serve /data/1: a library in C"),
        (True, True, 1, "creel.wrap cannot serve /data/1: it is mapped into memory"),
        (
            True,
            False,
            5,
            "creel.wrap cannot serve /data/1: a library in C, C++ or Rust reads it, or",
        ),
    ],
)
def test_only_what_serves_a_file_is_named(
    wrapped: bool,
    mapped: bool,
    batches: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(unwrapped_files, "_said", set())
    monkeypatch.setattr(unwrapped_files, "ThreadSamples", Sight)
    monkeypatch.setattr(Sight, "mapped", mapped)
    monkeypatch.setattr(Sight, "batches", batches)
    files = OwnFiles()
    files.epoch_begins(unserved=True, batches=10, waited_s=0.0, wrapped=wrapped)
    for _ in range(3):
        files.delivered(5, 2.0, ())
    (said,) = caplog.messages
    assert says in said
    assert "creel.kept(dataset, size)" in said
    assert ("creel.wrap(dataset)" in said) == ("creel.wrap(dataset)" in files.remedy)
    assert ("creel.wrap(dataset)" in said) == (not wrapped and not mapped)


def test_waits_that_are_a_small_part_of_an_epoch_start_no_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """100 s of training are over, 10 of 100 batches: an epoch takes 1,000 s."""
    began = time.monotonic()
    files = OwnFiles()
    files.epoch_begins(unserved=True, batches=100, waited_s=0.0)
    monkeypatch.setattr(time, "monotonic", lambda: began + 100)
    monkeypatch.setattr(
        unwrapped_files, "ThreadSamples", lambda *_: pytest.fail("there was a look")
    )
    files.delivered(10, 29.0, ())
