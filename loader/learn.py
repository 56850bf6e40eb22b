"""What a dataset that declares nothing reads: learnt in one epoch, known from the next on.

Below creel.wrap, a person's own `__getitem__` is heard that reads by creel.open or creel.read, or
from a creel dataset which it holds. What was heard goes into a journal, a memfd that the trainer
and its workers share: lines of JSON, one a batch, `[again, [sample, item, ...], ...]`, each an
atomic append; `again` counts samples that were known. When enough came again, or the journal is too
long, somebody appends the line `[]`: what stands before the first such line is the map, the same
for all. Samples that are not in the map, or read differently later, are read from the source as
ever.
"""

from __future__ import annotations

import json
import os
import threading
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from torch.utils.data import Dataset, StackDataset, Subset

from creel.loader.base import Transformed, fetch_many, position
from creel.loader.learnt import Item, Learnt, by_sample, parts_of
from creel.loader.reading import Asked, Hearing
from creel.loader.tree import unchanged
from creel.loader.wrap import Wrapped, unwrap

if TYPE_CHECKING:
    from creel.loader.base import Sample

T = TypeVar("T")
#: What each sample of a batch asks for.
Wishes = list[list[Asked]]

#: An epoch is over when nothing new was met over so much of what was heard: 1/16.
_AGAIN = 16
#: Who has more can say what is read.
_MOST_SAMPLES = 10_000_000
#: Nor is more heard once the journal has so many bytes: of some 100 a sample, if it reads one file.
_MOST_NBYTES = 1 << 29
_PIECE = 1 << 20  # bytes of the journal read in one go
_SEAL = b"[]"


