"""Streams through a daemon: the same batches as under torch, one read for all models."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import creel
from creel.errors import ConfigError, SourceError, TooManyBadSamplesError
from creel.streams.log import Log
from daemons import Running
from kit import seeds, unique_name
from testbed.ranks import ranks

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

FIELDS: dict[str, Any] = {"x": ("float32", (40,)), "i": "int64"}


def put(producer: creel.Producer, i: int) -> None:
    producer.put(x=np.full(40, i, np.float32), i=i)


def produce(folder: Path, n: int, pace: random.Random | None = None, **options: Any) -> None:
    """Put n records; with a `pace`, with pauses at random places and chunks of random lengths."""
    with creel.Producer(folder, FIELDS, **{"chunk": 7, "timeout_s": 60, **options}) as producer:
        for i in range(n):
            put(producer, i)
            if pace and pace.random() < 0.1:
                producer.flush()
            if pace and pace.random() < 0.05:
                time.sleep(pace.uniform(0, 0.01))


def stream(folder: Path, name: str | None = None, **options: Any) -> creel.Stream:
    return creel.Stream(folder, name, capacity=20_000, timeout_s=60, **options)


def read(loader: DataLoader[Any]) -> list[list[int]]:
    """Return the numbers of all batches, whose other field must belong to them."""
    out = []
    for batch in loader:
        assert torch.equal(batch["x"], batch["i"][:, None].expand(-1, 40).float())
        out.append(batch["i"].tolist())
    return out


def expected(n: int, b: int, shuffle: int, *, drop_last: bool = False) -> list[list[int]]:
    order: list[int] = []
    for j in range(0, n, shuffle or n):
        window = np.arange(j, min(j + (shuffle or n), n))
        generator = torch.Generator().manual_seed(j // (shuffle or n))
        own = torch.randperm(len(window), generator=generator).numpy()
        order += (window[own] if shuffle else window).tolist()
    return [order[i : i + b] for i in range(0, n - b + 1 if drop_last else n, b)]


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    """Where a stream may be: also in Redis, if the test has all kinds of `source`."""
    if "source" in request.fixturenames and request.getfixturevalue("source") == "redis":
        return request.getfixturevalue("redis") / unique_name()
    return tmp_path / "stream"


@pytest.fixture
def producing() -> Iterator[Any]:
    """A function that begins `produce` in a thread."""
    threads = []

    def begin(*args: Any, **options: Any) -> threading.Thread:
        threads.append(threading.Thread(target=produce, args=args, kwargs=options))
        threads[-1].start()
        return threads[-1]

    yield begin
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture(params=["shared folder", "local folder", "redis"])
def source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the stream is. Loaders read a local folder themselves, else the daemon's memory."""
    monkeypatch.setenv("CREEL_LOADER__DIRECT", "auto")
    if request.param == "shared folder":
        monkeypatch.setattr("creel.loader.extras.streams.stream.local", lambda _: False)
    return str(request.param)


@pytest.mark.parametrize(
    ("kind", "workers"),
    [("plain", 0), ("plain", 1), ("shuffle", 2), ("transform", 0), ("batch_transform", 2)],
)
def test_a_finished_stream_has_torchs_batches(
    daemon: Running, source: str, folder: Path, workers: int, kind: str
) -> None:
    produce(folder, 203, random.Random(1))
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "shuffle": {"shuffle": 50},
        "transform": {"transform": lambda r: (r["i"], r["x"] * 2)},
        "batch_transform": {"batch_transform": lambda b: {"s": b["x"].sum(1), "i": b["i"]}},
    }
    data = stream(folder, **kinds[kind])
    mine, theirs = [], []
    for drop_last in (False, True):
        options: dict[str, Any] = {"num_workers": workers}
        mine += list(creel.DataLoader(data, batch_size=6, drop_last=drop_last, **options))
        dealt = data.batches(6, drop_last=drop_last)
        theirs += list(DataLoader(data, batch_sampler=dealt, **options))
    assert len(mine) == len(theirs) == 34 + 33
    for a, b in zip(mine, theirs, strict=True):
        assert type(a) is type(b)
        parts = [(a[k], b[k]) for k in (a if isinstance(a, dict) else range(len(a)))]
        assert all(torch.equal(p, q) and p.dtype == q.dtype for p, q in parts)
        assert all(p.stride() == q.stride() for p, q in parts)
    assert (reads(daemon) > 0) == (source != "local folder")


def reads(daemon: Running) -> int:
    """Return how many records the daemon has read into its memory."""
    with daemon.client("cli") as client:
        return sum(source["reads"] for source in client.ask("stats")["sources"])


def finished(path: Any, b: int, shuffle: int) -> tuple[creel.Stream, Any]:
    data = stream(path, None, shuffle=shuffle)
    return data, data.batches(b)


