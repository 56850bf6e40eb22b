"""The disk tier's store against plain files read and written through the page cache.

    python benchmarks/disk.py [FOLDER] [--nbytes 110000 8192] [--threads 1 4] [--rounds 5] [--json]

FOLDER (/var/tmp) is on the disk to measure. `creel` is the store: checksums, an index, no page
cache. `cached` writes the same bytes to one file, makes the kernel write them back and drop them,
and reads them in the same random order, unchecked. Figures are us per object; a batch is an object.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from measure import Comparison, Round, measured, report

from creel.cache.disk.store import DiskStore

TOTAL_NBYTES = 256 << 20
WRITTEN_AT_ONCE = 32


class Both:
    """The same objects in a store and in a plain file."""

    def __init__(self, folder: str, nbytes: int, threads: int) -> None:
        self._count, self._nbytes, self._threads = TOTAL_NBYTES // nbytes, nbytes, threads
        self._data = memoryview(np.random.default_rng(0).bytes(nbytes))
        self._store = DiskStore(folder, 2 * TOTAL_NBYTES, keep_free=0)
        self._store.attach("data", self._count)
        self._fd = os.open(Path(folder) / "plain", os.O_RDWR | os.O_CREAT, 0o600)
        self._rng = np.random.default_rng(1)

    def write_store(self, into: Round) -> None:
        self._store.drop("data", np.arange(self._count))
        with measured(into):
            for at in range(0, self._count, WRITTEN_AT_ONCE):
                ids = np.arange(at, min(at + WRITTEN_AT_ONCE, self._count))
                versions = np.ones(len(ids), np.int64)
                self._store.write("data", ids, [[self._data]] * len(ids), versions)
        into.batches = self._count

    def write_plain(self, into: Round) -> None:
        with measured(into):
            for at in range(self._count):
                os.pwrite(self._fd, self._data, at * self._nbytes)
            os.fdatasync(self._fd)
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        into.batches = self._count

    def read_store(self, into: Round) -> None:
        self._in_threads(into, lambda i, out: self._store.read("data", i, self._nbytes, [out]))

    def read_plain(self, into: Round) -> None:
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self._in_threads(into, lambda i, out: os.preadv(self._fd, [out], i * self._nbytes))

    def _in_threads(self, into: Round, read: Callable[[int, memoryview], object]) -> None:
        ids = self._rng.permutation(self._count).tolist()

        def some(first: int) -> None:
            out = memoryview(bytearray(self._nbytes))
            for i in ids[first :: self._threads]:
                read(i, out)

        threads = [threading.Thread(target=partial(some, t)) for t in range(self._threads)]
        with measured(into):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        into.batches = self._count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", default="/var/tmp")  # noqa: S108  on a disk
    parser.add_argument("--nbytes", type=int, nargs="+", default=[110_000, 8192])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args()
    rows = []
    for nbytes in o.nbytes:
        with tempfile.TemporaryDirectory(dir=o.folder) as folder:
            both = Both(folder, nbytes, 1)
            ways = {"cached": both.write_plain, "creel": both.write_store}
            rows.append(Comparison(f"write {nbytes}").run(ways, o.rounds).summary())
            del both
        for threads in o.threads:
            with tempfile.TemporaryDirectory(dir=o.folder) as folder:
                both = Both(folder, nbytes, threads)
                both.write_plain(Round())
                both.write_store(Round())
                ways = {"cached": both.read_plain, "creel": both.read_store}
                name = f"read {nbytes}, {threads} threads"
                rows.append(Comparison(name).run(ways, o.rounds).summary())
    report(rows)


if __name__ == "__main__":
    main()
