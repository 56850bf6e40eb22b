"""Rehearsal over a stream: what is replayed, resumed, and kept in the log for it."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from stream_rig import FIELDS, NBYTES, filled, record, taken
from torch.utils.data import DataLoader

import creel
from creel.errors import ConfigError, SourceError
from creel.loader.extras.streams import reader_notes
from creel.loader.extras.streams.batches import StreamBatches
from creel.loader.extras.streams.stream import Stream
from creel.policies.rehearsal.memory_rows import UNLABELLED, Offered, kept, mixed
from creel.policies.rehearsal.replay_passes import Passes
from creel.streams import cursors
from creel.streams.log import Log, medium_of
from creel.streams.producer import Producer
from kit import seeds, until
from testbed.redis_server import Address

Place = Path | Address


def dealt(stream: Stream, memory: creel.Rehearsal, b: int, world: int = 1) -> list[list[list[int]]]:
    """Return the batches of all ranks: steps, ranks, numbers."""
    content = memory.content()
    ranks = (
        taken(stream.batches(b, rank=rank, world=world).rehearsing(content))
        for rank in range(world)
    )
    return [list(step) for step in zip(*ranks, strict=True)]


def held(memory: creel.Rehearsal, records: list[int]) -> NDArray[np.int64]:
    """Return what the memory keeps once it was offered these records: an oracle."""
    uids = np.unique(np.array(records, np.int64))
    offered = Offered(uids, np.full(len(uids), UNLABELLED), mixed(uids, memory.seed))
    return uids[kept(offered, memory.budget, memory.seed + 1)]


@pytest.mark.parametrize("seed", seeds(12))
def test_each_block_replays_what_was_kept_of_the_blocks_before(place: Place, seed: int) -> None:
    draw = random.Random(seed)
    filled(place, [draw.randint(1, 8) for _ in range(40)])
    b, r, world = draw.randint(1, 4), draw.randint(1, 5), draw.randint(1, 3)
    every = draw.randint(1, 5)
    memory = creel.Rehearsal(r, budget=draw.choice([7, 30, 1000]), seed=seed, every=every)
    stream = Stream(place, None, shuffle=draw.choice([0, 11]), seed=seed)
    bare = [
        list(step)
        for step in zip(
            *(taken(stream.batches(b, rank=rank, world=world)) for rank in range(world)),
            strict=True,
        )
    ]
    steps = dealt(stream, memory, b, world)
    assert len(steps) == len(bare)
    for t, (step, new) in enumerate(zip(steps, bare, strict=True)):
        block, inside = divmod(t, every)
        assert [own[: len(rows_new)] for own, rows_new in zip(step, new, strict=True)] == new
        rows = [own[len(rows_new) :] for own, rows_new in zip(step, new, strict=True)]
        if not block:
            assert rows == [[]] * world
            continue
        there = held(memory, [n for s in bare[: block * every] for own in s for n in own])
        own_seed = int(mixed(np.array([block]), memory.content().seed)[0])
        passes = Passes(len(there), r, world, own_seed)
        to_all = there[passes.to_all(np.array([inside]), passes.head)[0]]
        assert rows == [sorted(to_all[rank::world].tolist()) for rank in range(world)]


@pytest.mark.parametrize("seed", seeds(12))
def test_a_rehearsed_stream_goes_on_at_any_batch_with_any_ranks_of_as_large_steps(
    tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    filled(tmp_path / "s", [draw.randint(1, 8) for _ in range(40)])
    stream = Stream(tmp_path / "s", None, shuffle=draw.choice([0, 10]))
    every, budget = draw.randint(1, 6), draw.choice([12, 50])
    whole = dealt(stream, creel.Rehearsal(4, budget=budget, every=every), 4)
    items: Any = iter(
        stream.batches(4).rehearsing(creel.Rehearsal(4, budget=budget, every=every).content())
    )
    count, ahead = draw.randint(0, 15), draw.randint(0, 5)
    for _ in range(count + ahead):
        next(items)
    state = json.loads(json.dumps(items.state(count)))
    for world in (1, 2, 4):
        memory = creel.Rehearsal(4 // world, budget=budget, every=every)
        ranks = []
        for rank in range(world):
            batches = stream.batches(4 // world, rank=rank, world=world)
            batches = batches.rehearsing(memory.content())
            batches.load_state_dict(state)
            ranks.append(taken(batches))
        steps = [sorted(n for own in step for n in own) for step in zip(*ranks, strict=True)]
        complete = [sorted(step[0]) for step in whole[count:] if len(step[0]) % 4 == 0]
        assert steps[: len(complete)] == complete
        assert len(steps) == (len(whole) - count if world == 1 else len(complete))


def test_training_may_be_many_blocks_behind_what_was_dealt(tmp_path: Path) -> None:
    filled(tmp_path / "s", [8] * 100)
    memory = creel.Rehearsal(2, budget=9, every=1)
    items: Any = iter(Stream(tmp_path / "s", "a").batches(2).rehearsing(memory.content()))
    items.reports = True
    for _ in range(400):
        next(items)
    for batch in range(1, 401):
        items.delivered(batch)
    assert items.state(400)["rehearsal"]["step"] == 400


def test_over_is_what_the_loader_reads(tmp_path: Path) -> None:
    filled(tmp_path / "s", [5] * 30)
    stream, memory = Stream(tmp_path / "s", None), creel.Rehearsal(3, budget=9, every=2)
    data, batches = memory.over(stream, stream.batches(4), None)
    theirs = [b["i"].tolist() for b in DataLoader(data, batch_sampler=batches, num_workers=1)]
    loader = creel.DataLoader(stream, 4, rehearsal=memory, creel=False)
    assert [b["i"].tolist() for b in loader] == theirs
    assert [len(b) for b in theirs] == [4] * 2 + [7] * 35 + [5]  # the last one is incomplete
    given = creel.DataLoader(
        stream, batch_sampler=stream.batches(4, rank=0, world=1), rehearsal=memory, creel=False
    )
    assert [b["i"].tolist() for b in given] == theirs


def test_a_memory_that_does_not_fit_a_stream_is_refused(tmp_path: Path) -> None:
    filled(tmp_path / "s", [5] * 30)
    stream = Stream(tmp_path / "s", None)
    added = creel.Rehearsal(3, budget=9, every=2)
    added.add(list(range(5)))  # type: ignore[arg-type]  # map-style all the same
    wrong = {
        "every=": creel.Rehearsal(3, budget=9),
        "budget=": creel.Rehearsal(3, every=2),
        "begins empty": added,
    }
    for text, memory in wrong.items():
        with pytest.raises(ConfigError, match=text):
            creel.DataLoader(stream, 4, rehearsal=memory)
    memory = creel.Rehearsal(3, budget=9, every=2)
    with pytest.raises(ConfigError, match="length"):
        memory.over(stream, stream.batches(4), 4)  # batches of batches
    with pytest.raises(ConfigError, match="its own batches"):
        creel.DataLoader(stream, batch_sampler=[[0], [1]], rehearsal=memory)
    first = creel.DataLoader(stream, 4, rehearsal=memory, creel=False)
    next(iter(first))
    for other in (creel.Rehearsal(3, budget=8, every=2), None):
        loader = creel.DataLoader(stream, 4, rehearsal=other, creel=False)
        with pytest.raises(ConfigError, match="the saved state is with the memory"):
            loader.load_state_dict(first.state_dict())


# --- what stays in the log ------------------------------------------------------------------------

#: A record fills a page, so that it can be deleted between others.
PAGES: dict[str, Any] = {"x": ("float32", (1022,)), "i": "int64"}


def page(i: int) -> dict[str, Any]:
    return {"x": np.full(1022, i, np.float32), "i": i}


def stored(place: Place) -> int:
    """Return the bytes that a stream's chunks take up."""
    if isinstance(place, Path):
        return sum(p.stat().st_blocks * 512 for p in place.glob("0*"))
    client = medium_of(place)._server()  # type: ignore[attr-defined]
    strings = sum(client.strlen(k) for k in client.keys(f"{key(place)}:*") if k[-1:].isdigit())
    kept = client.keys(f"{key(place)}:*:kept")
    return int(strings + sum(len(v) for k in kept for v in client.hvals(k)))


