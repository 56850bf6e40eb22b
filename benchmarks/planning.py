"""What planning costs: through the public loader with a running daemon, beside torch's own loader.

    python benchmarks/planning.py [--samples N ...] [--kinds seeded ...] [--rounds N] [--json]

Records of 64 bytes in one sparse file, batches of 256, `num_workers=0`. A daemon without another
large dataset runs, and this process is connected to it. A round makes a loader of each kind and
measures, in ms (the medians of all rounds are printed):

- new: from `iter()` to the first batch of a loader whose dataset the daemon does not know. This
  includes its registration, but not making dataset and loader, nor starting a daemon;
- first: the same for the next loader on that dataset;
- held: the longest delay of the trainer's thread after naps of 0.5 ms, while this epoch and the
  next were planned in the background; `idle`: the same for as long with nothing going on, which is
  the machine's own share;
- left: the time to leave the iterator in the middle of its first epoch;
- planned: seconds until the daemon knew both epochs;
- answer: the longest time that a client in another process waited for an answer of the daemon, from
  before `new` until all was planned; `quiet`: the same with nothing going on;
- next: the longest of 2,000 `next` of a loader that is being planned, and of torch's;
- daemon, trainer: MB of each (its own memory and shared tables) when all is planned.

100 million samples: `--samples 100000000 --kinds seeded --rounds 1` (6 GB).

Then, without a loader, it measures the core alone: a piece of a plan, and a step with half of the
records held; and three ways in which such a piece may come to the daemon: `told`, the message of
today; `mapped`, an array for the whole epoch in a memfd; `drawn`, by the daemon itself from the
sampler's seed. Tests check what these figures result from (what is published when and by whom),
never the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zmq
from measure import fresh_name, report, touch_memory
from torch.utils.data import DataLoader, DistributedSampler

import creel
from creel.cache.memory.pools.allocator import Allocator, Lengths
from creel.cache.memory.shared_words import KNOWN
from creel.daemon.core.core import Core
from creel.daemon.core.events import (
    DatasetAdded,
    Event,
    Fetched,
    FetchObjects,
    PlanExtended,
    Progressed,
    Publish,
    SessionOpened,
)
from creel.daemon.core.versions import Versions
from creel.loader.client import connections
from creel.loader.client.client import Client
from creel.messages import Open
from creel.policies.order.torch_random import Shuffle, TorchRandom
from creel.policies.prefetch import Window
from creel.settings import FetchSettings, WindowSettings

IMAGENET, BATCH, NBYTES = 1_281_167, 256, 64
_PIECE = 1 << 14  # as a session sends it
#: Bytes of budget per sample: tables and plans may take half of it (docs/retention.md).
_EACH = 120
_STEPS = 2000
_seeds = itertools.count(1)  # one per loader, so that no permutation is drawn before it is measured
_NAP_S = 0.0005

#: A program that asks the daemon repeatedly until standard input ends; prints the longest wait, ms.
_ASKER = """
import select, sys, time
from creel.loader.client.client import Client
with Client.connect(sys.argv[1], "cli") as client:
    client.ask("status")
    print("ready", flush=True)
    worst = 0.0
    while not select.select([sys.stdin], [], [], 0.002)[0]:
        began = time.perf_counter()
        client.ask("status", timeout_s=60)
        worst = max(worst, time.perf_counter() - began)
    print(1e3 * worst)
