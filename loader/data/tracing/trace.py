"""AccessTrace: what each sample of a dataset was recorded to read (see `recorder`)."""

from __future__ import annotations

from collections import deque
from itertools import compress

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Dataset

from creel.cache.storage.version import CHANGING, MISSING, UNKNOWN
from creel.loader.data.binding.adapters import Addressed
from creel.loader.data.binding.fetch_limit import FetchLimit
from creel.loader.data.binding.tree import inside, stretches, unchanged
from creel.loader.data.binding.wrapped import is_wrapped, unwrap
from creel.loader.data.datasets.base import CreelDataset
from creel.loader.data.reading.storage import Options
from creel.loader.data.tracing.journal import (
    ALL,
    DIGEST,
    FILE,
    NBYTES,
    NUMBER,
    PART,
    VERSION,
    RecordedReads,
)
from creel.loader.data.tracing.observed import WORTH
from creel.policies.arrays import Ids, Ints

#: Most values examined in search of parts; also the longest list or dict searched.
_MAX_PARTS = 10_000


class AccessTrace:
    """What each sample of a dataset reads, as far as it was recorded.

    A file is left out if samples read only small parts of it that add up to a small share. A local
    file is also left out if it had several versions, because it was written while it was being
    recorded: samples may write it in each epoch.

    Args:
        size: number of samples of the dataset; others are left out.
        recorded: the recorded reads; the first entry of a sample counts.
        parts: the creel datasets in the dataset, from `parts_of`.
        options: with which the dataset reads remote addresses.
        limit: as in `Addressed`.
    """

    def __init__(
        self,
        size: int,
        recorded: RecordedReads,
        parts: list[CreelDataset],
        options: Options = None,
        *,
        limit: FetchLimit | None = None,
    ) -> None:
        items, files = recorded.items, recorded.files
        which, first = np.unique(recorded.samples, return_index=True)
        which, first = which[which < size], first[which < size]
        names, name_of = _numbered(recorded.addresses, items[files, DIGEST])
        counted = np.zeros(len(recorded.samples), np.bool_)
        counted[first] = True
        counted = np.repeat(counted, recorded.counts)[files]
        kept = _worth_caching(name_of[counted], items[files][counted], len(names))
        kept &= ~_rewritten(len(names), name_of, items[files, VERSION])
        wanted = np.ones(len(items), np.bool_)
        wanted[files] = kept[name_of]
        recorded, place = recorded.only(wanted), (kept.cumsum() - 1)[name_of[kept[name_of]]]
        part, number = recorded.items[:, PART].copy(), recorded.items[:, NUMBER].copy()
        files = part == FILE
        part[files], number[files] = len(parts), place  # the files form one more part
        counts = recorded.counts
        self.counts = np.zeros(size, np.int64)
        self.counts[which] = counts[first]
        at = stretches((counts.cumsum() - counts)[first], counts[first])
        read, self._leaf = np.unique(part[at], return_inverse=True)
        self._object = number[at]
        traced = self._files = Addressed(list(compress(names, kept.tolist())))
        traced.checked, traced.storage_options, traced.limit = True, options, limit
        everything = [*parts, traced]
        self.leaves = [everything[i] for i in read.tolist()]

    def unchecked(self) -> None:
        """Let the files be served in any version."""
        self._files.checked = False

    def same(self, other: AccessTrace) -> bool:
        """Whether both traces have the same reads of each sample."""
        return (
            [leaf.manifest.key for leaf in self.leaves]
            == [leaf.manifest.key for leaf in other.leaves]
            and np.array_equal(self.counts, other.counts)
            and np.array_equal(self._leaf, other._leaf)
            and np.array_equal(self._object, other._object)
        )

    def numbers(self, bases: Ints) -> Ids:
        """Return the ids of all samples' objects; see `creel.loader.data.binding.wrapped.Trace`."""
        return (bases[self._leaf] + self._object).astype(np.int32)


def _numbered(addresses: list[str], digests: Ints) -> tuple[list[str], Ints]:
    """Return the distinct ones of (f,) addresses, and (f,) positions of each among these.

    They are sorted by digest, so that a trace does not depend on the order of recording. Of two
    addresses with the same digest one is dropped; it is then read directly.
    """
    _, first, name_of = np.unique(digests, return_index=True, return_inverse=True)
    return [addresses[i] for i in first.tolist()], name_of


def _worth_caching(name_of: Ints, items: Ints, names: int) -> NDArray[np.bool_]:
    """Return (names,) whether samples read a file whole, or together enough of it.

    name_of, items: (f,) file of each item, and (f, 5) the items.

    >>> items = np.array([[FILE, 10, 100, 0, 0]] * 3 + [[FILE, ALL, 0, 0, 0]])
    >>> _worth_caching(np.array([0, 1, 1, 2]), items, 3).tolist()
    [False, False, True]
    """
    got, nbytes = items[:, NUMBER], items[:, NBYTES]
    part = got != ALL
    whole = np.bincount(name_of[~part], minlength=names) > 0
    read = np.bincount(name_of[part], got[part], names)
    size = np.zeros(names, np.int64)
    size[name_of[part]] = nbytes[part]
    return whole | (read * WORTH >= np.maximum(size, 1))


def _rewritten(names: int, name_of: Ints, of: Ints) -> NDArray[np.bool_]:
    """Return (names,) whether samples found a file in several versions, or it is gone.

    name_of, of: (f,) file and version of each item.

    >>> name_of, of = np.array([0, 0, 0, 1, 1, 2]), np.array([CHANGING, 5, 0, 5, 6, MISSING])
    >>> _rewritten(3, name_of, of).tolist()
    [False, True, True]
    """
    lowest = np.full(names, np.iinfo(np.int64).max)
    highest = np.full(names, np.iinfo(np.int64).min)
    settled = (of != UNKNOWN) & (of != CHANGING)
    np.minimum.at(lowest, name_of[settled], of[settled])
    np.maximum.at(highest, name_of[settled], of[settled])
    several: NDArray[np.bool_] = (lowest < highest) | (lowest == MISSING)
    return several


def by_sample(dataset: object) -> bool:
    """Whether samples are read one by one, so that the reads of each are known."""
    below = None if unchanged(dataset, ConcatDataset) else inside(dataset)
    return not hasattr(dataset, "__getitems__") if below is None else all(map(by_sample, below))


def parts_of(dataset: object) -> list[CreelDataset]:
    """Return the creel datasets that a dataset holds, in the same order in all processes."""
    parts: list[CreelDataset] = []
    seen: set[int] = set()
    queue = deque([dataset])  # breadth first: direct members before those of long lists
    while queue and len(seen) < _MAX_PARTS:
        one = queue.popleft()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if is_wrapped(one):
            queue.append(unwrap(one))
        elif isinstance(one, CreelDataset):
            if one.cacheable:
                parts.append(one)
        else:
            queue.extend(_inside(one))
    return parts


def _inside(one: object) -> list[object]:
    """Return a value's members that may hold datasets: datasets, lists, tuples, dicts."""
    if isinstance(one, Dataset):
        held = list(vars(one).values())
    elif isinstance(one, dict):
        held = list(one.values()) if len(one) <= _MAX_PARTS else []
    elif isinstance(one, (list, tuple)):
        held = list(one) if len(one) <= _MAX_PARTS else []
    else:
        held = []
    return [x for x in held if isinstance(x, (Dataset, list, tuple, dict))]
