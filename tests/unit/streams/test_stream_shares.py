"""Which part of a stream a process reads: what it asks for, or its share of a launcher's ranks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stream_rig import FIELDS, filled, record, samples, taken

import creel
from creel.errors import ConfigError, SourceError
from creel.loader.extras.streams import share
from creel.loader.extras.streams.stream import Stream
from creel.streams.log import Log, medium_of
from creel.streams.producer import Producer
from testbed.redis_server import Address

Place = Path | Address
Opened = Callable[..., Stream]


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is to open a stream has done so when it is read, unless a test says otherwise."""
    monkeypatch.setattr(share, "_MEET_S", 0)


@pytest.fixture
def opened(place: Place, monkeypatch: pytest.MonkeyPatch) -> Opened:
    """A function that opens the stream as the rank of a launcher."""

    def open_as(at: int, of: int, name: str | None = "a", job: str = "1", **options: Any) -> Stream:
        env = {"OMPI_COMM_WORLD_RANK": str(at), "OMPI_COMM_WORLD_SIZE": str(of)}
        for key, value in {**env, "PMIX_NAMESPACE": job}.items():
            monkeypatch.setenv(key, value)
        return Stream(place, name, **options)

    return open_as


def read(stream: Stream) -> list[int]:
    return [n for batch in taken(stream.batches(2)) for n in batch]


def test_a_launchers_ranks_share_a_stream_that_all_of_them_open(
    place: Place, opened: Opened, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever begins to read first: it waits for the others."""
    monkeypatch.setattr(share, "_MEET_S", 60)
    filled(place, [8])
    first, got = opened(0, 2), dict[int, list[int]]()
    reader = threading.Thread(target=lambda: got.update({0: read(first)}))
    reader.start()
    got[1] = read(opened(1, 2))
    reader.join(60)
    assert got == {0: [0, 1, 4, 5], 1: [2, 3, 6, 7]}
    assert "a reads as rank 0 of 2" in caplog.text
    assert "a reads as rank 1 of 2" in caplog.text
    assert read(first) == got[0]
    assert caplog.text.count("reads as") == 2


def test_a_launchers_only_reader_gets_all_that_the_other_ranks_produce(
    place: Place, opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    """As of `mpirun -n 4 sim : -n 1 train`; no producer waits for ranks that never read."""

    def produce() -> None:
        with Producer(place, FIELDS, ahead=0, chunk=1, timeout_s=60) as producer:
            for i in range(50):
                producer.put(**record(i))

    producer = threading.Thread(target=produce)
    producer.start()
    stream = opened(4, 5, timeout_s=60)
    got = [b["i"].tolist() for b in creel.DataLoader(stream, 5, creel=False)]
    producer.join(60)
    assert got == [list(range(i, i + 5)) for i in range(0, 50, 5)]
    assert "a reads all of it (the launcher has 5 ranks; Stream(rank=, world=)" in caplog.text


def test_models_that_a_launcher_starts_together_read_all_each(place: Place, opened: Opened) -> None:
    filled(place, [8])
    first, other = opened(0, 2, "a"), opened(1, 2, "b")
    assert read(first) == read(other) == list(range(8))
    nameless = [opened(rank, 2, None) for rank in range(2)]
    assert [read(stream) for stream in nameless] == [list(range(8))] * 2


def test_ranks_of_which_some_only_read_under_a_name_are_refused(
    place: Place, opened: Opened
) -> None:
    """Also one that comes when another has begun to read all of it. Nothing is read twice."""
    filled(place, [8])
    some = [opened(rank, 3) for rank in (1, 2)]
    for stream in some:
        with pytest.raises(ConfigError, match=r"3 ranks, 1, 2 opened it as a, but not 0: give"):
            read(stream)
    assert read(opened(0, 2, "b")) == list(range(8))
    with pytest.raises(
        ConfigError, match=r"2 ranks, 0, 1 opened it as b, but one began to read before"
    ):
        read(opened(1, 2, "b"))


def test_ranks_of_other_launches_do_not_count(place: Place, opened: Opened) -> None:
    filled(place, [8])
    for rank in (0, 1):
        opened(rank, 2, job="earlier")
    opened(1, 3)
    assert read(opened(0, 2)) == list(range(8))


def test_a_share_that_is_asked_for_is_taken(
    place: Place, opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    filled(place, [8])
    caplog.set_level(logging.INFO, "creel")
    assert read(opened(0, 2, rank=0, world=1)) == list(range(8))
    stream = opened(0, 2, rank=1, world=2)
    assert read(stream) == [2, 3, 6, 7]
    loader = creel.DataLoader(stream, 2, creel=False)
    assert [b["i"].tolist() for b in loader] == samples(place, [[2, 3], [6, 7]])
    assert caplog.text.count("a reads as rank 1 of 2") == 1
    assert taken(stream.batches(2, rank=0, world=2)) == [[0, 1], [4, 5]]
    assert not medium_of(place).notes("launched")
    wrong: Any
    for wrong in ({"rank": 0}, {"world": 2}, {"rank": 2, "world": 2}, {"rank": 0, "world": 0}):
        with pytest.raises(ConfigError, match="give both, with 0 <= rank < world"):
            opened(0, 2, **wrong)
        with pytest.raises(ConfigError, match="give both, with 0 <= rank < world"):
            stream.batches(2, **wrong)


def test_ranks_that_cannot_meet_are_told_what_to_give(
    place: Place, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    medium = type(filled(place, [8]).medium)

    def refused(*_: object) -> bool:
        raise SourceError(13, "Permission denied", str(place))

    monkeypatch.setattr(medium, "write", refused)
    with pytest.raises(ConfigError, match=r"cannot meet there, give Stream\(rank=, world=\)"):
        opened(0, 2)
    assert read(opened(0, 2, None)) == list(range(8))


def test_a_position_is_not_lost_with_a_refusal(place: Place, opened: Opened) -> None:
    log = filled(place, [8])
    ahead = iter(Stream(place, None, rank=0, world=1).batches(2))
    next(ahead)
    state = ahead.state(1)  # type: ignore[attr-defined]  # an ArrivalIter
    opened(1, 3)
    batches = opened(0, 3).batches(2)
    batches.load_state_dict(state)
    with pytest.raises(ConfigError, match="but not 2"):
        next(iter(batches))
    opened(2, 3)
    assert next(iter(batches)) == [2, 3]
    assert Log.open(place).about.id == log.about.id
