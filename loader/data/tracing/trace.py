"""AccessTrace: what each sample of a dataset was recorded to read (see `recorder`)."""

from __future__ import annotations

from collections import deque
from itertools import compress

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Dataset

from creel.cache.storage.stores.access import Options
from creel.cache.storage.version import CHANGING, MISSING, UNKNOWN
from creel.loader.data.binding.adapters import Addressed, Blocks
from creel.loader.data.binding.fetch_limit import FetchLimit
from creel.loader.data.binding.tree import inside, stretches, unchanged
from creel.loader.data.binding.wrapped import is_wrapped, unwrap
from creel.loader.data.datasets.base import CreelDataset
from creel.loader.data.reading.read_counts import UNIT
from creel.loader.data.tracing.journal import (
    ALL,
    DIGEST,
    NBYTES,
    NUMBER,
    PART,
    UNITS,
    VERSION,
    RecordedReads,
)
from creel.policies.arrays import Ids, Ints

#: Bytes of a block: the most, of usual files and of those above 4 GiB.
_BLOCK_NBYTES, _MAX_BLOCK_NBYTES = 64 << 10, 1 << 20
#: Blocks of all files of a dataset, of which a daemon keeps some 60 bytes each.
_MOST_BLOCKS = 1 << 22
#: Most values examined in search of parts; also the longest list or dict searched.
_MAX_PARTS = 10_000


