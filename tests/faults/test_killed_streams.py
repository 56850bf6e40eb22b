"""Streams whose producers and trainers are killed: no record is lost or read twice."""

from __future__ import annotations

import json
import os
import random
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import creel
from creel.streams.log import Log
from programs import Program

pytestmark = pytest.mark.timeout(240)

KILLS = 10

TRAIN = """
    import json, sys
    import creel

    path, batch, workers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    stream = creel.Stream(path, "job", capacity=20_000, timeout_s=60)
    memory = creel.Rehearsal(2, budget=8, every=4) if sys.argv[4:] else None
    loader = creel.DataLoader(stream, batch_size=batch, num_workers=workers, rehearsal=memory)
    loader.load_state_dict(json.loads(sys.stdin.readline()))
    for batch in loader:
        print(json.dumps([batch["i"].tolist(), loader.state_dict()]), flush=True)
        sys.stdin.readline()
    print("null", flush=True)
"""

PRODUCE = """
    import sys
    import creel

    with creel.Producer(sys.argv[1], {"i": "int64"}, chunk=16, linger_s=0.002) as producer:
        for i in range(int(sys.argv[2]), 1 << 40):
            producer.put(i=i)
            if i % 100 == 0:
                print(i, flush=True)
"""


class Ranks:
    """The ranks of a job, each a process, in step; killed when the block ends."""

    def __init__(
        self, folder: Path, state: Any, world: int, batch: int, workers: int, *more: str
    ) -> None:
        words = str(folder), str(batch), str(workers), *more
        env = {**os.environ, "WORLD_SIZE": str(world)}
        self.ranks = [Program(TRAIN, *words, env={**env, "RANK": str(r)}) for r in range(world)]
        for one in self.ranks:
            print(json.dumps(state), file=one.stdin, flush=True)

    def step(self) -> list[Any]:
        """Return what each rank says of its next batch: its records, and the loader's state."""
        said = [json.loads(one.stdout.readline() or "null") for one in self.ranks]
        for one in self.ranks:
            print("go", file=one.stdin, flush=True)
        return said

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.ranks:
            one.kill()
            one.wait()
            for pipe in (one.stdin, one.stdout, one.stderr):
                with suppress(BrokenPipeError):
                    pipe.close()


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("direct", ["never", "auto"])
def test_a_job_that_is_killed_and_resumed_reads_each_record_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: str
) -> None:
    """Two ranks, at last one, with 0 to 2 workers, killed ten times between two checkpoints."""
    monkeypatch.setenv("CREEL_LOADER__DIRECT", direct)
    draw, n, b, chunk = random.Random(1), 1200, 3, 5
    folder, nbytes, limit = tmp_path / "stream", 168, {"ahead": 40, "keep": 80}
    most = [0]

    def produce() -> None:
        limits = {key: count * nbytes for key, count in limit.items()}
        fields: dict[str, Any] = {"x": ("float32", (40,)), "i": "int64"}
        with creel.Producer(folder, fields, chunk=chunk, timeout_s=60, **limits) as producer:  # type: ignore[arg-type]  # only limits
            for i in range(n):
                producer.put(x=np.full(40, i), i=i)
                most[0] = max(most[0], sum(map(size, folder.iterdir())))

    producing = threading.Thread(target=produce)
    producing.start()
    history: list[int] = []  # of what is in a checkpoint
    state: Any = {}
    kills = 0
    while True:
        world = 2 if kills < KILLS - 2 else 1
        since: list[int] = []
        with Ranks(folder, state, world, b, workers=kills % 3) as job:
            left = draw.randint(0, 20) if kills < KILLS else n
            said = job.step()
            while left and None not in said:
                left -= 1
                since += [i for records, _ in said for i in records]
                if draw.random() < 0.3:  # a checkpoint, by rank 0
                    history, since, state = history + since, [], said[0][1]
                if left:
                    said = job.step()
        if None in said:
            assert said == [None] * world
            break
        kills += 1
    producing.join(60)
    history += since
    assert kills == KILLS
    assert history == list(range(n // b * b))
    assert most[0] <= (limit["ahead"] + limit["keep"] + chunk) * nbytes


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("direct", ["never", "auto"])
def test_a_job_that_is_killed_and_resumed_replays_what_one_would_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: str
) -> None:
    monkeypatch.setenv("CREEL_LOADER__DIRECT", direct)
    draw, n, b, folder = random.Random(2), 600, 3, tmp_path / "stream"

    def produce(folder: Path, **limits: Any) -> None:
        fields: dict[str, Any] = {"x": ("float32", (1022,)), "i": "int64"}  # a page
        with creel.Producer(folder, fields, chunk=5, linger_s=1e9, **limits) as producer:
            for i in range(n):
                producer.put(x=np.full(1022, i), i=i)

    limits = {"ahead": 40 * 4096, "keep": 80 * 4096, "timeout_s": 60}
    producing = threading.Thread(target=produce, args=(folder,), kwargs=limits)
    producing.start()
    history: list[list[int]] = []
    state: Any = {}
    for kill in range(6):
        since: list[list[int]] = []
        with Ranks(folder, state, 1, b, kill % 3, "rehearsed") as job:
            left = draw.randint(0, 25) if kill < 5 else n
            (said,) = job.step()
            while left and said is not None:
                left -= 1
                since.append(said[0])
                if draw.random() < 0.3:
                    history, since, state = history + since, [], said[1]
                if left:
                    (said,) = job.step()
    history += since
    producing.join(60)
    produce(tmp_path / "whole")
    whole = creel.Stream(tmp_path / "whole", None, capacity=20_000)
    memory = creel.Rehearsal(2, budget=8, every=4)
    loader = creel.DataLoader(whole, batch_size=b, rehearsal=memory, creel=False)
    assert history == [batch["i"].tolist() for batch in loader]
    assert Log.open(folder).numbers()[0] > 0


def size(path: Path) -> int:
    """Bytes of a chunk or of one that is being written; 0 for other files."""
    with suppress(FileNotFoundError):
        if path.name[0] in ".0":
            return path.stat().st_size
    return 0


def test_killed_producers_leave_whole_chunks_only(tmp_path: Path) -> None:
    folder, next_one = tmp_path / "stream", 0
    for seed in range(5):
        producer = Program(PRODUCE, str(folder), str(next_one))
        for _ in range(random.Random(seed).randint(1, 30)):
            assert producer.stdout.readline()
        producer.kill()
        producer.wait()
        for pipe in (producer.stdin, producer.stdout, producer.stderr):
            pipe.close()
        log = Log.open(folder)
        assert log.numbers() == list(range(len(log.numbers())))
        assert all(log.size(number) > 0 for number in log.numbers())
        assert not log.ended()
        got = np.concatenate([np.fromfile(log.chunk(n), np.int64) for n in log.numbers()])
        assert got.tolist() == list(range(len(got)))
        next_one = len(got)
    Log.open(folder).end()
    stream = creel.Stream(folder, None, capacity=20_000)
    loader = creel.DataLoader(stream, batch_size=100, creel=False)
    read = [i for batch in loader for i in batch["i"].tolist()]
    assert read == list(range(next_one // 100 * 100))
