"""What a dataset that declares nothing reads: learnt in one epoch, known from the next on.

Below creel.wrap, a person's own `__getitem__` that reads by creel.open or creel.read is heard. What
was heard goes into a journal, a memfd that forked workers share (a spawned one has its own): lines
of JSON, `[sample, address, ...]`, each one atomic append. When the samples come again somebody
appends the line `[]`: what stands before the first such line is the map, the same for all. Samples
that are not in the map, or read differently later, are read from the source as ever.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch.utils.data import Dataset

from creel.loader.adapters import Declared
from creel.loader.base import position
from creel.loader.reading import Hearing
from creel.loader.sources import Binding
from creel.loader.tree import LeafNode

if TYPE_CHECKING:
    from creel.loader.base import Sample

#: An epoch is over when one process meets nothing new over so much of what was heard: 1/16.
_AGAIN = 16
#: A process that listens needs about 300 bytes a sample; who has more can say what is read.
_MOST_SAMPLES = 1_000_000
_PIECE = 1 << 24  # bytes of the journal read in one go


class _Map:
    """A dataset whose reads are known by now, in the form of those that declare them."""

    def __init__(self, size: int, known: dict[int, list[str]]) -> None:
        self.creel_uris: Sequence[str] = sorted(
            {address for heard in known.values() for address in heard}
        )
        number = {address: i for i, address in enumerate(self.creel_uris)}
        counts = np.zeros(size, np.int64)
        counts[list(known)] = [len(heard) for heard in known.values()]
        self._ends = np.cumsum(counts)
        self._numbers = np.array([number[a] for i in sorted(known) for a in known[i]], np.int32)

    def __len__(self) -> int:
        return len(self._ends)

    def objects(self, index: int) -> list[int]:
        """What sample `index` reads; nothing where nobody has heard."""
        i = position(index, len(self))
        numbers: list[int] = self._numbers[self._ends[i - 1] if i else 0 : self._ends[i]].tolist()
        return numbers


class Learner:
    """Listens to one dataset; thread-safe, and shared with forked workers."""

    def __init__(self, dataset: Dataset[Sample]) -> None:
        self.dataset = dataset
        self._size = len(dataset)  # type: ignore[arg-type]  # the caller minds a TypeError
        memory = os.memfd_create("creel-learnt", os.MFD_CLOEXEC)
        # opened anew, since only open() gives O_APPEND its atomicity on every kernel
        self._fd = os.open(f"/proc/self/fd/{memory}", os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        os.close(memory)
        weakref.finalize(self, os.close, self._fd)
        self._renew()

    def _renew(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._known: dict[int, list[str]] = {}
        self._at = 0
        self._rest = b""
        self._again = 0
        self._sealed = False

    def __getitem__(self, index: int) -> Sample:
        """The dataset's sample, listened to."""
        with Hearing() as heard:
            sample = self.dataset[index]
        if heard.addresses and isinstance(index, (int, np.integer)):
            self._note(position(index, self._size), heard.addresses)
        return sample

    def binding(self) -> Binding | None:
        """The dataset with the objects it is known to read; None while that is being learnt."""
        with self._here():
            self._catch_up()
            if not self._sealed or not self._known:
                return None
            known = _Map(self._size, self._known)
            self._known = {}
            leaf = Declared(known)
            known.creel_uris = []  # the leaf has them, in a tenth of the memory
            return Binding(LeafNode(self.dataset, leaf, 0), [leaf])

    def _here(self) -> threading.Lock:
        if self._pid != os.getpid():
            self._renew()
        return self._lock

    def _note(self, index: int, addresses: list[str]) -> None:
        with self._here():
            if self._sealed:
                return
            if index in self._known:
                self._again += 1
            else:
                self._again = 0
                os.write(self._fd, json.dumps([index, *addresses]).encode() + b"\n")
            self._catch_up()
            if self._over() and not self._sealed:
                os.write(self._fd, b"[]\n")

    def _over(self) -> bool:
        """Whether the first epoch is. Not because somebody looks at the same sample often."""
        known, again, size = len(self._known), self._again, self._size
        return known == size or (again * _AGAIN > known and max(2 * known, again) >= size)

    def _catch_up(self) -> None:
        """Take in what others have heard."""
        while not self._sealed and (data := os.pread(self._fd, _PIECE, self._at)):
            self._at += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                heard = json.loads(line)
                if not heard:
                    self._sealed = True
                    return
                self._known[heard[0]] = heard[1:]


def learner_of(dataset: Dataset[Sample]) -> Learner | None:
    """A listener; None for a dataset that cannot be listened to sample by sample."""
    if hasattr(dataset, "__getitems__") or not hasattr(dataset, "__len__"):
        return None
    try:
        small = len(dataset) <= _MOST_SAMPLES
        return Learner(dataset) if small else None
    except Exception:  # noqa: BLE001  a person's __len__ raises what it likes
        return None