def key(place: Address) -> str:
    return place.rpartition("/")[2]


@pytest.mark.parametrize("shuffle", [0, 12])
def test_representatives_stay_and_all_else_is_deleted(place: Place, shuffle: int) -> None:
    """The folder holds `ahead`, `keep`, the records of a block and those of the memory."""
    n, b, every, budget = 600, 4, 5, 16
    memory = creel.Rehearsal(3, budget=budget, every=every)
    got: list[list[int]] = []

    def read() -> None:
        stream = Stream(place, "a", shuffle=shuffle, timeout_s=60)
        for batch in creel.DataLoader(stream, b, rehearsal=memory, creel=False):
            assert batch["x"].tolist() == [[i] * 1022 for i in batch["i"].tolist()]
            got.append(batch["i"].tolist())

    limits: dict[str, Any] = {"ahead": 40 * 4096, "keep": 20 * 4096, "chunk": 4, "timeout_s": 60}
    reader = threading.Thread(target=read)
    reader.start()
    most = 0
    with Producer(place, PAGES, linger_s=1e9, readers=("a",), **limits) as producer:
        for i in range(n):
            producer.put(**page(i))
            if i % 20 == 0:
                most = max(most, stored(place))
    reader.join(60)
    # what has left is kept for `keep` bytes: at most as many as two blocks bring in
    assert most <= (40 + 20 + b * every + shuffle + 2 * budget + 3 * 4) * 4096
    whole = Path(f"{place}-whole") if isinstance(place, Path) else place / "whole"
    with Producer(whole, PAGES, chunk=4, linger_s=1e9) as producer:
        for i in range(n):
            producer.put(**page(i))
    again = Stream(whole, None, shuffle=shuffle)
    data, batches = memory.over(again, again.batches(b), None)
    assert [x["i"].tolist() for x in DataLoader(data, batch_sampler=batches)] == got
    left = Log.open(place)
    assert any(left.size(number) < 0 for number in left.numbers())  # parts of chunks
    with pytest.raises(SourceError, match="chunk 0 has been deleted"):
        taken(Stream(place, "late").batches(1))
    numbers = [number for number in left.numbers() if left.size(number) < 0]
    with pytest.raises(SourceError, match="has been deleted"):
        Stream(place, None).__getitems__([number * 4 + i for number in numbers for i in range(4)])


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let readers write their cursors with every batch."""
    monkeypatch.setattr(reader_notes, "_CURSOR_S", 0)


@pytest.mark.usefixtures("at_once")
def test_a_checkpoint_that_is_too_old_for_its_memory_is_refused(place: Place) -> None:
    memory = creel.Rehearsal(2, budget=4, every=2)
    limits: dict[str, Any] = {"ahead": "1MB", "keep": 0, "chunk": 1}
    producer = Producer(place, FIELDS, readers=("a",), **limits)
    for i in range(200):
        producer.put(**record(i))

    def begun(state: Any = None) -> Any:
        batches = Stream(place, "a", timeout_s=5).batches(2).rehearsing(memory.content())
        if state is not None:
            batches.load_state_dict(state)
        items: Any = iter(batches)
        items.reports = True
        return items

    items = begun()
    states = {}
    for batch in range(1, 91):
        next(items)
        items.delivered(batch)
        states[batch] = items.state(batch)
    producer.put(**record(200))  # deletes what was passed
    last = begun(states[90])
    assert next(last) == next(items)
    cursors.write(medium_of(place), "a", 0, cursors.Cursor(180, 0, 2 * NBYTES))
    with pytest.raises(SourceError, match="has been deleted"):
        next(begun(states[20]))
    # its records are there again in another stream, but not what its memory had then
    state = {**states[20], "place": states[90]["place"]}
    with pytest.raises(SourceError, match="the memory has records of chunk"):
        next(begun(state))


@pytest.mark.usefixtures("at_once")
def test_a_reader_without_a_memory_gives_back_what_its_last_run_held(place: Place) -> None:
    memory = creel.Rehearsal(2, budget=4, every=2)
    limits: dict[str, Any] = {"ahead": "1MB", "keep": 0, "chunk": 1}
    producer = Producer(place, FIELDS, readers=("a",), **limits)
    for i in range(100):
        producer.put(**record(i))

    def read(batches: StreamBatches) -> Any:
        items: Any = iter(batches)
        items.reports = True
        for batch in range(1, 41):
            next(items)
            items.delivered(batch)
        return items.state(40)

    stream = Stream(place, "a", timeout_s=5)
    state = read(stream.batches(2).rehearsing(memory.content()))
    producer.put(**record(100))
    log = Log.open(place)
    assert len([number for number in log.numbers() if number < 76]) in range(1, 13)
    del state["rehearsal"]
    plain = stream.batches(2)
    plain.load_state_dict(state)
    items: Any = iter(plain)
    items.reports = True
    next(items)
    items.delivered(1)
    producer.put(**record(101))
    assert log.numbers()[0] >= 76
    until(lambda: log.size(0) < 0, event="the first chunk is deleted")


def test_holes_never_read_as_records(tmp_path: Path) -> None:
    """Of a chunk with holes a record is read as it was, or not at all; small ones stay in part."""
    log = filled(tmp_path / "s", [1000], chunk=1000)  # 32 kB: eight blocks
    log.delete(0, np.array([3, 400, 401, 999]))
    stream, left = Stream(tmp_path / "s", None), []
    for number in range(1000):
        try:
            records = stream[number]
        except SourceError:
            continue
        assert {k: v.tolist() for k, v in records.items()} == {
            "x": [[number / 2] * 2] * 3,
            "i": number,
        }
        left.append(number)
    assert {3, 400, 401, 999} <= set(left)
    assert len(left) == 3 * 128 - 24  # three blocks of 128 records, the last one is not full
    log.delete(0, np.array([401]))
    assert int(stream[401]["i"]) == 401
    with pytest.raises(SourceError):
        stream[3]
    log.delete(0)
    assert log.numbers() == []