"""


def ms(seconds: float) -> float:
    return round(1e3 * seconds, 1)


def loader(cls: Any, data: Any, kind: str) -> Any:
    every: dict[str, dict[str, Any]] = {
        "seeded": {"shuffle": True},
        "generator": {"shuffle": True, "generator": torch.Generator().manual_seed(next(_seeds))},
        "distributed": {"sampler": DistributedSampler(data, 8, 3, seed=next(_seeds))},
    }
    return cls(data, BATCH, **every[kind])


def first(batches: Any) -> tuple[Iterator[Any], float]:
    """Return the iterator, and the seconds until its first batch."""
    gc.collect()
    began = time.perf_counter()
    iterator = iter(batches)
    next(iterator)
    return iterator, time.perf_counter() - began


def longest_next(iterator: Iterator[Any]) -> float:
    worst = 0.0
    for _ in range(_STEPS):
        began = time.perf_counter()
        if next(iterator, None) is None:
            break
        worst = max(worst, time.perf_counter() - began)
    return worst


def held(until: Any, at_most_s: float) -> tuple[float, float]:
    """Nap until the condition holds; return (seconds, longest pause) of this thread."""
    worst, began = 0.0, time.perf_counter()
    last = began
    while last - began < at_most_s and not until():
        time.sleep(_NAP_S)  # lets other threads run, as a step of training does
        now = time.perf_counter()
        worst, last = max(worst, now - last - _NAP_S), now
    return last - began, worst


@contextlib.contextmanager
def asking(name: str) -> Iterator[list[float]]:
    """Ask the daemon from another process inside the `with`; then add the longest wait in ms."""
    asker = subprocess.Popen(
        [sys.executable, "-c", _ASKER, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert asker.stdout is not None
    assert asker.stdout.readline() == "ready\n"
    worst: list[float] = []
    yield worst
    worst.append(float(asker.communicate("")[0]))


def mbytes(pid: int) -> float:
    """Return the MB of a process: its own pages, and those of memfds such as tables and arena."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    of = {
        line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("Rss", "VmRSS"))
    }
    return round((int(of["RssAnon"]) + int(of["RssShmem"])) / 1024, 0)


def through_the_loader(data: Any, kind: str, name: str, pid: int) -> dict[str, float]:
    steps = len(loader(DataLoader, data, kind))
    with asking(name) as answer:
        new_s = first(loader(creel.DataLoader, data, kind))[1]  # that loader is freed at once
        batches = loader(creel.DataLoader, data, kind)
        iterator, first_s = first(batches)
        client = connections.connected(name)
        assert client is not None
        (session,) = (session for session in client.sessions if session.alive)
        planned_s, held_s = held(lambda: session.words[KNOWN] >= 2 * steps, 600)
    took = mbytes(pid), mbytes(os.getpid())
    began = time.perf_counter()
    del iterator
    left_s = time.perf_counter() - began
    del batches
    with asking(name) as quiet:
        idle_s = held(lambda: False, min(planned_s, 20))[1]
    again = iter(loader(creel.DataLoader, data, kind))
    next_s = longest_next(again)
    del again
    theirs, torch_s = first(loader(DataLoader, data, kind))
    torch_next_s = longest_next(theirs)
    return {
        "new": ms(new_s),
        "first": ms(first_s),
        "torch's first": ms(torch_s),
        "held": ms(held_s),
        "idle": ms(idle_s),
        "left": ms(left_s),
        "planned, s": round(planned_s, 2),
        "answer": round(answer[0], 1),
        "quiet": round(quiet[0], 1),
        "next": ms(next_s),
        "torch's next": ms(torch_next_s),
        "daemon, MB": took[0],
        "trainer, MB": took[1],
    }


def a_round(path: Path, samples: int, kind: str) -> dict[str, float]:
    """Run a round with a daemon of its own, which has seen a small dataset."""
    with fresh_name() as name:
        os.truncate(path, 1000 * NBYTES)
        first(creel.DataLoader(creel.RecordDataset(path, torch.uint8, NBYTES), 10))  # its start
        with Client.connect(name, "cli") as client:
            pid = client.daemon_pid
        os.truncate(path, samples * NBYTES)
        data = creel.RecordDataset(path, torch.uint8, NBYTES)
        touch_memory(samples * _EACH)
        return through_the_loader(data, kind, name, pid)


