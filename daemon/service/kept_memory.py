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

import msgspec
import numpy as np

from creel.cache.memory.memfd import F_GET_SEALS, F_SEAL_GROW, F_SEAL_SHRINK, Descriptor, memfd
from creel.cache.memory.pools.allocator import is_page
from creel.daemon.core.restart.kept import KeptObjects
from creel.policies.arrays import Ids, Ints

log = logging.getLogger("creel.node")

ARENA, INDEX = NAMES = "creel-arena", "creel-index"
#: Raised whenever places in the arena, or anything below, mean something else than before.
_FORMAT = 2


class StoredDataset(msgspec.Struct, frozen=True):
    """A dataset: its manifest as an Arrow file, and the columns of `KeptObjects` as bytes."""

    key: str
    manifest: bytes
    ids: bytes
    columns: bytes  # place, nbytes, version
    ranges: bytes  # starts, sizes
    runs: dict[int, bytes]
    page: int


class KeptMemory(msgspec.Struct, frozen=True):
    """What one daemon leaves to the next. Used only under the same `budget`, as it was set."""

    format: int
    budget: str
    arena_nbytes: int
    datasets: list[StoredDataset]


def packed(key: str, manifest: bytes, kept: KeptObjects) -> StoredDataset:
    """Return a dataset's entry of the index."""
    columns = np.stack((kept.place, kept.nbytes, kept.version)).tobytes()
    runs = {place: one.astype(np.int64).tobytes() for place, one in kept.runs.items()}
    ranges = np.stack(kept.ranges).astype(np.int64).tobytes()
    return StoredDataset(key, manifest, kept.ids.tobytes(), columns, ranges, runs, kept.page)


def unpacked(one: StoredDataset) -> KeptObjects:
    """Return the objects of an entry of the index.

    Raises:
        ValueError: columns of other lengths, or an impossible page.
    """
    if one.page and not is_page(one.page):
        raise ValueError(f"pages of {one.page} bytes")
    ids: Ids = np.frombuffer(one.ids, np.int32)
    place, nbytes, version = _numbers(one.columns).reshape(3, len(ids))
    start, size = _numbers(one.ranges).reshape(2, -1)
    runs = {at: _numbers(run).reshape(-1, 2) for at, run in one.runs.items()}
    return KeptObjects(ids, place, nbytes, version, (start, size), runs, one.page)


def _numbers(data: bytes) -> Ints:
    return np.frombuffer(data, np.int64)


def write_index(budget: str, arena_nbytes: int, datasets: list[StoredDataset]) -> Descriptor:
    """Write the index to a memfd.

    Raises:
        OSError: there is no memory for it.
        ValueError: a dataset is too large for its format.
    """
    index = Descriptor(memfd(INDEX))
    kept = KeptMemory(_FORMAT, budget, arena_nbytes, datasets)
    with open(index.fd, "wb", closefd=False) as file:
        file.write(msgspec.msgpack.encode(kept))
    return index


def take(given: Mapping[str, Descriptor], budget: str) -> tuple[KeptMemory, Descriptor] | None:
    """Return what the last daemon has left, and its arena; None if there is nothing of use.

    Args:
        given: the descriptors that systemd had stored, by name.
        budget: the setting `memory.budget`.
    """
    arena, index = given.get(ARENA), given.get(INDEX)
    if arena is None or index is None:
        return None
    try:
        with open(index.fd, "rb", closefd=False) as file:
            file.seek(0)
            data = file.read()
        os.ftruncate(index.fd, 0)
        kept = msgspec.msgpack.decode(data, type=KeptMemory) if data else None
        seals = fcntl.fcntl(arena.fd, F_GET_SEALS)
        nbytes = os.fstat(arena.fd).st_size
    except (OSError, msgspec.MsgspecError) as e:
        log.warning("the memory of the last daemon is of no use: %s", e)
        return None
    if kept is None:  # that daemon, or one since, has begun to change the arena
        return None
    sound = nbytes == kept.arena_nbytes and seals & F_SEAL_SHRINK and seals & F_SEAL_GROW
    if not sound or kept.format != _FORMAT or kept.budget != budget:
        log.info("the memory of the last daemon is not used: other settings, or another version")
        return None
    return kept, arena
