"""Bindings of small datasets, and a stand-in for the session and arena that they read from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from creel.cache.memory.pools.free_ranges import NOWHERE
from creel.cache.storage.manifest import Manifest
from creel.cache.storage.source import Source
from creel.loader.data.binding.bind import Binding, bind
from creel.loader.data.datasets import FileDataset, RecordDataset
from creel.loader.data.reading.lease import Lease


class Table:
    def __init__(self, n: int) -> None:
        self.offset: NDArray[np.int64] = np.full(n, NOWHERE, np.int64)


class Arena:
    """A session whose arena holds some objects, each with its bits inverted, so that a test sees
    whether bytes came from it.
    """

    def __init__(
        self, manifest: Manifest, ids: Sequence[int] | None = None, *, flip: int = 0
    ) -> None:
        source = Source(manifest)
        self.table = Table(len(manifest))
        self.taken: list[int] = []
        self.revoked = self.done = 0
        self.lengths: dict[int, int] = {}
        parts, end = [], 0
        for i in range(len(manifest)) if ids is None else ids:
            data = bytes(b ^ flip for b in source.read(i))
            self.table.offset[i], self.lengths[i] = end, len(data)
            parts.append(data)
            end += len(data)
        self.memory = memoryview(b"".join(parts))

    def pieces(self, ids: NDArray[np.integer]) -> Taken:
        held = Taken(self.taken)
        for i in ids.tolist():
            at = int(self.table.offset[i])
            if at != NOWHERE:
                held[i] = [self.memory[at : at + self.lengths[i]]]
        return held

    def held(self, step: int, stamp: int) -> bool:
        return self.done <= step and self.revoked == stamp

    def rows(self, ids: NDArray[np.integer], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        held = self.pieces(ids)
        there = np.array([i in held for i in ids.tolist()])
        for i in np.flatnonzero(there).tolist():
            out[i] = np.frombuffer(held.get(int(ids[i]))[0], np.uint8)
        return there


class Taken(dict[int, list[memoryview]]):
    """Bytes by object, and a list of those that were taken."""

    def __init__(self, taken: list[int]) -> None:
        self.taken = taken

    def get(self, object_id: int, default: Any = None) -> Any:
        if object_id in self:
            self.taken.append(object_id)
        return super().get(object_id, default)


def lent(binding: Binding, arena: Any, ids: Any = None) -> Lease:
    """Return a lease for a step of these objects (None: all) from the stand-in for a session."""
    return binding.reading(arena, 0, np.arange(len(binding.manifest)) if ids is None else ids, 0)


def bound(dataset: object) -> Binding:
    binding = bind(dataset)
    assert binding is not None
    return binding


def records(tmp_path: Path, name: str, n: int, *, labels: Any = None) -> RecordDataset:
    rows = np.random.default_rng(n).integers(0, 255, (n, 3, 4)).astype(np.float32)
    np.save(tmp_path / f"{name}.npy", rows)
    return RecordDataset(tmp_path / f"{name}.npy", labels=labels)


def files(tmp_path: Path, name: str, n: int, **args: Any) -> FileDataset:
    (tmp_path / name).mkdir()
    for i in range(n):
        (tmp_path / name / f"{i:03d}").write_bytes(np.random.default_rng(i).bytes(20))
    return FileDataset(tmp_path / name, **args)
