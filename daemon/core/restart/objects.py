"""Residents that outlive their daemon: taken out of one core, and into the next. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from creel.cache.memory.pools.allocator import Ranges
from creel.cache.memory.pools.free_ranges import must
from creel.cache.memory.pools.runs import Runs
from creel.cache.storage.version import CHANGING
from creel.daemon.core.events import BaseEvent
from creel.daemon.core.residency import Residency
from creel.policies.arrays import Ids, Ints
from creel.policies.eviction.policy import ABSENT, FETCHING, RESIDENT


@dataclass(frozen=True, slots=True, eq=False)
class RestartObjects:
    """The residents of a dataset: (k,) numbers (ascending), places, bytes and versions.

    `ranges`: those of the dataset in the arena; `runs`: those of objects that consist of several.
    `page`: as in `Allocator.pool`; a dataset that grew has that of the first in its row.
    """

    ids: Ids
    place: Ints
    nbytes: Ints
    version: Ints
    ranges: Ranges
    runs: Runs
    page: int = 0


class Restored(BaseEvent, frozen=True):
    """A dataset that was just added has residents already; None: its kept memory is of no use."""

    dataset: str
    kept: RestartObjects | None


def restart_objects(residency: Residency) -> RestartObjects:
    """Return the residents of a dataset."""
    ids = np.flatnonzero(residency.state == RESIDENT)
    place, nbytes = residency.offset[ids], residency.length[ids].astype(np.int64)
    pool = residency.pool
    ranges = pool.ranges() if pool.same_size else pool.rooms(place, nbytes)
    version = residency.versions.held(ids)
    return RestartObjects(
        ids.astype(np.int32),
        place,
        nbytes,
        version,
        ranges,
        pool.runs(place),
        0 if pool.same_size else pool.page,
    )


def restore(residency: Residency, kept: RestartObjects) -> None:
    """Make kept objects residents of a dataset that has none; their ranges must be kept for it.

    They count as read earlier: a session checks the versions of their files as it asks.

    Raises:
        IllegalEventError: the objects are not this dataset's, or take other ranges. Nothing was
            changed.
    """
    ids = kept.ids.astype(np.intp)
    must(bool((np.diff(ids) > 0).all()), "kept objects out of order")
    must(not len(ids) or (ids[0] >= 0 and ids[-1] < len(residency)), "kept objects of no dataset")
    must(bool((residency.state[ids] == ABSENT).all()), "kept objects are here already")
    known = residency.length[ids]
    must(bool((kept.nbytes >= 0).all()), "kept objects without a length")
    must(bool(((known < 0) | (known == kept.nbytes)).all()), "kept objects of another length")
    residency.space.adopt(residency.name, residency.pool, kept.place, kept.nbytes, kept.runs)
    if not residency.pool.same_size:
        residency.set_lengths(ids, kept.nbytes)
    residency.move(ids, FETCHING)
    residency.landed(ids, kept.place)
    residency.versions.restore(ids, kept.version)
    residency.evict(ids[kept.version == CHANGING], "changed")
