"""How often storage is read: opens per epoch against the law (1-f)N, counted by the file system.

    sudo python benchmarks/source_reads.py [--samples N] [--fractions .1 .5 1] [--sampler KIND]
                                           [--ranks R]

Needs root (a FUSE mount, tests/testbed/slowfs.py, whose counters are exact). The sampler is
`permutation`; `unforeseen` is also one, but not torch's, so that it is followed batch by batch;
`replacement` and `weighted` are compared with offline MIN over the same accesses instead of the
law. With `--ranks`, that many processes, each with a DistributedSampler, share one daemon and run
in step, as below DistributedDataParallel.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from measure import report, skip_without_fuse
from numpy.typing import NDArray
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import spawn
from torch.utils.data import DistributedSampler, RandomSampler, WeightedRandomSampler

import creel

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from testbed.slowfs import SlowFS

NBYTES = 4096


@contextmanager
def daemon_with(budget: int) -> Iterator[None]:
    """Give the loaders made in the `with` a fresh embedded daemon of `budget` bytes."""
    name = f"bench-{os.getpid()}-{time.monotonic_ns()}"
    settings = {"CREEL_SOCKET": name, "CREEL_MEMORY__BUDGET": str(budget)}
    os.environ.update(settings)
    try:
        yield
    finally:
        for key in settings:
            del os.environ[key]


def dataset(mount: str, n: int) -> creel.FileDataset:
    paths = [f"{mount}/{i:06}.bin" for i in range(n)]
    return creel.FileDataset(paths, nbytes=[NBYTES] * n)


class Unforeseen:
    """A shuffle of n samples, one draw each, from a generator that others may draw from."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        left = list(range(self.n))
        while left:
            at = int(torch.randint(len(left), (), generator=SHARED))
            left[at], left[-1] = left[-1], left[at]
            yield left.pop()


SHARED = torch.Generator().manual_seed(7)


def sampler_for(kind: str, data: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    if kind == "permutation":
        return RandomSampler(data, generator=generator)
    if kind == "unforeseen":
        return Unforeseen(len(data))
    if kind == "replacement":
        return RandomSampler(data, replacement=True, generator=generator)
    weights = 1.0 / (1.0 + torch.arange(len(data), dtype=torch.float64)) ** 0.6
    return WeightedRandomSampler(weights.tolist(), len(data), generator=generator)


def offline_min(accesses: NDArray[np.int64], capacity: int) -> NDArray[np.bool_]:
    """Return (t,) whether MIN with bypass, which knows all accesses, misses access i."""
    import heapq

    n = int(accesses.max()) + 1
    following = np.full(n, len(accesses) * 2, np.int64)
    next_use = np.empty(len(accesses), np.int64)
    for t in range(len(accesses) - 1, -1, -1):
        next_use[t] = following[accesses[t]]
        following[accesses[t]] = t
    due: dict[int, int] = {}
    heap: list[tuple[int, int]] = []
    missed = np.zeros(len(accesses), np.bool_)
    for t, (sample, again) in enumerate(zip(accesses.tolist(), next_use.tolist(), strict=True)):
        missed[t] = sample not in due
        due[sample] = again
        heapq.heappush(heap, (-again, sample))
        while len(due) > capacity:
            when, victim = heapq.heappop(heap)
            if due.get(victim) == -when:
                del due[victim]
    return missed


def ranks_opens(fs: SlowFS, n: int, ranks: int, epochs: int, batch: int) -> list[int]:
    """Return the opens of each epoch of a job of several ranks on this node."""
    with tempfile.TemporaryDirectory() as place:
        args = fs.mountpoint, n, ranks, epochs, batch, place
        spawn(rank_opens, args, ranks)  # type: ignore[no-untyped-call]
        return [int(line) for line in Path(place, "opens").read_text().split()]


def rank_opens(
    rank: int, mount: str, n: int, ranks: int, epochs: int, batch: int, place: str
) -> None:
    """Run one rank of `ranks_opens`; rank 0 writes the opens of each epoch to the file `opens`."""
    store = FileStore(f"{place}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    data = dataset(mount, n)
    sampler: DistributedSampler[Any] = DistributedSampler(data, ranks, rank, seed=7)
    loader = creel.DataLoader(data, batch_size=batch, sampler=sampler, num_workers=1)
    opens = [0]
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for _ in loader:
            dist.all_reduce(torch.zeros(1))
        dist.barrier()
        opens.append(json.loads(Path(mount, ".slowfs/totals").read_text())["opens"])
        dist.barrier()
    if rank == 0:
        Path(place, "opens").write_text("\n".join(map(str, np.diff(opens).tolist())))


def row(
    folder: Path, n: int, f: float, kind: str, epochs: int, batch: int, ranks: int
) -> dict[str, object]:
    """Read `epochs` epochs at capacity f; return opens and reads of each, and those of theory."""
    with (
        SlowFS(str(folder / "data"), str(folder / "mount")) as fs,  # type: ignore[no-untyped-call]
        daemon_with(int(f * n * NBYTES)),
    ):
        data = dataset(fs.mountpoint, n)
        sampler = sampler_for(kind, data, seed=7)
        opens, seen, began = [], [], time.perf_counter()
        if ranks > 1:
            opens = ranks_opens(fs, n, ranks, epochs, batch)
        else:
            loader = creel.DataLoader(data, batch_size=batch, sampler=sampler, num_workers=2)
            for _ in range(epochs):
                before = fs.totals()
                seen += [b[:, :4].clone().view(torch.int32).flatten().numpy() for b in loader]
                after = fs.totals()
                opens.append(after["opens"] - before["opens"])
            del loader
        elapsed = time.perf_counter() - began
    if kind in {"permutation", "unforeseen"}:
        wanted = [float(n)] + [max((1 - f) * n, 0.0)] * (epochs - 1)
    else:
        # The optimum must not know that the run ends, either: it goes on for two epochs.
        again = sampler_for(kind, data, seed=7)
        drawn = [list(again) for _ in range(epochs + 2)]
        accesses = np.array(drawn, np.int64).ravel()
        assert (accesses[: epochs * n] == np.concatenate(seen)[: epochs * n]).all()
        missed = offline_min(accesses, int(f * n))
        wanted = [float(part.sum()) for part in np.array_split(missed, epochs + 2)[:epochs]]
    later, law = sum(opens[1:]), sum(wanted[1:])
    ratio = later / law if law else float(later > 0) * float("inf") if later else 1.0
    return {
        "sampler": kind,
        "f": f,
        "N": n,
        "ranks": ranks,
        "opens": opens,
        "wanted": [round(w) for w in wanted],
        "after_epoch_1": round(ratio, 4),
        "seconds": round(elapsed, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument(
        "--fractions", type=float, nargs="*", default=[0.1, 0.25, 0.5, 0.75, 0.9, 1.0]
    )
    kinds = ["permutation", "unforeseen", "replacement", "weighted"]
    parser.add_argument("--sampler", choices=kinds, default="permutation")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=1, help="with the sampler `permutation`")
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args()
    skip_without_fuse()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "data").mkdir()
        for i in range(o.samples):
            content = i.to_bytes(4, "little") + bytes(NBYTES - 4)
            (folder / "data" / f"{i:06}.bin").write_bytes(content)
        report(
            [row(folder, o.samples, f, o.sampler, o.epochs, o.batch, o.ranks) for f in o.fractions]
        )


if __name__ == "__main__":
    main()
