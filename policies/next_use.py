"""When each object is read next, as far as the plans of one job are known. Pure.

Each known epoch has a table "object -> step of its first read", the inverse of the epoch's
permutation, so that an access costs one lookup (law L6). Further reads of an object in the same
epoch, which only padding and samplers with replacement cause, are kept in a sorted list.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from creel.policies.arrays import Index, Ints, every, some, unique

#: The next use of an object that no known plan reads: later than any step.
NEVER = int(np.iinfo(np.int32).max)
_LOW = (1 << 32) - 1
#: Epochs with a table of 4 bytes per object: the current one, two ahead, and one more while some
#: ranks are in the next epoch already.
MAX_EPOCHS = 4
_MAX_INCOMPLETE = 64  # most epochs remembered as partly unknown


class Steps:
    """(n,) int32 steps, initially NEVER; uses memory only for pages that were written.

    Stored as the distance from NEVER, so that zero means NEVER: the kernel allocates zeroed pages
    when they are first written.

    >>> steps = Steps(3)
    >>> steps[np.array([1])] = np.array([7])
    >>> steps[:].tolist() == [NEVER, 7, NEVER]
    True
    """

    __slots__ = ("_left",)

    def __init__(self, objects: int) -> None:
        self._left = np.zeros(objects, np.int32)

    def __len__(self) -> int:
        return len(self._left)

    def __getitem__(self, ids: NDArray[np.integer] | slice) -> NDArray[np.int32]:
        out: NDArray[np.int32] = _LAST - self._left[ids]
        return out

    def __setitem__(
        self, ids: NDArray[np.integer] | slice, steps: NDArray[np.integer] | int
    ) -> None:
        self._left[ids] = _LAST - steps

    def clear(self) -> None:
        self._left = np.zeros(len(self._left), np.int32)


_LAST = np.int32(NEVER)


class EpochUses:
    """First reads of one epoch: (n,) `first` steps, or NEVER; `repeats`: object << 32 | step."""

    __slots__ = ("accesses", "base", "end", "first", "repeats", "twice")

    def __init__(self, objects: int, base: int) -> None:
        self.first = Steps(objects)
        self.base = base
        self.end = base  # one past the last known step
        self.accesses = 0
        self.repeats = np.empty(0, np.int64)
        self.twice = False  # whether an object may be read twice, perhaps within one step

    def add(self, steps: NDArray[np.int32], ids: Index) -> None:
        fresh = not self.accesses or every(self.first[ids] == NEVER)
        self.accesses += len(ids)
        self.base = min(self.base, int(steps[0]))
        self.end = max(self.end, int(steps[-1]) + 1)
        if fresh:
            order = np.arange(len(ids), dtype=np.int32)
            self.first[ids] = order
            once = every(self.first[ids] == order)
            self.first[ids] = steps
            self.twice |= not once
            if once or every(self.first[ids] == steps):
                return
            self.first[ids] = NEVER
        self.twice = True
        self._merge(steps, ids)

    def _merge(self, steps: NDArray[np.int32], ids: Index) -> None:
        """Add reads; keep the earliest of each object in `first`, the others in `repeats`."""
        new = (ids << 32) | steps
        known = np.empty(0, np.int64)
        if self.accesses > len(ids):
            known = unique(np.concatenate([ids, self.repeats >> 32]))
            known = known[self.first[known] != NEVER]
        old = (known << 32) | self.first[known]
        keys = np.sort(np.concatenate([self.repeats, old, new]))
        objects = keys >> 32
        head = np.ones(len(keys), np.bool_)
        head[1:] = objects[1:] != objects[:-1]
        self.first[objects[head]] = keys[head] & _LOW
        self.repeats = keys[~head]

    def after(self, steps: NDArray[np.int32], ids: Index) -> NDArray[np.int32]:
        """Return (k,) step of each object's first repeated read after `steps`, or NEVER."""
        out = np.full(len(ids), NEVER, np.int32)
        at = np.searchsorted(self.repeats, (ids << 32) | steps, side="right")
        entries = self.repeats[np.minimum(at, len(self.repeats) - 1)]
        hit = (at < len(self.repeats)) & (entries >> 32 == ids)
        out[hit] = entries[hit] & _LOW
        return out


