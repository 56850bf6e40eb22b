"""Storage errors: which are tried again, for how long, and what is reported."""

from __future__ import annotations

import errno
import logging
import os
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from source_rig import QUICK, folder, read_into

from creel.cache.storage.manifest import Manifest
from creel.cache.storage.source import Source
from creel.cache.storage.stores import retry
from creel.cache.storage.stores.retry import pause_s, source_error, transient
from creel.cache.storage.stores.store import Filled, LocalStore, OpenFile, Run, StoredFile
from creel.errors import SourceError
from creel.settings import FetchSettings

pytestmark = pytest.mark.timeout(120)


class _Flaky(LocalStore):
    """Fails the first `left` reads with `error`."""

    error: Exception
    left: int

    def read(
        self, place: StoredFile, offset: int, length: int, *, versioned: bool = False
    ) -> tuple[bytes, int]:
        if self.left:
            self.left -= 1
            raise self.error
        return super().read(place, offset, length, versioned=versioned)

    def fill(
        self, place: StoredFile, runs: Sequence[Run], opened: OpenFile | None = None
    ) -> list[Filled]:
        if self.left:
            self.left -= 1
            if opened is not None:
                os.close(opened.fd)
            raise self.error
        return super().fill(place, runs, opened)


def flaky(
    monkeypatch: pytest.MonkeyPatch, manifest: Manifest, error: Exception, failures: int
) -> Source:
    """Return a source whose store of local files is a `_Flaky`."""
    monkeypatch.setattr(_Flaky, "error", error, raising=False)
    monkeypatch.setattr(_Flaky, "left", failures, raising=False)
    monkeypatch.setattr("creel.cache.storage.source.LocalStore", _Flaky)
    return Source(manifest, QUICK)


@pytest.mark.parametrize("seed", range(20))
def test_bytes_that_a_server_sent_are_not_in_the_error(seed: int) -> None:
    """aiohttp quotes bytes that it did not expect, and fsspec repeats that."""
    junk = np.random.default_rng(seed).bytes(400)
    for text in (
        f"400, message={f'Bad status line:{chr(10)}  {junk[:99]!r}{chr(10)}  ^'!r}, url='http://h/x'",
        junk.decode("ascii", "surrogateescape"),
        junk.decode("latin-1"),
    ):
        said = source_error(OSError(text), "http://h/x").strerror or ""
        assert len(said) <= 300
        assert said.isprintable()
        assert "\\x" not in said
    assert "Bad status line" in (source_error(OSError("Bad status line"), "").strerror or "")


class _HttpError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status


class _Asyncio310:
    """Until Python 3.10 asyncio had a class of its own for this."""

    class TimeoutError(Exception):  # noqa: A001
        pass


class _FsspecTimeout(_Asyncio310.TimeoutError):
    pass


@pytest.mark.parametrize(
    "error, again",
    [
        (OSError(errno.EIO, "I/O error"), True),
        (OSError(errno.ESTALE, "stale handle"), True),
        (ConnectionResetError(errno.ECONNRESET, "reset"), True),
        (TimeoutError(), True),
        (_FsspecTimeout(), True),
        (_HttpError(503), True),
        (_HttpError(429), True),
        (_HttpError(403), False),
        (OSError("AWS Error SLOW_DOWN during GetObject operation: Please reduce"), True),
        (OSError("AWS Error ACCESS_DENIED during HeadObject operation"), False),
        (PermissionError(errno.EACCES, "denied"), False),
        (FileNotFoundError(errno.ENOENT, "no such file"), False),
        (IsADirectoryError(errno.EISDIR, "a folder"), False),
        (ValueError("our bug"), False),
    ],
    ids=str,
)
def test_only_what_may_pass_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, again: bool
) -> None:
    assert transient(error) is again
    files, contents = folder(tmp_path, [10])
    source = flaky(monkeypatch, files, error, 2)
    if again:
        assert source.read(0) == contents[0]
    else:
        with pytest.raises(SourceError):
            source.read(0)
    assert source.counters.snapshot().retries == 2 * again
    source = flaky(monkeypatch, files, error, 2)
    got, read = read_into(source, [0])
    assert read == contents if again else got.tolist() == [-1]
    assert source.counters.snapshot().retries == 2 * again


