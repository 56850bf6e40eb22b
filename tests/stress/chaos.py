"""Kill and stop daemons at random moments of trainings, and compare all batches with torch's.

    python -m stress.chaos --kills 160

Each run is a process that trains for several epochs with a daemon of its own, which it starts again
whenever it finds none. Two thirds of the faults are kills of the daemon, the others stops of up to
4 seconds. Prints a line for each run that gave a wrong batch, hung, or left something behind, and a
summary; exit status 1 if there was such a run.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import logging
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader

import creel
from creel.errors import CreelError
from kit import daemon_of, gone, unique_name, until
from shown import plain
from stress.userland import WITH_CREEL, Own, make_files, make_images, pixels, rewrite, size_of

#: For one run, which takes some seconds; a stop costs a reader up to 10 s (`creel.wrap`).
DEADLINE_S = 120
COUNT, BATCH = 240, 8
STEP_S = 0.004  # of training's work between two batches: time for a fault to happen

KINDS = ("files", "records", "images", "wrapped")
WORKERS = ((0, False), (1, False), (2, False), (2, True))


def dataset(kind: str) -> Any:
    """Return 240 samples in the working directory."""
    if kind == "files":
        return creel.FileDataset(make_files("files", range(3000, 3000 + COUNT)), decode=size_of)
    if kind == "records":
        rewrite("rows.bin", 5000 * COUNT)
        return creel.RecordDataset("rows.bin", "uint8", 5000)
    if kind == "images":
        make_images("images", COUNT)
        return creel.ImageFolder("images", pixels)
    return creel.wrap(Own(make_files("own", range(900, 900 + COUNT)), "creel.read"))


def train(
    seed: int, epochs: int, name: str, home: str, result: multiprocessing.connection.Connection
) -> None:
    """Train; report how many batches there were and how many differ from torch's."""
    os.setsid()
    os.chdir(home)
    with Path("log").open("wb") as log:
        os.dup2(log.fileno(), 2)
    faulthandler.dump_traceback_later(DEADLINE_S - 10)
    logging.basicConfig(level="INFO")
    budget = "1MiB" if seed % 3 == 0 else "64MiB"
    os.environ.update(
        {"CREEL_SOCKET": name, "CREEL_DAEMON__LINGER_S": "0.5", WITH_CREEL: "1"},
        CREEL_MEMORY__BUDGET=budget,
        # else no loader would ask the daemon for files, which are in the page cache
        CREEL_LOADER__DIRECT="auto" if seed % 5 == 0 else "never",
    )
    data = dataset(KINDS[seed % 4])
    workers, persistent = WORKERS[seed // 4 % 4]

    def loader(cls: Any) -> Any:
        generator = torch.Generator().manual_seed(seed)
        more = {"num_workers": workers, "persistent_workers": persistent, "generator": generator}
        return cls(data, BATCH, shuffle=True, **more)

    theirs, ours = loader(DataLoader), loader(creel.DataLoader)
    expected = [[plain(batch) for batch in theirs] for _ in range(epochs)]
    del theirs
    batches = wrong = 0
    for epoch in expected:
        for ours_, theirs_ in zip(ours, epoch, strict=True):
            batches, wrong = batches + 1, wrong + (plain(ours_) != theirs_)
            time.sleep(STEP_S)
    del ours
    gc.collect()
    result.send((batches, wrong))


class Run:
    """One training, and the faults of its daemons."""

    def __init__(self, seed: int, epochs: int, home: str) -> None:
        self._random = random.Random(seed)
        self._name = unique_name()
        self._daemons: set[int] = set()
        self._before = _segments()  # left by other programs
        self.counts: Counter[str] = Counter(runs=1)
        context = multiprocessing.get_context("fork")
        self._result, result = context.Pipe(duplex=False)
        arguments = (seed, epochs, self._name, home, result)
        self._trainer = context.Process(target=train, args=arguments)
        self._trainer.start()
        result.close()
        self._deadline = time.monotonic() + DEADLINE_S

    def finish(self) -> None:
        """Disturb the daemons until the training has ended; then check its report and leftovers."""
        while not self._result.poll(0.01):
            if time.monotonic() > self._deadline:
                self.counts["hung"] += 1
                break
            self._trouble()
        else:
            try:
                batches, wrong = self._result.recv()
                self.counts.update(batches=batches, wrong=wrong)
            except EOFError:  # the training failed
                self.counts["wrong"] += 1
            self._trainer.join(DEADLINE_S)
        self.counts["residue"] += self._left()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._trainer.pid or 0, signal.SIGKILL)
        self._trainer.join()
        self._result.close()

    def _trouble(self) -> None:
        """Wait a moment; then kill or stop the daemon, if there is one."""
        with contextlib.suppress(CreelError, OSError, psutil.Error):
            daemon = daemon_of(self._name)
            self._daemons.add(daemon.pid)
            time.sleep(self._random.choice((0, 0.02, 0.1, 0.3)) * self._random.random())
            if self._random.random() < 2 / 3:
                daemon.kill()
                self.counts["kills"] += 1
                return
            daemon.suspend()
            self.counts["stops"] += 1
            try:
                self._result.poll(self._random.choice((0.05, 0.5, 4)) * self._random.random())
            finally:
                daemon.resume()

    def _left(self) -> int:
        """Return how many processes and named segments outlive the training by 30 s."""

        def left() -> list[object]:
            daemons = [pid for pid in self._daemons if not gone(pid)]
            return [*daemons, *_session(self._trainer.pid or 0), *(_segments() - self._before)]

        try:
            until(lambda: not left())
        except AssertionError:
            return len(left())
        return 0


def _session(leader: int) -> list[int]:
    """Return the processes of a session."""
    pids = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(pid) == leader and not gone(pid):
                pids.append(pid)
    return pids


def _segments() -> set[str]:
    """Return named shared memory of creel, and of torch's processes that have ended."""
    names = {path.name for path in Path("/dev/shm").iterdir()}
    torchs = {name for name in names if name.startswith("torch_") and gone(int(name.split("_")[1]))}
    return {name for name in names if "creel" in name} | torchs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=160)
    parser.add_argument("--first", type=int, default=0, help="seed of the first run")
    parser.add_argument("--epochs", type=int, default=8, help="of each run")
    options = parser.parse_args()
    multiprocessing.set_start_method("fork", force=True)
    _ = creel.DataLoader, creel.FileDataset, creel.ImageFolder, creel.RecordDataset, creel.wrap
    gc.freeze()
    total: Counter[str] = Counter()
    while total["kills"] < options.kills:
        seed = options.first + total["runs"]
        with tempfile.TemporaryDirectory() as home:
            run = Run(seed, options.epochs, home)
            run.finish()
            if run.counts["wrong"] or run.counts["hung"] or run.counts["residue"]:
                print(f"run {seed}: {dict(run.counts)}\n{(Path(home) / 'log').read_text()[-6000:]}")
        total += run.counts
    words = ("kills", "stops", "runs", "batches", "wrong", "hung", "residue")
    print(", ".join(f"{word} {total[word]}" for word in words))
    return int(any(total[word] for word in words[-3:]))


if __name__ == "__main__":
    sys.exit(main())
