"""Streams without a daemon: the order that readers get, and their samples."""

from __future__ import annotations

import json
import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from stream_rig import FIELDS, NBYTES, filled, record, taken
from torch.utils.data import default_collate

from creel.errors import ConfigError, SourceError, UnavailableError
from creel.loader.extras.streams.stream import Stream
from creel.streams.log import Log
from creel.streams.producer import Producer
from kit import seeds


@pytest.fixture
def folder(place: Any) -> Any:
    return place


# --- the order ------------------------------------------------------------------------------------


def steps_of(records: int, b: int, world: int, *, drop_last: bool = False) -> int:
    """Steps of so many records: one rank has an incomplete last one, as of torch's BatchSampler."""
    return records // (b * world) if world > 1 or drop_last else -(-records // b)


def arrivals(log: Log) -> list[int]:
    """Numbers of all records of a finished log, in the order of arrival: an oracle."""
    k = log.about.records
    return [n * k + i for n in log.numbers() for i in range(log.size(n) // log.nbytes)]


@pytest.mark.parametrize("seed", seeds(20))
def test_ranks_are_dealt_the_arrivals_in_global_batches(folder: Path, seed: int) -> None:
    draw = random.Random(seed)
    log = filled(folder, [draw.randint(1, 8) for _ in range(draw.randint(1, 30))])
    b, world = draw.randint(1, 6), draw.randint(1, 4)
    shuffle = draw.choice([0, 0, 1, 5, 17, 1000])
    stream = Stream(folder, None, shuffle=shuffle, seed=seed)
    drop_last = draw.random() < 0.3
    by_rank = [
        taken(stream.batches(b, drop_last=drop_last, rank=rank, world=world))
        for rank in range(world)
    ]
    order = arrivals(log)
    steps = steps_of(len(order), b, world, drop_last=drop_last)
    assert {len(own) for own in by_rank} == {steps}
    flat = [n for step in zip(*by_rank, strict=True) for own in step for n in own]
    windows = [order[i : i + shuffle] for i in range(0, len(order), shuffle)] if shuffle else []
    if not shuffle:
        assert flat == order[: steps * b * world]
    for j, window in enumerate(windows):
        generator = torch.Generator().manual_seed(seed + j)
        permuted = [window[i] for i in torch.randperm(len(window), generator=generator).tolist()]
        dealt = flat[j * shuffle : (j + 1) * shuffle]
        assert dealt == permuted[: len(dealt)]


@pytest.mark.parametrize("seed", seeds(20))
def test_an_epoch_goes_on_at_any_batch_with_any_ranks_and_batch_size(
    folder: Path, seed: int
) -> None:
    draw = random.Random(seed)
    filled(folder, [draw.randint(1, 8) for _ in range(30)])
    stream = Stream(folder, None, shuffle=draw.choice([0, 7, 50]))
    whole = [n for batch in taken(stream.batches(1)) for n in batch]
    b, world = draw.randint(1, 5), draw.randint(1, 3)
    first = stream.batches(b, rank=0, world=world)
    items = iter(first)
    count = draw.randint(0, 8)
    for _ in range(count):
        next(items)
    state = json.loads(json.dumps(items.state(count)))  # type: ignore[attr-defined]  # as checkpoints
    b2, world2 = draw.randint(1, 5), draw.randint(1, 3)
    by_rank = []
    for rank in range(world2):
        batches = stream.batches(b2, rank=rank, world=world2)
        batches.load_state_dict(state)
        by_rank.append(taken(batches))
        assert [n for batch in taken(batches) for n in batch][:1] == whole[b2 * rank :][:1]
    flat = [n for step in zip(*by_rank, strict=True) for own in step for n in own]
    remaining = whole[count * b * world :]
    assert flat == remaining[: steps_of(len(remaining), b2, world2) * b2 * world2]


def test_a_state_of_another_stream_is_refused(tmp_path: Path) -> None:
    first, other = tmp_path / "one", tmp_path / "other"
    for folder in (first, other):
        filled(folder, [4])
    state = Stream(first, None).batches(2).state_dict()
    with pytest.raises(ConfigError, match="saved state has stream"):
        Stream(other, None).batches(2).load_state_dict(state)
    with pytest.raises(ConfigError, match="saved state has shuffle"):
        Stream(first, None, shuffle=2).batches(2).load_state_dict(state)


def test_arrived_says_whether_a_batch_is_there(folder: Path) -> None:
    producer = Producer(folder, FIELDS, chunk=4, linger_s=0)
    items: Any = iter(Stream(folder, "a").batches(3))
    assert not items.arrived()
    for i in range(3):
        producer.put(**record(i))
    assert items.arrived()
    assert next(items) == [0, 4, 8]
    producer.put(**record(3))
    assert not items.arrived()
    producer.close()
    assert items.arrived()
    assert next(items) == [12]
    assert items.arrived()
    with pytest.raises(StopIteration):
        next(items)


def test_what_several_ranks_leave_out_at_the_end_is_said_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled(folder, [8, 5])
    stream = Stream(folder, None)
    for rank in (0, 1, 2):
        batches = stream.batches(2, rank=rank, world=3)
        assert [len(taken(batches)), len(taken(batches))] == [2, 2]
    assert taken(stream.batches(2, drop_last=True, rank=0, world=3)) == [[0, 1], [6, 7]]
    assert caplog.messages == [
        f"{folder}: records left out at the end: 1, fewer than a step of all ranks takes (6)"
    ]


def test_a_wait_has_a_deadline_and_a_name(folder: Path) -> None:
    Producer(folder, FIELDS)
    items = iter(Stream(folder, "a", timeout_s=0.3).batches(3))
    with pytest.raises(UnavailableError, match=r"stream: the next batch has not arrived for \d s"):
        next(items)


# --- samples --------------------------------------------------------------------------------------


def test_samples_are_dicts_of_tensors_and_transforms_get_them(folder: Path) -> None:
    filled(folder, [8, 3])
    plain = Stream(folder, None)
    assert set(plain[3]) == {"x", "i"}
    assert torch.equal(plain[3]["x"], torch.full((3, 2), 1.5))
    stream = Stream(folder, None, transform=lambda r: (r["x"] * 2, int(r["i"])))
    assert torch.equal(stream[9][0], torch.full((3, 2), 9.0))
    many = Stream(folder, None, batch_transform=lambda b: b["x"].sum((1, 2)))
    assert [float(s) for s in many.__getitems__([10, 1, 0])] == [30.0, 3.0, 0.0]
    assert torch.equal(pickle.loads(pickle.dumps(plain))[3]["x"], plain[3]["x"])
    with pytest.raises(TypeError, match="has no length"):
        len(plain)
    with pytest.raises(ConfigError, match="not both"):
        Stream(folder, None, transform=int, batch_transform=len)
    with pytest.raises(SourceError, match="has fewer records"):
        plain[8 + 5]
    with pytest.raises(SourceError, match="has not arrived"):
        plain[16]


def test_a_batch_of_many_chunks_has_few_of_them_open(folder: Path) -> None:
    filled(folder, [1] * 100, chunk=1)
    stream = Stream(folder, None)
    most, opened, me = 0, os.open, psutil.Process()

    def counted(*args: Any, **kw: Any) -> int:
        nonlocal most
        fd = opened(*args, **kw)
        most = max(most, me.num_fds())
        return fd

    before = me.num_fds()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", counted)
        got = stream.__getitems__([*range(99, -1, -1), *range(100)])
    assert [int(s["i"]) for s in got] == [*range(99, -1, -1), *range(100)]
    assert most <= before + 40
    assert me.num_fds() == before


def test_large_fields_are_read_to_their_place_as_torch_would_stack_them(folder: Path) -> None:
    fields: dict[str, Any] = {"x": ("float32", (70, 80)), "i": "int8", "y": ("int16", (9000,))}
    with Producer(folder, fields, chunk=3) as producer:
        for i in range(110):
            producer.put(x=np.full((70, 80), i / 2), i=i, y=np.arange(i, i + 9000))
    stream = Stream(folder, None)
    ids = np.random.default_rng(1).permutation(110)  # of 37 chunks
    got = stream.read_fields(ids, lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    expected = default_collate([stream[int(i)] for i in ids])
    assert got.keys() == expected.keys()
    for name, there in expected.items():
        assert torch.equal(got[name], there)
        assert got[name].dtype == there.dtype
    with pytest.raises(SourceError, match="has fewer records"):
        stream.read_fields(np.array([5, 110]), lambda n: torch.empty(n, dtype=torch.uint8))


def test_small_records_do_not_make_chunks_of_very_many(folder: Path) -> None:
    """Each chunk takes up places in a daemon's tables, however few a slow producer fills."""
    Producer(folder, {"t": "int8"})
    assert Log.open(folder).about.records == 4096


def test_the_manifest_has_future_chunks(folder: Path) -> None:
    log = filled(folder, [8])
    stream = Stream(folder, None, capacity=1000)
    assert len(stream.manifest) == stream.object_count == 1000
    assert stream.manifest.location(8 * 57 + 3) == (log.chunk(57), 3 * NBYTES, NBYTES)
    assert stream.manifest.salt == log.about.id
    with pytest.raises(IndexError):
        stream.objects(np.array([1000]))