@pytest.mark.usefixtures("daemon", "source")
def test_batches_and_replays_are_the_same_whatever_the_pace(folder: Path, producing: Any) -> None:
    for seed in seeds(20):
        pace, path = random.Random(seed), folder / str(seed)
        n, b, shuffle = pace.randint(1, 90), pace.randint(1, 9), pace.choice([0, 16])
        producing(path, n, pace, ahead=pace.choice([0, "1MB"]), keep="1MB")
        live = stream(path, "a", shuffle=shuffle)
        memory = creel.Rehearsal(pace.randint(1, 4), budget=pace.randint(4, 30), every=3)
        workers = pace.randint(0, 2)
        loader = creel.DataLoader(live, batch_size=b, num_workers=workers, rehearsal=memory)
        got = read(loader)
        new = expected(n, b, shuffle)
        assert [own[: len(rows)] for own, rows in zip(got, new, strict=True)] == new, seed
        rows = [len(own) - len(part) for own, part in zip(got, new, strict=True)]
        assert rows == [memory.per_batch if step >= 3 else 0 for step in range(len(new))]
        again, batches = memory.over(*finished(path, b, shuffle), None)
        assert read(DataLoader(again, batch_sampler=batches)) == got, seed


@pytest.mark.usefixtures("daemon", "source")
def test_a_batch_does_not_wait_for_later_ones(folder: Path) -> None:
    """torch's loader asks its sampler for 2 x num_workers batches before it returns the first."""
    for workers, transform in ((0, None), (2, None), (2, lambda r: r)):
        path = folder / f"{workers}{transform is None}"
        producer = creel.Producer(path, FIELDS, chunk=1)
        data = stream(path, "a", transform=transform)
        batches = iter(creel.DataLoader(data, batch_size=2, num_workers=workers))
        for i in range(0, 12, 2):
            put(producer, i)
            put(producer, i + 1)
            assert next(batches)["i"].tolist() == [i, i + 1]
        producer.close()
        assert not list(batches)


def test_two_models_share_one_copy(daemon: Running, folder: Path, producing: Any) -> None:
    """Each record is read once, though the second model is slower."""
    n, got = 400, dict[str, Any]()

    def train(name: str, pause_s: float) -> None:
        out = []
        for batch in creel.DataLoader(stream(folder, name), batch_size=8, num_workers=2):
            out.append(batch["i"].tolist())
            time.sleep(pause_s)
        got[name] = out

    models = [threading.Thread(target=train, args=(name, s)) for name, s in (("a", 0), ("b", 2e-3))]
    for model in models:
        model.start()
    producing(folder, n, ahead="20kB", keep="20kB", readers=("a", "b"))
    for model in models:
        model.join(60)
    assert got["a"] == got["b"] == expected(n, 8, 0)
    with daemon.client("cli") as client:
        (source,) = client.ask("stats")["sources"]
    assert source["nbytes"] == n * 168
    assert source["errors"] == 0


def test_ranks_of_a_job_get_equally_many_batches(folder: Path, monkeypatch: Any) -> None:
    n, b = 150, 4
    name = unique_name()
    monkeypatch.setenv("CREEL_SOCKET", name)
    with Running(name):

        def train(rank: int) -> list[list[int]]:
            if rank == 0:
                threading.Thread(target=produce, args=(folder / "s", n, random.Random(3))).start()
            return read(creel.DataLoader(stream(folder / "s", "job"), batch_size=b, num_workers=1))

        folder.mkdir()
        first, second = ranks(train, folder)
    assert len(first) == len(second) == n // (2 * b)
    steps = [[*a, *c] for a, c in zip(first, second, strict=True)]
    assert steps == expected(n, 2 * b, 0, drop_last=True)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_stay_the_same_without_their_daemon(
    daemon: Running, folder: Path, producing: Any, workers: int
) -> None:
    n = 200
    producing(folder, n, ahead="10kB", keep="20kB")
    loader = creel.DataLoader(stream(folder, "a"), batch_size=4, num_workers=workers)
    got = []
    for batch in loader:
        got.append(batch["i"].tolist())
        if len(got) == 15:
            daemon.process.kill()
            daemon.process.wait()
    assert got == expected(n, 4, 0)


@pytest.mark.usefixtures("daemon", "source")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_chunk_that_is_deleted_before_it_was_read_is_named(folder: Path, workers: int) -> None:
    produce(folder, 70, chunk=1)
    batches = iter(creel.DataLoader(stream(folder), batch_size=7, num_workers=workers))
    assert next(batches)["i"].tolist() == list(range(7))
    for number in range(60):
        Log.open(folder).delete(number)
    with pytest.raises(SourceError, match=r"chunk \d+ has been deleted, the next one is 60"):
        list(batches)


def test_samples_beyond_the_capacity_are_read_directly(daemon: Running, folder: Path) -> None:
    produce(folder, 60)
    data = creel.Stream(folder, None, capacity=28)
    assert read(creel.DataLoader(data, batch_size=4, num_workers=1)) == expected(60, 4, 0)
    with daemon.client("cli") as client:
        (source,) = client.ask("stats")["sources"]
    assert source["nbytes"] == 28 * 168