def core_s() -> tuple[list[float], list[float]]:
    """Return seconds of each PlanExtended of two epochs, and of each Progressed of the second.

    Half of the records are held.
    """
    rng = np.random.default_rng(0)
    core = Core(Allocator(IMAGENET // 2 * 1000), Window.of(WindowSettings(), FetchSettings()))
    offset, length = np.full(IMAGENET, -1), np.full(IMAGENET, 1000)
    fetches: list[FetchObjects] = []

    def feed(event: Event, now: float) -> float:
        """Return the seconds that an event takes, with what it publishes."""
        start = time.perf_counter()
        for action in core.handle(event, now):
            if isinstance(action, Publish):
                offset[action.ids] = action.offset
            elif isinstance(action, FetchObjects):
                fetches.append(action)
        return time.perf_counter() - start

    lengths = Lengths.of(length, np.ones(len(length), np.int64))
    feed(DatasetAdded("d", offset, length, lengths, Versions(len(length))), 0.0)
    feed(SessionOpened(1, Open("d", "", 0, 1, "never")), 0.0)
    steps = -(-IMAGENET // BATCH)
    extends, spent = [], []
    for epoch in range(2):
        drawn = rng.permutation(IMAGENET).astype(np.int32)
        for at in range(0, IMAGENET, _PIECE):
            piece = drawn[at : at + _PIECE]
            ends = np.append(np.arange(BATCH, len(piece), BATCH), len(piece))
            event = PlanExtended(
                1, epoch, epoch * steps + at // BATCH, piece, ends, unplanned=False
            )
            extends.append(feed(event, 0.0))
    for step in range(2 * steps - 1600):
        while fetches:
            fetch = fetches.pop()
            feed(Fetched(fetch.fetch, fetch.length), step * 0.1)
        spent.append(feed(Progressed(1, step + 1, 0), step * 0.1))
    return extends, spent[steps:]


def ways_s() -> dict[str, list[float]]:
    """Return seconds of each piece of an epoch by each way: of whoever sends it, and the daemon.

    Each ends with an array that is the daemon's own, and checked.
    """
    drawn = np.random.default_rng(0).permutation(IMAGENET).astype(np.int32)
    spent: dict[str, list[float]] = {"told": [], "mapped": [], "drawn": []}
    context = zmq.Context()
    sender, receiver = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    receiver.bind(f"ipc://@creel-planning-{os.getpid()}")
    sender.connect(f"ipc://@creel-planning-{os.getpid()}")
    fd = os.memfd_create("creel-planning")
    os.ftruncate(fd, drawn.nbytes)
    pages = mmap.mmap(fd, drawn.nbytes)
    theirs = mmap.mmap(fd, drawn.nbytes, prot=mmap.PROT_READ)
    shuffle = Shuffle(IMAGENET, TorchRandom.seeded(0))

    def checked(ids: Any) -> None:
        assert ids.min() >= 0
        assert ids.max() < IMAGENET

    for at in range(0, IMAGENET, _PIECE):
        piece = drawn[at : at + _PIECE]
        began = time.perf_counter()
        sender.send(piece.data)
        checked(np.frombuffer(receiver.recv(copy=False).buffer, np.int32))
        spent["told"].append(time.perf_counter() - began)
        began = time.perf_counter()
        np.frombuffer(pages, np.int32)[at : at + _PIECE] = piece
        checked(np.frombuffer(theirs, np.int32)[at : at + _PIECE].copy())
        spent["mapped"].append(time.perf_counter() - began)
        began = time.perf_counter()
        shuffle.more(_PIECE)
        spent["drawn"].append(time.perf_counter() - began)
    context.destroy()
    os.close(fd)
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, nargs="+", default=[IMAGENET, 14_000_000])
    kinds = ("seeded", "generator", "distributed")
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args()
    budget = max(256, max(o.samples) * _EACH >> 20)
    os.environ.setdefault("CREEL_MEMORY__BUDGET", f"{budget}MiB")
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    with tempfile.NamedTemporaryFile() as file:
        path = Path(file.name)
        for n in o.samples:
            for kind in o.kinds:
                rounds = [a_round(path, n, kind) for _ in range(o.rounds)]
                middle = {
                    part: float(np.median([row[part] for row in rounds])) for part in rounds[0]
                }
                rows.append({"samples": n, "kind": kind, **middle})
    report(rows)
    extends, steps = zip(*(core_s() for _ in range(o.rounds)), strict=True)
    spent = list(itertools.chain(*steps))
    named = {
        f"PlanExtended, {_PIECE:,} of {IMAGENET:,}, median": float(np.median(extends)),
        "PlanExtended, longest": float(np.median([max(e) for e in extends])),
        "Progressed, 10th percentile": float(np.percentile(spent, 10)),
        "Progressed, median": float(np.median(spent)),
        "Progressed, 99th percentile": float(np.percentile(spent, 99)),
    }
    ways = [ways_s() for _ in range(o.rounds)]
    for way in ways[0]:
        named[f"a piece {way}, median"] = float(np.median([of[way] for of in ways]))
    report([{"what": part, "us": round(1e6 * took, 1)} for part, took in named.items()])


if __name__ == "__main__":
    main()