class Learner:
    """Listens to one dataset; thread-safe, and shared with forked workers."""

    def __init__(self, dataset: Dataset[Sample], journal: int | None = None) -> None:
        """`journal`: another process's, a descriptor."""
        self.dataset = dataset
        self._size = len(dataset)  # type: ignore[arg-type]  # the caller minds a TypeError
        self._parts = parts_of(dataset)
        self._number = {id(part): i for i, part in enumerate(self._parts)}
        self.token = uuid.uuid4().hex  # of the journal, for other processes
        self.fd = _new_journal() if journal is None else os.dup(journal)
        weakref.finalize(self, os.close, self.fd)
        self._renew()

    def _renew(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._known = np.zeros(self._size, np.bool_)
        self._count = 0  # of them
        self._heard: list[list[int | Item]] = []  # since the last `write`
        self._met = 0  # known samples since then
        self._at = 0
        self._rest = b""
        self._again = 0  # samples since the last new one
        self._sealed = self._given = False

    def __getitem__(self, index: int) -> Sample:
        """The dataset's sample, listened to; what was heard waits for `write`."""
        if self._sealed:
            return self.dataset[index]
        wishes: list[Asked] = []
        sample = _heard(wishes, lambda: self.dataset[index])
        self._note_wishes(index, wishes)
        return sample

    def __getitems__(self, indices: Sequence[int]) -> Iterable[Sample]:
        """The same for a batch, in torch's order of calls: random numbers depend on it."""
        if self._sealed:
            return fetch_many(self.dataset, indices)
        if not hasattr(self.dataset, "__getitems__"):
            return [self[i] for i in indices]
        wishes: Wishes = [[] for _ in indices]
        samples = _batch(self.dataset, indices, wishes)
        for index, asked in zip(indices, wishes, strict=True):
            self._note_wishes(index, asked)
        return samples

    def _note_wishes(self, index: int, wishes: list[Asked]) -> None:
        items = [i for what in dict.fromkeys(wishes) if (i := self._item(what)) is not None]
        if isinstance(index, (int, np.integer)):
            with suppress(IndexError):  # a dataset may give more samples than its length says
                self._note(position(index, self._size), items)

    def learnt(self) -> Learnt | None:
        """What the samples read, for good; None while that is being learnt. Gives it once."""
        with self._here():
            self._catch_up()
            if not self._sealed or self._given:
                return None
            self._given = True
        learnt = Learnt(self._size, self._all(), self._parts)
        return learnt if learnt.leaves else None

    def _all(self) -> Iterator[tuple[int, list[Item]]]:
        """What stands in the journal, which is complete."""
        at, rest = 0, b""
        while True:
            data = os.pread(self.fd, _PIECE, at)
            at += len(data)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line == _SEAL:
                    return
                for index, *items in json.loads(line)[1:]:
                    yield index, items

    def _here(self) -> threading.Lock:
        if self._pid != os.getpid():
            self._renew()
        return self._lock

    def _note(self, index: int, items: list[Item]) -> None:
        with self._here():
            if self._known[index]:
                self._met += 1
            else:
                self._heard.append([index, *items])

    def _item(self, asked: Asked) -> Item | None:
        """What the journal calls it; None where a daemon cannot be told of it.

        That is an object of a dataset that is no part of ours.
        """
        if isinstance(asked, str):
            return asked if _tellable(asked) else None
        part = self._number.get(asked[0])
        return None if part is None else (part, asked[1])

    def write(self) -> None:
        """Put what was heard into the journal, after each batch; learn what others have heard."""
        with self._here():
            if (self._heard or self._met) and not self._sealed:
                self._append(json.dumps([self._met, *self._heard]).encode())
            self._heard, self._met = [], 0
            self._catch_up()
            if self._over() and not self._sealed:
                self._append(_SEAL)

    def _append(self, line: bytes) -> None:
        """Where the system has no room for it, nothing is learnt any more: here or elsewhere."""
        try:
            whole = os.write(self.fd, line + b"\n") > len(line)
        except OSError:
            whole = False
        if not whole:
            self._sealed = self._given = True

    def _over(self) -> bool:
        """Whether the first epoch is. Not because somebody looks at the same sample often."""
        known, again, size = self._count, self._again, self._size
        if known == size or self._at >= _MOST_NBYTES:
            return True
        return again * _AGAIN > known and max(2 * known, again) >= size

    def _catch_up(self) -> None:
        """Take in what others have heard."""
        while not self._sealed and (data := os.pread(self.fd, _PIECE, self._at)):
            self._at += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                if line == _SEAL:
                    self._sealed = True
                    return
                try:
                    again, *new = json.loads(line)
                except ValueError:  # there was no room for all of it
                    self._sealed = self._given = True
                    return
                self._again = 0 if new else self._again + again
                for index, *_ in new:
                    self._count += not self._known[index]
                    self._known[index] = True


def _heard(wishes: list[Asked], act: Callable[[], T]) -> T:
    """What `act` gives; what it asks for is added to the wishes."""
    with Hearing() as hearing:
        result = act()
    wishes += hearing.wanted()
    return result


def _batch(dataset: object, indices: Iterable[int], wishes: Wishes) -> list[Sample]:
    """`fetch_many` of a dataset that `by_sample` allows, each sample listened to by itself.

    Calls come in the same order: a StackDataset gives all samples of its first part before the
    second one's, and a function of `Transformed` sees none before all were taken.
    """
    if type(dataset) is Wrapped:
        return _batch(unwrap(dataset), indices, wishes)
    if unchanged(dataset, Subset):
        below: Iterable[int] = map(dataset.indices.__getitem__, indices)
        if hasattr(dataset.dataset, "__getitems__"):
            below = list(below)
        return _batch(dataset.dataset, below, wishes)
    if type(dataset) is Transformed:
        return [
            _heard(asked, lambda sample=sample: dataset.fn(sample))  # type: ignore[misc]  # bound
            for sample, asked in zip(_batch(dataset.dataset, indices, wishes), wishes, strict=True)
        ]
    if unchanged(dataset, StackDataset):
        parts = dataset.datasets
        if isinstance(parts, dict):
            columns = [_batch(part, indices, wishes) for part in parts.values()]
            return [dict(zip(parts, row, strict=True)) for row in zip(*columns, strict=True)]
        return list(zip(*(_batch(part, indices, wishes) for part in parts), strict=True))
    leaf: Dataset[Sample] = dataset  # type: ignore[assignment]  # all others are
    return [
        _heard(asked, lambda i=i: leaf[i])  # type: ignore[misc]  # bound
        for i, asked in zip(indices, wishes, strict=True)
    ]


def _new_journal() -> int:
    memory = os.memfd_create("creel-learnt", os.MFD_CLOEXEC)
    # opened anew, since only open() gives O_APPEND its atomicity on every kernel
    journal = os.open(f"/proc/self/fd/{memory}", os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
    os.close(memory)
    return journal


def _tellable(address: str) -> bool:
    """Whether a daemon can be told of it: a file's name need not be UTF-8."""
    try:
        return b"\0" not in address.encode()
    except UnicodeEncodeError:
        return False


def learner_of(dataset: Dataset[Sample], journal: int | None = None) -> Learner | None:
    """A listener; None for a dataset that cannot be listened to sample by sample."""
    try:
        fit = by_sample(dataset) and len(dataset) <= _MOST_SAMPLES  # type: ignore[arg-type]
        return Learner(dataset, journal) if fit else None
    except Exception:  # noqa: BLE001  a person's __len__ raises what it likes
        return None
