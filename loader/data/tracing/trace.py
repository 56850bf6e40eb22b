"""AccessTrace: what each sample of a dataset was recorded to read (see `recorder`)."""

from __future__ import annotations

import time
from collections import deque
from itertools import compress

import numpy as np
from torch.utils.data import ConcatDataset, Dataset

from creel.cache.storage.version import CHANGING, MISSING, UNKNOWN
from creel.loader.data.binding.adapters import Addressed, Blocks
from creel.loader.data.binding.tree import inside, stretches, unchanged
from creel.loader.data.binding.wrapped import is_wrapped, unwrap
from creel.loader.data.datasets.base import CreelDataset
from creel.loader.data.reading.lease import BLOCK
from creel.loader.data.reading.storage import Options, is_local, version_at
from creel.loader.data.tracing.journal import (
    ALL,
    BLOCKS,
    DIGEST,
    NBYTES,
    NUMBER,
    PART,
    VERSION,
    RecordedReads,
)
from creel.policies.arrays import Ids, Ints

#: Most values examined in search of parts; also the longest list or dict searched.
_MAX_PARTS = 10_000
#: A file that was just written usually has a version after this time (`version.of_stat`).
_SETTLED_S = 0.022
#: Most files whose versions are looked up once more.
_MAX_CHANGING = 1000
#: Files that `outdated` checks: it asks the storage for each, in the trainer's thread.
_LOOKED_AT = 16


class AccessTrace:
    """What each sample of a dataset reads, as far as it was recorded.

    A file of which samples read parts is served in blocks. A local file is left out if it has no
    single version, because it was written while it was being recorded.

    Args:
        size: number of samples of the dataset; others are left out.
        recorded: the recorded reads; the first entry of a sample counts.
        parts: the creel datasets in the dataset, from `parts_of`.
        options: with which the dataset reads remote addresses.
    """

    def __init__(
        self,
        size: int,
        recorded: RecordedReads,
        parts: list[CreelDataset],
        options: Options = None,
    ) -> None:
        which, first = np.unique(recorded.samples, return_index=True)
        which, first = which[which < size], first[which < size]
        names, name_of = _numbered(recorded.addresses, recorded.items[recorded.files, DIGEST])
        versions = _versions(names, name_of, recorded.items[recorded.files, VERSION])
        kept = versions > 0
        for i in np.flatnonzero(~kept).tolist():
            kept[i] = not is_local(names[i])
        wanted = np.ones(len(recorded.items), np.bool_)
        wanted[recorded.files] = kept[name_of]
        recorded, name_of = recorded.only(wanted), (kept.cumsum() - 1)[name_of[kept[name_of]]]
        names, versions = list(compress(names, kept.tolist())), versions[kept]
        items, files = recorded.items, recorded.files
        nbytes = np.zeros(len(names), np.int64)  # of the files that are served in blocks
        np.maximum.at(nbytes, name_of, items[files, NBYTES])
        parted = nbytes > 0
        whole = Addressed(list(compress(names, (~parted).tolist())))
        blocks = Blocks(list(compress(names, parted.tolist())), nbytes[parted])
        whole.versions, blocks.versions = versions[~parted], versions[parted]
        whole.storage_options = blocks.storage_options = options
        part, number = items[:, PART].copy(), items[:, NUMBER].copy()
        many = np.ones_like(part)
        part[files] = len(parts) + parted[name_of]  # the files form two more parts
        number[files], many[files] = _objects_of(items[files], name_of, nbytes, blocks.firsts)
        entry = np.repeat(np.arange(len(recorded.samples)), recorded.counts)
        more = _read_at_opening(items[files], name_of, entry[files], number[files], many[files])
        at = np.full(len(recorded.samples), size)  # entries that do not count go to no sample
        at[first] = which
        sample = np.concatenate([at[more[0]], np.repeat(at[entry], many)])
        part = np.concatenate([np.full(len(more[0]), len(parts) + 1), np.repeat(part, many)])
        number = np.concatenate([more[1], stretches(number, many)])
        order = np.argsort(sample, kind="stable")[: np.count_nonzero(sample < size)]
        self.counts = np.bincount(sample[order], minlength=size)
        read, self._leaf = np.unique(part[order], return_inverse=True)
        self._object = number[order]
        everything = [*parts, whole, blocks]
        self.leaves = [everything[i] for i in read.tolist()]

    def ignore_versions(self) -> None:
        """Let the files be served in any version."""
        for leaf in self.leaves:
            if isinstance(leaf, Addressed):
                leaf.versions = None

    def outdated(self) -> bool:
        """Whether files have changed since they were recorded, judged by a few of them."""
        for leaf in self.leaves:
            if isinstance(leaf, Addressed) and leaf.versions is not None:
                some = np.unique(np.linspace(0, leaf.object_count - 1, _LOOKED_AT).astype(np.int64))
                were = zip(leaf.addresses(some), leaf.versions_of(some), strict=True)
                files = ((name.partition(BLOCK)[0], of) for name, of in were)
                if any(of not in {UNKNOWN, version_at(address)} for address, of in files):
                    return True
        return False

    def same(self, other: AccessTrace) -> bool:
        """Whether both traces have the same reads of each sample, in the same file versions."""
        return (
            [leaf.manifest.key for leaf in self.leaves]
            == [leaf.manifest.key for leaf in other.leaves]
            and all(map(_same_versions, self.leaves, other.leaves))
            and np.array_equal(self.counts, other.counts)
            and np.array_equal(self._leaf, other._leaf)
            and np.array_equal(self._object, other._object)
        )

    def numbers(self, bases: Ints) -> Ids:
        """Return the ids of all samples' objects; see `creel.loader.data.binding.wrapped.Trace`."""
        return (bases[self._leaf] + self._object).astype(np.int32)


