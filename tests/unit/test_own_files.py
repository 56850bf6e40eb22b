"""When a loader waits for files that its dataset opens itself: what the kernel says of a thread."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from creel.loader.workers import own_files
from creel.loader.workers.own_files import Looks, OwnFiles, Reader, awaited
from kit import until


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
    until(lambda: awaited(os.getpid(), thread.native_id or 0) == (True, str(path)), what="it reads")
    looks = Looks([Reader(os.getpid(), lambda: [thread.native_id or 0], lambda: True)])
    until(lambda: looks.over, what="all looks are done")
    assert (looks.path, looks.share) == (str(path), 1.0)


def test_a_thread_that_runs_or_waits_for_another_one_waits_for_no_file() -> None:
    assert awaited(os.getpid(), threading.get_native_id()) == (False, "")
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    assert awaited(os.getpid(), thread.native_id or 0) == (False, "")
    end.set()
    thread.join()
    assert awaited(os.getpid(), thread.native_id or 0) == (False, ""), "it has ended"


def test_a_fork_ends_the_looks_before_their_time(waiting: tuple[threading.Thread, Path]) -> None:
    looks = Looks([Reader(os.getpid(), lambda: [waiting[0].native_id or 0], lambda: True)])
    looks.pause()
    assert looks.over
    assert not looks._thread.is_alive()


class Sight(Looks):
    """Looks that are done at once and saw what a test says."""

    of = "/data/1", 1.0

    def __init__(self, _: object) -> None:
        self.over, self.path = True, self.of[0]

    @property
    def share(self) -> float:
        return self.of[1]


@pytest.mark.parametrize(
    ("path", "share", "waited_s", "batches", "unseen", "found"),
    [
        ("/data/1", 1.0, 2.0, 10, True, "/data/1"),
        ("/data/1", 1.0, 2.0, 10, False, ""),  # creel knows the dataset's objects
        ("/data/1", 1.0, 0.9, 10, True, ""),  # an epoch of a second or two
        ("/data/1", 0.3, 2.0, 10, True, ""),  # two thirds of the wait were for something else
        ("", 1.0, 2.0, 10, True, ""),  # it could not be seen which file
        ("/data/1", 1.0, 29.0, 0, True, ""),  # the length of an epoch is not known
        ("/data/1", 1.0, 31.0, 0, True, "/data/1"),
    ],
)
def test_a_file_is_named_once_training_has_waited_long_for_storage(
    path: str,
    share: float,
    waited_s: float,
    batches: int,
    unseen: bool,
    found: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(own_files, "_said", set())
    monkeypatch.setattr(own_files, "Looks", Sight)
    monkeypatch.setattr(Sight, "of", (path, share))
    files = OwnFiles()
    for _ in range(2):
        files.epoch_begins(unseen=unseen, batches=batches, waited_s=5.0)
        for _ in range(3):
            files.delivered(5, 5.0 + waited_s, ())
    assert files.path == found
    said = ["this dataset opens files itself; creel.wrap(dataset) caches them"] * bool(found)
    assert [m.partition(" (training waits for ")[0] for m in caplog.messages] == said
    assert not found or f"(training waits for {path})" in caplog.text


def test_waits_that_are_a_small_part_of_an_epoch_start_no_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """100 s of training are over, 10 of 100 batches: an epoch takes 1,000 s."""
    began = time.monotonic()
    files = OwnFiles()
    files.epoch_begins(unseen=True, batches=100, waited_s=0.0)
    monkeypatch.setattr(time, "monotonic", lambda: began + 100)
    monkeypatch.setattr(own_files, "Looks", lambda _: pytest.fail("there was a look"))
    files.delivered(10, 29.0, ())