class NextUses:
    """The next use of every object by one job; the job's ranks share one clock, in steps.

    Attributes:
        due: (n,) step of the next read, or NEVER.

    >>> uses = NextUses(3)
    >>> uses.extend(0, np.array([0, 0, 1], np.int32), np.array([2, 0, 1]))
    >>> uses.extend(1, np.array([2, 2, 3], np.int32), np.array([0, 1, 2]))
    >>> uses.consume(0, np.array([2, 0]))
    >>> uses.due[:]
    array([2, 1, 3], dtype=int32)
    """

    def __init__(self, objects: int) -> None:
        self.due = Steps(objects)
        self._epochs: dict[int, EpochUses] = {}
        self._incomplete: set[int] = set()
        self._many_incomplete = False  # whether more epochs are incomplete than are remembered
        self._forgotten = 0

    def extend(self, epoch: int, steps: NDArray[np.int32], ids: Index) -> None:
        """Add reads of a rank: object ids[i] in step steps[i] (ascending) of `epoch`.

        If MAX_EPOCHS other epochs are known, only `due` is updated.
        """
        if not len(ids):
            return
        table = self._epochs.get(epoch)
        if table is None and len(self._epochs) < MAX_EPOCHS:
            table = EpochUses(len(self.due), int(steps[0]))
            table.twice = epoch < self._forgotten  # its earlier reads are forgotten
            self._epochs[epoch] = table
            self._epochs = dict(sorted(self._epochs.items()))
        if table is None:
            self.mark_incomplete(epoch)
        else:
            table.add(steps, ids)
        # backwards, so that the first read of an object that comes twice is written last
        self.due[ids[::-1]] = np.minimum(self.due[ids], steps)[::-1]

    def mark_incomplete(self, epoch: int) -> None:
        """Note that not all reads of `epoch` are known here."""
        if len(self._incomplete) < _MAX_INCOMPLETE:
            self._incomplete.add(epoch)
        elif epoch not in self._incomplete:
            self._many_incomplete = True

    def repeated(self, epoch: int) -> bool:
        """Whether any object is read twice in `epoch`, so that `consume` needs the steps."""
        known = self._epochs.get(epoch)
        return known is not None and len(known.repeats) > 0

    def distinct(self, epoch: int) -> bool:
        """Whether no object is read twice in `epoch`, for certain, not even within one step."""
        known = self._epochs.get(epoch)
        complete = not self._many_incomplete and epoch not in self._incomplete
        return complete and known is not None and not known.twice

    def consume(self, epoch: int, ids: Index, steps: NDArray[np.int32] | None = None) -> None:
        """Note that a rank has read object ids[i] (in step steps[i], ascending) of `epoch`."""
        due = None
        if steps is not None and self.repeated(epoch):
            due = self._epochs[epoch].after(steps, ids)
        for later, known in self._epochs.items():
            if later > epoch:
                if due is None:
                    due = known.first[ids]
                    continue
                unknown = due == NEVER
                if not some(unknown):
                    break
                due[unknown] = known.first[ids[unknown]]
        self.due[ids] = NEVER if due is None else due

    def drop_before(self, epoch: int) -> None:
        """Forget epochs before `epoch`, which no rank reads any more."""
        self._forgotten = max(self._forgotten, epoch)
        for old in [e for e in self._epochs if e < epoch]:
            del self._epochs[old]
        self._incomplete = {e for e in self._incomplete if e >= epoch}

    def clear(self) -> None:
        self._epochs.clear()
        self.due.clear()

    def accesses(self, epoch: int) -> int:
        """Number of known reads of `epoch`."""
        known = self._epochs.get(epoch)
        return 0 if known is None else known.accesses

    def knows(self, epoch: int) -> bool:
        return epoch in self._epochs

    @property
    def nbytes(self) -> int:
        """Memory of all tables, in bytes."""
        tables = sum(4 * len(self.due) + t.repeats.nbytes for t in self._epochs.values())
        return 4 * len(self.due) + tables

    def span(self, epoch: int) -> tuple[int, int]:
        """First step of a known epoch, and one past its last known step."""
        known = self._epochs[epoch]
        return known.base, known.end

    def start(self, epoch: int) -> int:
        """First step of the first known epoch from `epoch` on, or NEVER."""
        return next((t.base for e, t in self._epochs.items() if e >= epoch), NEVER)

    @property
    def end(self) -> int:
        """One past the last known step."""
        return max((t.end for t in self._epochs.values()), default=0)

    @property
    def beyond(self) -> float:
        """Estimated step of a read after all known plans: the middle of the next unknown epoch."""
        spans = [t.end - t.base for t in self._epochs.values()]
        return self.end + 0.5 * sum(spans) / max(len(spans), 1)

    def repeats(self) -> tuple[int, int]:
        """Return (repeated reads within an epoch, all reads), over the known epochs."""
        tables = self._epochs.values()
        return sum(len(t.repeats) for t in tables), sum(t.accesses for t in tables)

    def reuse_distances(self, most: int) -> Ints:
        """Return (k,) the steps between each known read of an object and the next one, unordered.

        Of `most` objects at most, evenly chosen; a read without a known next one has none.

        >>> uses = NextUses(3)
        >>> uses.extend(0, np.array([0, 0, 1], np.int32), np.array([2, 0, 1]))
        >>> uses.extend(1, np.array([2, 2, 3], np.int32), np.array([0, 1, 2]))
        >>> uses.reuse_distances(3).tolist()
        [2, 1, 3]
        """
        stride = max(-(-len(self.due) // most), 1)
        ids = np.arange(0, len(self.due), stride, dtype=np.int64)
        reads = [np.empty(0, np.int64)]
        for known in self._epochs.values():
            first = known.first[ids]
            reads.append(((ids << 32) | first)[first != NEVER])
            begin, end = (np.searchsorted(known.repeats, (ids + k) << 32) for k in (0, 1))
            count = end - begin
            skipped = np.repeat(begin - (np.cumsum(count) - count), count)
            reads.append(known.repeats[skipped + np.arange(len(skipped))])
        keys = np.sort(np.concatenate(reads))
        again = keys[1:] >> 32 == keys[:-1] >> 32
        distances: Ints = np.diff(keys)[again]
        return distances


def histogram(distances: Ints, bins: int) -> tuple[Ints, Ints]:
    """Return (b,) counts in at most `bins` bins of equal width, and their (b + 1,) whole edges.

    Both are empty without distances.

    >>> counts, edges = histogram(np.array([1, 2, 2, 6]), bins=3)
    >>> counts.tolist(), edges.tolist()
    ([3, 0, 1], [1, 3, 5, 7])
    """
    if not len(distances):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    least, most = int(distances.min()), int(distances.max())
    width = -(-(most + 1 - least) // bins)
    edges = np.arange(least, most + width + 1, width, dtype=np.int64)
    return np.histogram(distances, edges)[0].astype(np.int64), edges
