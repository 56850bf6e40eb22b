"""Cost of a miss for a fetch thread: from `FetchObjects` to `Fetched`, page cache warm.

    python benchmarks/fetching.py [--sizes 3072 20000 150528 1000000] [--rounds N] [--json]

One thread brings objects of one size into an arena, 64 at a time in random order: `files`, each
opened, read and closed; or `records` of one file. The arena is `fresh` (the kernel allocates its
pages as they are written) or `settled` (each page was written and mapped before, as once memory is
full). The peer, `plain`, does what a user's dataset does in the same order: `open` and `read` into
new bytes, or a seek and a read; its bytes never leave the processor's cache. Figures are us per
object; a batch of `measure` is one object here.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn

import numpy as np
from measure import Comparison, Round, measured, report

import creel
from creel.cache.memory.arena import Arena
from creel.cache.storage.manifest import Manifest
from creel.cache.storage.source import Source
from creel.daemon.core.events import Checked, Fetched, FetchObjects
from creel.daemon.service.storage.fetcher import Fetcher

AT_ONCE = 64
NAME = "benchmark"


def steps(count: int) -> Iterator[np.ndarray[tuple[int], np.dtype[np.int32]]]:
    """Yield all objects once, `AT_ONCE` at a time, each time sorted as by the core."""
    order = np.random.default_rng(0).permutation(count).astype(np.int32)
    for start in range(0, count - AT_ONCE + 1, AT_ONCE):
        yield np.sort(order[start : start + AT_ONCE])


def _no_other(*origin_and_dataset: object) -> NoReturn:
    raise AssertionError(origin_and_dataset)


class Filling:
    """An arena that one thread fills."""

    def __init__(self, manifest: Manifest, nbytes: int) -> None:
        self.count, self.nbytes = len(manifest), nbytes
        self.source = Source(manifest, files=64, relative=False)
        self.answered = threading.Semaphore(0)

    @contextmanager
    def fetcher(self) -> Iterator[Fetcher]:
        arena = Arena.create(self.count * self.nbytes)
        fetcher = Fetcher(arena, self._answer, _no_other, threads=1)
        fetcher.add(NAME, self.source)
        try:
            yield fetcher
        finally:
            fetcher.close()
            fetcher.join(10)
            arena.close()

    def _answer(self, event: Fetched | Checked) -> None:
        assert isinstance(event, Fetched)
        short = np.flatnonzero(event.nbytes != self.nbytes)
        if len(short):
            raise RuntimeError(f"{len(short)} objects were not read")
        self.answered.release()

    def fill(self, fetcher: Fetcher) -> int:
        """Fetch all objects; return how many there are."""
        length = np.full(AT_ONCE, self.nbytes, np.int64)
        done = 0
        for number, ids in enumerate(steps(self.count)):
            at = ids.astype(np.int64) * self.nbytes
            fetcher.submit(FetchObjects(number, NAME, ids, at, length, 0.0))
            if not self.answered.acquire(timeout=60):
                raise RuntimeError("a fetch was not answered")
            done += AT_ONCE
        return done

    def fresh(self, into: Round) -> None:
        with self.fetcher() as fetcher, measured(into):
            into.batches += self.fill(fetcher)

    def settled(self, into: Round) -> None:
        with self.fetcher() as fetcher:
            for _ in range(2):
                self.fill(fetcher)
            with measured(into):
                into.batches += self.fill(fetcher)


def read_files(paths: list[str], into: Round) -> None:
    with measured(into):
        for ids in steps(len(paths)):
            for i in ids.tolist():
                with open(paths[i], "rb") as file:  # noqa: PTH123  (as users write it)
                    file.read()
            into.batches += AT_ONCE


def read_records(path: Path, count: int, nbytes: int, into: Round) -> None:
    with measured(into), path.open("rb", buffering=0) as file:
        for ids in steps(count):
            for i in ids.tolist():
                file.seek(i * nbytes)
                file.read(nbytes)
            into.batches += AT_ONCE


def files(folder: Path, count: int, nbytes: int) -> tuple[Manifest, Callable[[Round], None]]:
    paths = [str(folder / f"{i:06}.bin") for i in range(count)]
    data = np.random.default_rng(0).bytes(nbytes)
    for path in paths:
        Path(path).write_bytes(data)
    manifest = creel.FileDataset(paths, nbytes=[nbytes] * count).manifest
    return manifest, partial(read_files, paths)


def records(folder: Path, count: int, nbytes: int) -> tuple[Manifest, Callable[[Round], None]]:
    path = folder / "records.bin"
    path.write_bytes(np.random.default_rng(0).bytes(count * nbytes))
    manifest = creel.RecordDataset(path, "uint8", (nbytes,)).manifest
    return manifest, partial(read_records, path, count, nbytes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[3072, 20_000, 150_528, 1_000_000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nbytes", type=int, default=300_000_000, help="of all objects together")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for kind in files, records:
        for nbytes in options.sizes:
            count = min(options.nbytes // nbytes, 20_000)
            with tempfile.TemporaryDirectory() as folder:
                manifest, plain = kind(Path(folder), count, nbytes)
                filling = Filling(manifest, nbytes)
                ways = {"plain": plain, "fresh": filling.fresh, "settled": filling.settled}
                name = f"{kind.__name__} of {nbytes / 1000:g} KB"
                rows.append(Comparison(name).run(ways, options.rounds).summary())
    report(rows)


if __name__ == "__main__":
    main()
