"""Small files to read by a Source, and ways to read them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from creel.cache.storage.manifest import Manifest
from creel.cache.storage.reads import parts_in
from creel.cache.storage.source import Source
from creel.settings import FetchSettings

QUICK = FetchSettings(attempts=3, deadline_s=60.0, backoff_s=0.001, backoff_max_s=0.002)


def read_into(source: Source, ids: list[int]) -> tuple[NDArray[np.int64], list[bytes]]:
    """Return what `read_parts` returns and fills into fresh buffers."""
    where = np.array(ids)
    lengths = source.manifest.ranges(where)[1]
    buffer = bytearray(int(lengths.sum()))
    got = source.read_parts(where, lengths, parts_in(memoryview(buffer), lengths)).nbytes
    ends = lengths.cumsum().tolist()
    return got, [bytes(buffer[b - n : b]) for b, n in zip(ends, lengths.tolist(), strict=True)]


def whole(source: Source, *ids: int) -> list[bytes | None]:
    """Return the bytes from `read_whole`."""
    return [whole and whole.data for whole in source.read_whole(np.array(ids))]


def folder(path: Path, sizes: list[int], seed: int = 0) -> tuple[Manifest, list[bytes]]:
    """Write files of random bytes; return their manifest and contents."""
    rng = np.random.default_rng(seed)
    contents = [rng.bytes(n) for n in sizes]
    for i, content in enumerate(contents):
        (path / f"{i:03}").write_bytes(content)
    names = [f"{i:03}" for i in range(len(sizes))]
    return Manifest.of_files(names, root=str(path), lengths=sizes), contents


def records(path: Path, size: int, count: int) -> tuple[Manifest, bytes]:
    """Write a file of dense records after a header of 5 bytes."""
    content = np.random.default_rng(size).bytes(5 + size * count)
    (path / "records").write_bytes(content)
    ones = np.array([1], np.int64)
    runs = Manifest.of_runs([str(path / "records")], ones * 5, ones * size, ones * count)
    return runs, content[5:]
