"""Streams whose producers, trainers and daemons are killed: no record is lost or read twice."""

from __future__ import annotations

import json
import os
import random
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import creel
from creel.streams.log import Log
from daemons import Running
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

#: Goes on behind the last chunk, which is whole, as a simulation would from its own checkpoint.
SIMULATE = """
    import json, sys
    import numpy as np
    import creel
    from creel.errors import NotFoundError
    from creel.streams.log import Log

    path, n, chunk, limits = sys.argv[1], *map(json.loads, sys.argv[2:])
    first = 0
    try:
        log = Log.open(path)
        first = (log.numbers() or [-1])[-1] * chunk + chunk
        if log.ended():
            sys.exit()
    except NotFoundError:
        pass
    fields = {"x": ("float32", (40,)), "i": "int64"}
    with creel.Producer(path, fields, chunk=chunk, linger_s=1e9, **limits) as producer:
        for i in range(first, n):
            producer.put(x=np.full(40, i), i=i)
"""


class Ranks:
    """The ranks of a job, each a process, in step; killed when the block ends."""

    def __init__(
        self, folder: Path, state: Any, world: int, batch: int, workers: int, *more: str
    ) -> None:
        env = {**os.environ, "WORLD_SIZE": str(world)}
        self.ranks = [
            Program(
                TRAIN, str(folder), str(batch), str(workers), *more, env={**env, "RANK": str(r)}
            )
            for r in range(world)
        ]
        for process in self.ranks:
            print(json.dumps(state), file=process.stdin, flush=True)

    def step(self) -> list[Any]:
        """Return what each rank says of its next batch: its records, and the loader's state."""
        said = [json.loads(process.stdout.readline() or "null") for process in self.ranks]
        for process in self.ranks:
            print("go", file=process.stdin, flush=True)
        return said

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.ranks:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                with suppress(BrokenPipeError):
                    pipe.close()


class Simulation:
    """A producer that is killed and begun again, and the most bytes that its folder ever had."""

    def __init__(self, folder: Path, n: int, chunk: int, limits: dict[str, int]) -> None:
        self._words = str(folder), str(n), str(chunk), json.dumps(limits)
        self._folder, self._over = folder, threading.Event()
        self.most = 0
        self._process = Program(SIMULATE, *self._words)
        self._watch = threading.Thread(target=self._watching)
        self._watch.start()

    def kill(self) -> None:
        """Kill it at a moment of its own, and begin it again."""
        self._end()
        self._process = Program(SIMULATE, *self._words)

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            with suppress(BrokenPipeError):
                pipe.close()

    def _watching(self) -> None:
        while not self._over.wait(0.001):
            with suppress(FileNotFoundError):
                self.most = max(self.most, sum(map(size, self._folder.iterdir())))

    def __enter__(self) -> Simulation:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watch.join()
        self._end()


@pytest.mark.parametrize("direct", ["never", "auto"])
def test_a_job_whose_parts_are_killed_reads_each_record_once(
    tmp_path: Path, daemon_name: str, monkeypatch: pytest.MonkeyPatch, direct: str
) -> None:
    """Two ranks, at last one, with 0 to 2 workers, killed ten times between two checkpoints.

    Its producer and the daemon are killed at any time meanwhile, and begun again.
    """
    monkeypatch.setenv("CREEL_LOADER__DIRECT", direct)
    monkeypatch.setenv("CREEL_LOADER__EMBED", "false")
    draw, n, b, chunk = random.Random(1), 1200, 3, 5
    folder, nbytes, limit = tmp_path / "stream", 168, {"ahead": 40, "keep": 80}
    limits = {key: count * nbytes for key, count in limit.items()}
    history: list[int] = []  # of what is in a checkpoint
    state: Any = {}
    kills = {"job": 0, "producer": 0, "daemon": 0}
    daemon = Running(daemon_name)
    with Simulation(folder, n, chunk, limits) as simulation, ExitStack() as ends:
        ends.callback(lambda: daemon.kill())  # noqa: PLW0108  the last one
        while True:
            world = 2 if kills["job"] < KILLS - 2 else 1
            since: list[int] = []
            with Ranks(folder, state, world, b, workers=kills["job"] % 3) as job:
                left = draw.randint(0, 20) if kills["job"] < KILLS else n
                said = job.step()
                while left and None not in said:
                    left -= 1
                    since += [i for records, _ in said for i in records]
                    if draw.random() < 0.3:  # a checkpoint, by rank 0
                        history, since, state = history + since, [], said[0][1]
                    if draw.random() < 0.1:
                        kills["producer"] += 1
                        simulation.kill()
                    if draw.random() < 0.04:
                        kills["daemon"] += 1
                        daemon.kill()
                        daemon = Running(daemon_name)
                    if left:
                        said = job.step()
            if None in said:
                assert said == [None] * world
                break
            kills["job"] += 1
    history += since
    assert kills["job"] == KILLS
    assert min(kills.values()) >= KILLS / 2, kills
    assert history == list(range(n // b * b))
    notes = 2 * 100  # that ranks were writing
    assert simulation.most <= (limit["ahead"] + limit["keep"] + chunk) * nbytes + notes


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
    assert read == list(range(next_one))