def _same_versions(one: CreelDataset, other: CreelDataset) -> bool:
    if not (isinstance(one, Addressed) and isinstance(other, Addressed)):
        return True
    if one.versions is None or other.versions is None:
        return one.versions is other.versions
    return np.array_equal(one.versions, other.versions)


def _numbered(addresses: list[str], digests: Ints) -> tuple[list[str], Ints]:
    """Return the distinct ones of (f,) addresses, and (f,) positions of each among these.

    They are sorted by digest, so that a trace does not depend on the order of recording. Of two
    addresses with the same digest one is dropped; it is then read directly.
    """
    _, first, name_of = np.unique(digests, return_index=True, return_inverse=True)
    return [addresses[i] for i in first.tolist()], name_of


def _objects_of(items: Ints, name_of: Ints, nbytes: Ints, firsts: Ints) -> tuple[Ints, Ints]:
    """Return (f,) the first object in their leaf of items that are files, and (f,) how many.

    Args:
        items: (f, 6).
        name_of: (f,) their files.
        nbytes: (names,) of files that are served in blocks, 0 of the others.
        firsts: of the leaf of blocks.

    >>> items = np.array([[FILE, 2, 1, 1 << 18, 0, 0], [FILE, ALL, 0, 0, 0, 0]])
    >>> _objects_of(items, np.array([1, 1]), np.array([0, 1 << 18, 0]), np.array([0, 4]))
    (array([2, 0]), array([1, 4]))
    """
    in_blocks = nbytes[name_of] > 0
    place = np.where(nbytes > 0, np.cumsum(nbytes > 0), np.cumsum(nbytes == 0)) - 1
    first = place[name_of]
    number, many = items[in_blocks, NUMBER], items[in_blocks, BLOCKS]
    base, everything = firsts[:-1][first[in_blocks]], np.diff(firsts)[first[in_blocks]]
    first[in_blocks] = base + np.where(number == ALL, 0, number)
    count = np.ones_like(first)
    count[in_blocks] = np.where(number == ALL, everything, np.abs(many))
    return first, count


def _read_at_opening(
    items: Ints, name_of: Ints, entry: Ints, number: Ints, many: Ints
) -> tuple[Ints, Ints]:
    """Find the blocks that all samples that opened a file have read of it, such as a directory.

    In another epoch another sample may open it, in a new worker.

    Args:
        items, name_of: as for `_objects_of`; number, many: its result.
        entry: (f,) which sample's items they are.

    Returns:
        (k,) samples for which an earlier one had opened a file; (k,) such blocks of it.
    """
    samples, objects = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    order = np.argsort(name_of, kind="stable")
    for of in np.split(order, np.flatnonzero(np.diff(name_of[order])) + 1):
        again = items[of, BLOCKS] < 0
        opened = of[(items[of, BLOCKS] > 0)]
        if again.any() and len(opened):
            found, times = np.unique(stretches(number[opened], many[opened]), return_counts=True)
            common = found[times == len(np.unique(entry[opened]))]
            readers = np.unique(entry[of[again]])
            samples.append(np.repeat(readers, len(common)))
            objects.append(np.tile(common, len(readers)))
    return np.concatenate(samples), np.concatenate(objects)


def _versions(names: list[str], name_of: Ints, of: Ints) -> Ints:
    """Return (names,) the version in which samples found each file; MISSING for several versions.

    name_of, of: (f,) file and version of each item. UNKNOWN if no item has a version. Files that
    had changed just before they were read are looked up once more.

    >>> name_of, of = np.array([0, 0, 0, 1, 1, 2]), np.array([CHANGING, 5, 0, 5, 6, 0])
    >>> _versions(["/a", "/b", "/c"], name_of, of).tolist() == [5, MISSING, UNKNOWN]
    True
    """
    lowest = np.full(len(names), np.iinfo(np.int64).max)
    highest = np.full(len(names), np.iinfo(np.int64).min)
    settled = (of != UNKNOWN) & (of != CHANGING)
    np.minimum.at(lowest, name_of[settled], of[settled])
    np.maximum.at(highest, name_of[settled], of[settled])
    found = np.where(lowest == highest, lowest, np.where(lowest < highest, MISSING, UNKNOWN))
    changing = np.zeros(len(names), np.bool_)
    changing[name_of[of == CHANGING]] = True
    changing &= found == UNKNOWN
    found[changing] = CHANGING
    left = np.flatnonzero(changing)[:_MAX_CHANGING].tolist()
    for pause in (0.0, _SETTLED_S):
        if left:
            time.sleep(pause)
        for i in left:
            found[i] = version_at(names[i])
        left = [i for i in left if found[i] == CHANGING]
    return found


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