@pytest.mark.usefixtures("daemon", "source")
def test_a_position_resumes_with_other_workers_and_batch_size(folder: Path) -> None:
    produce(folder, 120)
    order = [i for batch in expected(120, 1, 32) for i in batch]
    first = creel.DataLoader(stream(folder, "a", shuffle=32), batch_size=5, num_workers=2)
    for count, _ in enumerate(first, 1):
        if count == 9:
            break
    state = first.state_dict()
    assert state["batches"] == 9
    assert len(repr(state)) < 400
    then = creel.DataLoader(stream(folder, "a", shuffle=32), batch_size=3)
    then.load_state_dict(state)
    remaining = read(then)
    assert [i for batch in remaining for i in batch] == order[45:]
    assert not read_resumed(folder, then.state_dict())  # all is read
    again = creel.DataLoader(stream(folder, "a", shuffle=32), batch_size=3)
    again.load_state_dict(then.state_dict())
    assert not read_resumed(folder, again.state_dict())
    assert [i for batch in read(then) for i in batch] == order  # a further epoch is a whole one
    earlier = creel.DataLoader(stream(folder, "a", shuffle=32), batch_size=5)
    earlier.load_state_dict(first.state_dict(delivered=2))
    assert next(iter(earlier))["i"].tolist() == order[10:15]


def read_resumed(folder: Path, state: Any) -> list[list[int]]:
    loader = creel.DataLoader(stream(folder, "a", shuffle=32), batch_size=3, num_workers=1)
    loader.load_state_dict(state)
    return read(loader)


#: Numbers of records that a transform refuses: some of a batch of four, a whole one, and its chunk.
BAD = {9, 10, 20, 21, 22, 23, 33}


def good_only(record: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if int(record["i"]) in BAD:
        raise ValueError("damaged")
    return record


@pytest.mark.usefixtures("daemon", "source")
@pytest.mark.parametrize("chunk", [1, 7])
def test_a_record_that_a_transform_refuses_is_left_out_or_replaced_by_one_that_is_there(
    folder: Path, chunk: int
) -> None:
    """By one of its batch, or of the chunks of that: others may be deleted, or yet to come."""
    n = 20 if chunk == 1 else 40  # beside a batch of 20 to 23 nothing need be there
    produce(folder, n, chunk=chunk, linger_s=1e9)
    data = stream(folder, transform=good_only)
    for mode in ("skip", "substitute"):
        got = []
        for workers in (0, 2):
            loader = creel.DataLoader(data, 4, on_error=mode, num_workers=workers)
            batches = []
            for batch in loader:
                batches.append(batch["i"].tolist())
                assert loader.indices.tolist() == batches[-1]
            got.append(batches)
        assert got[0] == got[1]
        for k, batch in zip(range(0, n, 4), got[0], strict=True):
            good = [i for i in range(k, k + 4) if i not in BAD]
            beside = range(k // chunk * chunk, ((k + 3) // chunk + 1) * chunk)
            assert [i for i in batch if i in good] == good or mode == "substitute"
            assert len(batch) == (4 if mode == "substitute" else max(len(good), 1))
            assert set(batch) <= set(good or beside) - BAD


def test_a_batch_without_a_good_record_beside_it_raises(folder: Path) -> None:
    produce(folder, 24, chunk=1)
    data = stream(folder, transform=good_only)
    loader = creel.DataLoader(data, 4, on_error="skip", creel=False)
    with pytest.raises(TooManyBadSamplesError, match="could be read in the place of sample 20"):
        list(loader)


def test_a_loader_of_a_stream_says_what_it_cannot_do(folder: Path) -> None:
    produce(folder, 9)
    data = stream(folder)
    wrong: Any
    for wrong in ({"shuffle": True}, {"batch_size": None}, {"batch_size": 0}, {"replicate": 2}):
        with pytest.raises(ConfigError):
            creel.DataLoader(data, **wrong)
    with pytest.raises(TypeError, match="no length"):
        next(iter(DataLoader(data, batch_size=2)))
    given = creel.DataLoader(data, batch_sampler=data.batches(2, rank=1, world=2), creel=False)
    assert read(given) == [[2, 3], [6, 7]]


def test_without_creel_the_batches_are_the_same(folder: Path, monkeypatch: Any) -> None:
    produce(folder, 50)
    monkeypatch.setitem(os.environ, "CREEL_DISABLE", "1")
    loader = creel.DataLoader(stream(folder), batch_size=4, num_workers=1)
    assert read(loader) == expected(50, 4, 0)


def test_the_example_streams_a_simulation_to_two_models_at_once() -> None:
    script = Path(__file__).parents[3] / "examples" / "gray_scott.py"
    command = [sys.executable, str(script), "--steps", "192"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    for name in ("linear", "hidden"):
        assert re.search(rf"^{name} +12 batches", done.stdout, re.MULTILINE), done.stdout
    assert done.stdout.count("records/s ") == 2