def test_patience_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, _ = folder(tmp_path, [10])
    source = flaky(monkeypatch, files, OSError(errno.EIO, "I/O error"), 100)
    with pytest.raises(SourceError) as caught:
        source.read(0)
    assert caught.value.errno == errno.EIO
    assert source.counters.snapshot().retries == QUICK.attempts - 1


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    """A source whose every read fails with an error that may pass."""

    def fail(_: LocalStore, place: StoredFile, *__: int) -> bytes:
        raise OSError(errno.EIO, "the disk coughs", place.uri)

    monkeypatch.setattr(LocalStore, "read", fail)
    monkeypatch.setattr(retry, "_warned", {})  # once a minute in a process
    return Source(folder(tmp_path, [1, 1])[0], QUICK)


def test_retries_make_one_line_in_the_log(
    failing: Source, caplog: pytest.LogCaptureFixture
) -> None:
    for i in (0, 1):
        with pytest.raises(SourceError):
            failing.read(i)
    (line,) = (r for r in caplog.records if r.levelno >= logging.WARNING)
    assert line.name == "creel.source"
    again = f"trying again, at most {QUICK.attempts - 1} times and for at most 60 s"
    assert f"000: the disk coughs: {again}" in line.getMessage()


def test_retries_leave_the_persons_random_numbers_alone(failing: Source) -> None:
    before = random.getstate()
    with pytest.raises(SourceError):
        failing.read(0)
    assert random.getstate() == before


@pytest.mark.parametrize("seed", range(50))
def test_pauses_double_within_attempts_and_time(seed: int) -> None:
    rng = random.Random(seed)
    settings = FetchSettings(
        attempts=rng.randrange(1, 12),
        deadline_s=rng.choice([0.5, 3.0, 60.0]),
        backoff_s=rng.choice([0.0, 0.1, 1.0]),
        backoff_max_s=rng.choice([0.3, 5.0]),
    )
    now, pauses = 0.0, []
    for tries in range(1, 200):
        now += rng.random() / 10
        pause = pause_s(settings, tries, now, rng.random())
        if pause is None:
            break
        least = min(settings.backoff_s * 2 ** (tries - 1), settings.backoff_max_s)
        assert least <= pause <= min(least + settings.backoff_s, settings.backoff_max_s)
        now += pause
        assert now <= settings.deadline_s
        pauses.append(pause)
    assert len(pauses) < settings.attempts
    out_of_time = now + settings.backoff_max_s + settings.backoff_s > settings.deadline_s
    assert len(pauses) == settings.attempts - 1 or out_of_time


def test_no_key_in_an_address_is_told() -> None:
    error = source_error(ConnectionError("no"), "s3://AKIA:hush@bucket/x?sig=hush&version=2")
    assert "hush" not in str(error)
    assert error.uri == "s3://bucket/x?sig=...&version=2"


def test_nor_by_a_storage_that_says_the_address_itself() -> None:
    uri = "https://me:hush@host/x?token=hush"
    for error in (SourceError(5, "ends early", uri), OSError(f"503, url='{uri}'")):
        error_shown = source_error(error, uri)
        assert "hush" not in str(error_shown)
        assert error_shown.uri == "https://host/x?token=..."
    assert str(error_shown.strerror) == "503, url='https://host/x?token=...'"


def test_a_file_that_fails_among_others_is_tried_again_and_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, contents = folder(tmp_path, [10, 20, 0, 30, 40])
    (tmp_path / "001").unlink()
    # of the first failure
    source = flaky(monkeypatch, files, OSError(errno.EIO, "I/O error"), 2)
    got, read = read_into(source, [0, 1, 2, 3, 4])
    assert got.tolist() == [10, -1, 0, 30, 40]
    assert [read[i] for i in (0, 2, 3, 4)] == [contents[i] for i in (0, 2, 3, 4)]
    counters = source.counters.snapshot()
    assert (counters.opens, counters.nbytes, counters.retries) == (4, 80, 2)
    assert counters.reads == sum(counters.seconds) == 4
    assert counters.errors == {"ENOENT": 1}
