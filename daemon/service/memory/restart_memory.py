"""Memory that outlives the daemon: handed to the next one through systemd's file descriptor store.

Two descriptors are stored: the arena, and an index that says what is where in it. Whoever takes
them empties the index before the arena is written to: it is used once, also if that daemon crashes.
A daemon that was killed has stored nothing, and the next one begins with an empty arena.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np

from creel.cache.memory.memfd import F_GET_SEALS, F_SEAL_GROW, F_SEAL_SHRINK, Descriptor, memfd
from creel.cache.memory.pools.allocator import Allocator, is_page
from creel.config import memory_budget
from creel.daemon.core.restart.objects import RestartObjects
from creel.errors import CreelError
from creel.policies.arrays import Ids, Ints
from creel.settings import MemorySettings

log = logging.getLogger("creel.node")

ARENA, INDEX = NAMES = "creel-arena", "creel-index"
#: Raised whenever places in the arena, or anything below, mean something else than before.
_FORMAT = 2
#: Part of the node's memory by which it may differ and count as the same: a virtual machine's does.
_SAME = 1 / 32


class StoredDataset(msgspec.Struct, frozen=True):
    """A dataset: its manifest as an Arrow file, and the columns of `RestartObjects` as bytes."""

    key: str
    manifest: bytes
    ids: bytes
    columns: bytes  # place, nbytes, version
    ranges: bytes  # starts, sizes
    runs: dict[int, bytes]
    page: int


class StoredIndex(msgspec.Struct, frozen=True):
    """What one daemon leaves to the next.

    `budget` and `share` of the settings, and the memory that the daemon might use: "auto" depends
    on them.
    """

    format: int
    budget: str
    share: float
    total_nbytes: int
    arena_nbytes: int
    datasets: list[StoredDataset]


@dataclass(frozen=True, slots=True)
class RestartMemory:
    """What the last daemon has left: the arena, its free bytes, and what lies in the others.

    `datasets`: by key, manifest (an Arrow file) and residents, whose ranges `space` keeps.
    """

    arena: Descriptor
    space: Allocator
    datasets: dict[str, tuple[bytes, RestartObjects]]


def packed(key: str, manifest: bytes, kept: RestartObjects) -> StoredDataset:
    """Return a dataset's entry of the index."""
    columns = np.stack((kept.place, kept.nbytes, kept.version)).tobytes()
    runs = {place: columns.astype(np.int64).tobytes() for place, columns in kept.runs.items()}
    ranges = np.stack(kept.ranges).astype(np.int64).tobytes()
    return StoredDataset(key, manifest, kept.ids.tobytes(), columns, ranges, runs, kept.page)


def unpacked(stored: StoredDataset) -> RestartObjects:
    """Return the objects of an entry of the index.

    Raises:
        ValueError: columns of other lengths, or an impossible page.
    """
    if stored.page and not is_page(stored.page):
        raise ValueError(f"pages of {stored.page} bytes")
    ids: Ids = np.frombuffer(stored.ids, np.int32)
    place, nbytes, version = _numbers(stored.columns).reshape(3, len(ids))
    start, size = _numbers(stored.ranges).reshape(2, -1)
    runs = {at: _numbers(run).reshape(-1, 2) for at, run in stored.runs.items()}
    return RestartObjects(ids, place, nbytes, version, (start, size), runs, stored.page)


def _numbers(data: bytes) -> Ints:
    return np.frombuffer(data, np.int64)


def write_index(
    memory: MemorySettings, total_nbytes: int, arena_nbytes: int, datasets: list[StoredDataset]
) -> Descriptor:
    """Write the index to a memfd.

    Args:
        memory, total_nbytes: the settings in effect and the memory of the node (`limits.memory`)
            from which the size of the arena was derived.

    Raises:
        OSError: there is no memory for it.
        ValueError: a dataset is too large for its format.
    """
    index = Descriptor(memfd(INDEX))
    with open(index.fd, "wb", closefd=False) as file:
        file.write(
            msgspec.msgpack.encode(
                StoredIndex(
                    _FORMAT, memory.budget, memory.share, total_nbytes, arena_nbytes, datasets
                )
            )
        )
    return index


def take(
    given: Mapping[str, Descriptor], memory: MemorySettings, total_nbytes: int
) -> RestartMemory | None:
    """Return what the last daemon has left; None if there is nothing of use.

    Args:
        given: the descriptors that systemd had stored, by name.
        memory, total_nbytes: as in `write_index`, of this daemon.
    """
    arena, stored = given.get(ARENA), given.get(INDEX)
    if arena is None or stored is None:
        return None
    try:
        with open(stored.fd, "rb", closefd=False) as file:
            file.seek(0)
            data = file.read()
        os.ftruncate(stored.fd, 0)
        if not data:  # that daemon, or one since, has begun to change the arena
            return None
        index = msgspec.msgpack.Decoder(StoredIndex).decode(data)
        if not _sound(arena, index) or not _same_size(index, memory, total_nbytes):
            log.info("the memory of the last daemon is not used: another size, or another version")
            return None
        datasets = {
            dataset.key: (dataset.manifest, unpacked(dataset)) for dataset in index.datasets
        }
        ranges = {key: objects.ranges for key, (_, objects) in datasets.items()}
        return RestartMemory(arena, Allocator(index.arena_nbytes, ranges), datasets)
    except (OSError, ValueError, msgspec.MsgspecError, CreelError) as e:
        log.warning("the memory of the last daemon is of no use: %s", e)
        return None


def _sound(arena: Descriptor, index: StoredIndex) -> bool:
    """Return whether this arena is the one of the index, and no process can cut it."""
    seals = fcntl.fcntl(arena.fd, F_GET_SEALS)
    sealed = seals & F_SEAL_SHRINK and seals & F_SEAL_GROW
    whole = os.fstat(arena.fd).st_size == index.arena_nbytes
    return bool(sealed) and whole and index.format == _FORMAT


def _same_size(index: StoredIndex, memory: MemorySettings, total_nbytes: int) -> bool:
    """Return whether a new arena would be as large as the one that was left.

    "auto" takes a share of what is free at the start, which training in between does not change:
    the arena stays as long as node and cgroup allow as much memory as then.

    Raises:
        ConfigError: the budget is more than this node has.
    """
    if memory.budget != "auto":
        return memory_budget(memory, total=total_nbytes, available=0) == index.arena_nbytes
    same = (index.budget, index.share) == (memory.budget, memory.share)
    return same and abs(total_nbytes - index.total_nbytes) <= total_nbytes * _SAME