class AccessTrace:
    """What each sample of a dataset reads, as far as it was recorded.

    A file of which samples read parts is served in blocks. A local file is left out if it had
    several versions, because it was written while it was being recorded: samples may write it in
    each epoch.

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
        which, first = np.unique(recorded.samples, return_index=True)
        which, first = which[which < size], first[which < size]
        names, name_of = _numbered(recorded.addresses, recorded.items[recorded.files, DIGEST])
        kept = ~_rewritten(len(names), name_of, recorded.items[recorded.files, VERSION])
        wanted = np.ones(len(recorded.items), np.bool_)
        wanted[recorded.files] = kept[name_of]
        recorded, name_of = recorded.only(wanted), (kept.cumsum() - 1)[name_of[kept[name_of]]]
        names = list(compress(names, kept.tolist()))
        items, files = recorded.items, recorded.files
        nbytes = np.zeros(len(names), np.int64)  # of the files that are served in blocks
        np.maximum.at(nbytes, name_of, items[files, NBYTES])
        parted = nbytes > 0
        whole = Addressed(list(compress(names, (~parted).tolist())))
        of_blocks = block_sizes(items[files], name_of, nbytes)
        blocks = Blocks(list(compress(names, parted.tolist())), nbytes[parted], of_blocks[parted])
        self._files = whole, blocks
        whole.checked = blocks.checked = True
        whole.limit = limit
        whole.storage_options = blocks.storage_options = options
        part, number = items[:, PART].copy(), items[:, NUMBER].copy()
        many = np.ones_like(part)
        part[files] = len(parts) + parted[name_of]  # the files form two more parts
        number[files], many[files] = _objects_of(items[files], name_of, of_blocks, blocks.firsts)
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

    def unchecked(self) -> None:
        """Let the files be served in any version."""
        for leaf in self._files:
            leaf.checked = False

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


def _objects_of(items: Ints, name_of: Ints, size: Ints, firsts: Ints) -> tuple[Ints, Ints]:
    """Return (f,) the first object in their leaf of items that are files, and (f,) how many.

    Args:
        items: (f, 6).
        name_of: (f,) their files.
        size: (names,) of the blocks of files that are served in blocks, 0 of the others.
        firsts: of the leaf of blocks.

    >>> from creel.loader.data.tracing.journal import FILE
    >>> items = np.array([[FILE, 33, 16, 1 << 18, 0, 0], [FILE, ALL, 0, 0, 0, 0]])
    >>> _objects_of(items, np.array([1, 1]), np.array([0, 1 << 16, 0]), np.array([0, 4]))
    (array([2, 0]), array([2, 4]))
    """
    in_blocks = size[name_of] > 0
    place = np.where(size > 0, np.cumsum(size > 0), np.cumsum(size == 0)) - 1
    first = place[name_of]
    start, stop = _extents(items[in_blocks])
    of = size[name_of[in_blocks]]
    base, everything = firsts[:-1][first[in_blocks]], np.diff(firsts)[first[in_blocks]]
    whole = items[in_blocks, NUMBER] == ALL
    first[in_blocks] = base + np.where(whole, 0, start // of)
    count = np.ones_like(first)
    count[in_blocks] = np.where(whole, everything, -(-stop // of) - start // of)
    return first, count


def _extents(items: Ints) -> tuple[Ints, Ints]:
    """Return (f,) first bytes, and those behind the last, of items that are parts of files."""
    start = items[:, NUMBER] * UNIT
    return start, start + np.abs(items[:, UNITS]) * UNIT


def block_sizes(items: Ints, name_of: Ints, nbytes: Ints) -> Ints:
    """Return (names,) the bytes of a block of each file that is served in blocks, 0 of the others.

    What memory lacks of a block is read whole. So it is the largest size, of at most 64 KiB (of
    files above 4 GiB up to 1 MiB), with which samples read a quarter more than they ask for.

    Args:
        items, name_of: as for `_objects_of`.
        nbytes: (names,) of files that are served in blocks, 0 of the others.

    >>> from creel.loader.data.tracing.journal import FILE
    >>> rows = np.array([[FILE, 25 * i, 25, 1 << 28, 0, 0] for i in range(99)])
    >>> block_sizes(rows, np.zeros(99, int), np.array([1 << 28])).tolist()  # 25 pages each
    [16384]
    """
    largest = np.where(nbytes > 0, _BLOCK_NBYTES, 0)
    while (more := (largest > 0) & (largest < _MAX_BLOCK_NBYTES) & (largest << 16 < nbytes)).any():
        largest[more] *= 2
    part = (items[:, NUMBER] != ALL) & (nbytes[name_of] > 0)
    (start, stop), of = _extents(items[part]), name_of[part]
    asked = np.bincount(of, stop - start, len(nbytes))
    size = largest.copy()
    while True:
        blocks = -(-stop // size[of]) - start // size[of]
        read = np.bincount(of, blocks * size[of], len(nbytes))
        smaller = (read > 1.25 * asked) & (size > UNIT)
        if not smaller.any():
            break
        size[smaller] //= 2
    few = int((nbytes[size > 0] // size[size > 0]).sum()) <= _MOST_BLOCKS
    return size if few else largest


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
    kept_open = np.flatnonzero(np.isin(name_of, name_of[items[:, UNITS] < 0]))  # few, if any
    order = kept_open[np.argsort(name_of[kept_open], kind="stable")]
    for of in np.split(order, np.flatnonzero(np.diff(name_of[order])) + 1):
        again = items[of, UNITS] < 0
        opened = of[(items[of, UNITS] > 0)]
        if again.any() and len(opened):
            blocks, times = np.unique(stretches(number[opened], many[opened]), return_counts=True)
            common = blocks[times == len(np.unique(entry[opened]))]
            readers = np.unique(entry[of[again]])
            samples.append(np.repeat(readers, len(common)))
            objects.append(np.tile(common, len(readers)))
    return np.concatenate(samples), np.concatenate(objects)


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
        part = queue.popleft()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if is_wrapped(part):
            queue.append(unwrap(part))
        elif isinstance(part, CreelDataset):
            if part.cacheable:
                parts.append(part)
        else:
            queue.extend(_inside(part))
    return parts


def _inside(part: object) -> list[object]:
    """Return a value's members that may hold datasets: datasets, lists, tuples, dicts."""
    if isinstance(part, Dataset):
        held = list(vars(part).values())
    elif isinstance(part, dict):
        held = list(part.values()) if len(part) <= _MAX_PARTS else []
    elif isinstance(part, (list, tuple)):
        held = list(part) if len(part) <= _MAX_PARTS else []
    else:
        held = []
    return [x for x in held if isinstance(x, (Dataset, list, tuple, dict))]
