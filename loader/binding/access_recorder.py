"""AccessRecorder: records what a dataset that declares nothing reads, during its first epoch.

Below creel.wrap, the reads of a user's `__getitem__` through creel.open, creel.read or a creel
dataset that it holds are recorded in a journal, a memfd that the trainer and its workers share, and
the ranks of a node (`joint_recording`). It has one line of JSON per batch,
`[again, [sample, item, ...], ...]`, written by an atomic append; `again` counts samples that were
already recorded. After a local file comes its version, a number. Before this line comes one for the
files of which there are copies (`file_copies`), `{address: [first byte, bytes, version], ...}`.
Once enough samples have come again, or the journal is too long, a process appends the line `[]`:
the lines before the first `[]` are the trace, the same in all processes. Samples that are not
traced, or read something else later, are direct reads.

Where ranks share a journal and one reads nothing as a sample that another one did, their datasets
are not the same: it appends `null`, and the journal is void for all of them.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
import xxhash
from torch.utils.data import Dataset, StackDataset, Subset

from creel.cache.storage.version import CHANGING
from creel.forks import forget_in_child
from creel.loader.binding.access_trace import AccessTrace, Item, by_sample, parts_of
from creel.loader.binding.adapters import serve_torchvision
from creel.loader.binding.proxy import Wrapped, unwrap
from creel.loader.binding.tree import unchanged
from creel.loader.datasets.base import Transformed, fetch_many, position
from creel.loader.reading.intercept import look_again
from creel.loader.reading.observer import Asked, ObservedReads, enter_version, version_at

if TYPE_CHECKING:
    from creel.loader.datasets.base import Sample
    from creel.loader.reading.file_copies import FileCopies

T = TypeVar("T")
#: What each sample of a batch reads.
BatchReads = list[list[Asked]]
Observing = Callable[[], ObservedReads]

#: The first epoch is over when no sample was new for 1/16 of the number recorded.
_END_SHARE = 16
#: Larger datasets must declare their objects.
_MAX_SAMPLES = 10_000_000
#: Recording ends at this many bytes of journal; a sample that reads one file takes some 100.
MAX_JOURNAL_NBYTES = 1 << 29
#: A file that was just written has a version after this time, mostly (`version.of_stat`).
_SETTLED_S = 0.022
#: No more files are looked at once more for their versions.
_MAX_CHANGING = 1000
_PIECE = 1 << 20  # bytes of the journal per read
_SEAL, _VOID = b"[]", b"null"
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode
#: The name of the memfd.
JOURNAL = "creel-trace"


class AccessRecorder:
    """Records the reads of one dataset; thread-safe, and shared with forked workers."""

    def __init__(
        self,
        dataset: Dataset[Sample],
        journal: int | None = None,
        *,
        whole: bool = False,
        copies: FileCopies | None = None,
        joint: bool = False,
    ) -> None:
        """Begin to record.

        `journal`: descriptor, taken over, of another process's journal; None for a new one.
        `whole`, `copies`: as for `ObservedReads`. `joint`: the journal is that of several ranks.
        """
        self.fd = new_journal() if journal is None else journal
        weakref.finalize(self, os.close, self.fd)  # also where what follows raises
        self.dataset = dataset
        self.joint = joint
        self.copies = copies
        self._whole = whole
        self._size = len(dataset)  # type: ignore[arg-type]  # the caller handles a TypeError
        self._parts = parts_of(dataset)
        self._number = {id(part): i for i, part in enumerate(self._parts)}
        self._observed: deque[tuple[int, list[Asked]]] = deque()  # since the last `write`
        self._versions: dict[str, int] = {}  # of local files read since then
        self.forget()
        forget_in_child(self)

    def forget(self) -> None:
        """Create the state that belongs to one process."""
        self._lock = threading.Lock()
        self._known = np.zeros(self._size, np.bool_)
        #: In a joint journal, the `_marks` of what each known sample read.
        self._marks = np.zeros(self._size if self.joint else 0, np.uint32)
        self._count = 0  # known samples
        self._unwritten: list[list[Item | int]] = []  # since the last `write`
        self._repeated = 0  # samples since then that were known
        self._differ = False  # whether one of these reads other items in another rank
        self._at = 0
        self._rest = b""
        self._again = 0  # samples since the last new one
        self._sealed = self._returned = False
        #: Whether the journal is that of ranks with different datasets.
        self.void = False

    @property
    def fds(self) -> list[int]:
        """Descriptors of what processes share: the journal, and copies of files."""
        return [self.fd] if self.copies is None else [self.fd, self.copies.fd]

    @property
    def empty(self) -> bool:
        """Whether nobody has written to the journal."""
        return os.fstat(self.fd).st_size == 0

    def _observing(self) -> ObservedReads:
        """A record for one sample."""
        look_again()  # the sample before may have imported the library that it reads with
        return ObservedReads(whole=self._whole, copies=self.copies, versions=self._versions)

    def __getitem__(self, index: int) -> Sample:
        """The dataset's sample; its reads are kept until `write`."""
        if self._sealed:
            return self.dataset[index]
        with self._observing() as observed:
            sample = self.dataset[index]
        self._observed.append((index, observed.wanted()))
        return sample

    def __getitems__(self, indices: Sequence[int]) -> Iterable[Sample]:
        """Samples of a batch, in torch's order of calls, on which random numbers depend."""
        if self._sealed:
            return fetch_many(self.dataset, indices)
        if not hasattr(self.dataset, "__getitems__"):
            return [self[i] for i in indices]
        reads: BatchReads = [[] for _ in indices]
        samples = _batch(self.dataset, indices, reads, self._observing)
        self._observed += zip(indices, reads, strict=True)
        return samples

    def _note_reads(self, index: int, reads: list[Asked]) -> None:
        """Note what a sample read; the caller holds the lock."""
        items: list[Item | int] = []
        for what in dict.fromkeys(reads):
            item = self._item(what)
            if item is None:
                continue
            items.append(item)
            of = self._versions.pop(_address_of(item), None)
            if of is not None:
                items.append(of)
        if isinstance(index, (int, np.integer)):
            with suppress(IndexError):  # a dataset may give more samples than its length says
                self._note(position(index, self._size), items)

    def trace(self) -> AccessTrace | None:
        """The complete trace, returned once; None while recording, or if nothing was read."""
        with self._lock:
            self._catch_up()
            if not self._sealed or self._returned:
                return None
            self._returned = True
            self.void |= self._differ
            if self.void:
                return None
        copied: dict[str, list[int]] = {}
        versions: dict[str, int] = {}
        recorded = list(self._all(copied, versions))
        _look_again(versions)
        trace = AccessTrace(self._size, recorded, self._parts, versions)
        if self.copies is not None:
            trace.keep(self.copies.fd, copied)
        return trace if trace.leaves else None

    def _all(
        self, copied: dict[str, list[int]], versions: dict[str, int]
    ) -> Iterator[tuple[int, list[Item]]]:
        """(sample, items) of the complete journal, in order.

        Enters copies of files in `copied`, and versions of files in `versions`.
        """
        at, rest = 0, b""
        while True:
            data = os.pread(self.fd, _PIECE, at)
            at += len(data)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line == _SEAL:
                    return
                read = _decode(line)
                if isinstance(read, dict):
                    copied |= read
                    continue
                for index, *noted in read[1:]:
                    items = _items(noted, versions)
                    if not self.joint:
                        yield index, items
                    elif index < self._size:
                        yield index, list(filter(self._is_here, items))

    def _is_here(self, item: Item) -> bool:
        """Whether this rank's dataset has the object that another rank has read."""
        if isinstance(item, str) or len(item) == 3:
            return True
        part, number = item
        return part < len(self._parts) and number < self._parts[part].object_count

    def _note(self, index: int, items: list[Item | int]) -> None:
        if self._known[index]:
            self._repeated += 1
            self._compare(index, items)
        else:
            self._unwritten.append([index, *items])

    def _item(self, read: Asked) -> Item | None:
        """A read as the journal writes it; None if the daemon cannot fetch it.

        That is an address that is not UTF-8, or an object of a dataset that is not a known part.
        """
        if isinstance(read, str):
            return read if _is_utf8(read) else None
        if len(read) == 3:
            return read if _is_utf8(read[0]) else None
        part = self._number.get(read[0])
        return None if part is None else (part, read[1])

    def write(self) -> None:
        """Append the reads of a batch to the journal, and take in those of other processes."""
        with self._lock:
            if self.joint:
                self._catch_up()  # to compare with what others have read
            for index, reads in _drained(self._observed):  # also those of other threads
                self._note_reads(index, reads)
            if not self._sealed:
                self._write_copies()
            if (self._unwritten or self._repeated) and not self._sealed:
                self._append(_encode([self._repeated, *self._unwritten]))
            self._unwritten, self._repeated = [], 0
            self._catch_up()
            if not self._sealed and (self._differ or self._over()):
                self._append(_VOID if self._differ else _SEAL)

    def drop(self) -> None:
        """Forget what was read since the last `write`."""
        self._observed.clear()
        self._versions.clear()

    def _write_copies(self) -> None:
        if self.copies is None:
            return
        self.copies.flush()
        done = _drained(self.copies.done)
        named = {address: place for address, *place in done if _is_utf8(address)}
        if named:
            self._append(_encode(named))

    def _append(self, line: bytes) -> None:
        """Append a line; if there is no memory for all of it, recording ends without a trace."""
        try:
            whole = os.write(self.fd, line + b"\n") > len(line)
        except OSError:
            whole = False
        if not whole:
            self._sealed = self._returned = True

    def _over(self) -> bool:
        """Whether the first epoch is over; reading the same few samples often does not end it."""
        known, again, size = self._count, self._again, self._size
        if known == size or self._at >= MAX_JOURNAL_NBYTES:
            return True
        return again * _END_SHARE > known and max(2 * known, again) >= size

    def _catch_up(self) -> None:
        """Take in what other processes have recorded."""
        while not self._sealed and (data := os.pread(self.fd, _PIECE, self._at)):
            self._at += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                if line == _SEAL:
                    self._sealed = True
                    return
                try:
                    read = _decode(line)
                    again, *new = (0,) if isinstance(read, dict) else read
                except (ValueError, TypeError):  # void, or a line cut short for lack of memory
                    self._sealed = self._returned = True
                    self.void = line == _VOID
                    return
                self._again = 0 if new else self._again + again
                self._take_in(new)

    def _take_in(self, new: list[Any]) -> None:
        """Take in what samples were recorded to read: (sample, item, ...) of each."""
        if not self.joint:
            unknown = {one[0] for one in new if not self._known[one[0]]}
            self._known[list(unknown)] = True
            self._count += len(unknown)
            return
        for index, *items in new:
            if not 0 <= index < self._size:  # of a dataset of another length
                self._differ = True
            elif self._known[index]:
                self._compare(index, items)
            else:
                self._known[index] = True
                self._count += 1
                self._marks[index] = _marks(items)

    def _compare(self, index: int, items: list[Item | int]) -> None:
        """Note where a known sample is another one in the dataset of another rank."""
        if self.joint:
            marks = int(self._marks[index]), _marks(items)
            self._differ |= all(marks) and not marks[0] & marks[1]


def _drained(queue: deque[T]) -> Iterator[T]:
    while queue:
        yield queue.popleft()


def _unwritten(reads: list[Asked], observing: Observing, act: Callable[[], T]) -> T:
    """Call `act` and return its result; its reads are added to `reads`."""
    with observing() as observed:
        result = act()
    reads += observed.wanted()
    return result


def _batch(
    dataset: object, indices: Iterable[int], reads: BatchReads, observing: Observing
) -> list[Sample]:
    """`fetch_many` of a dataset that `by_sample` allows, recording the reads of each sample.

    Calls are made in torch's order: a StackDataset takes all samples of its first part before those
    of the second, and `Transformed` calls its function after all samples were taken.
    """
    if type(dataset) is Wrapped:
        return _batch(unwrap(dataset), indices, reads, observing)
    if unchanged(dataset, Subset):
        below: Iterable[int] = map(dataset.indices.__getitem__, indices)
        if hasattr(dataset.dataset, "__getitems__"):
            below = list(below)
        return _batch(dataset.dataset, below, reads, observing)
    if type(dataset) is Transformed:
        return [
            _unwritten(read, observing, lambda sample=sample: dataset.fn(sample))  # type: ignore[misc]  # bound
            for sample, read in zip(
                _batch(dataset.dataset, indices, reads, observing), reads, strict=True
            )
        ]
    if unchanged(dataset, StackDataset):
        parts = dataset.datasets
        if isinstance(parts, dict):
            columns = [_batch(part, indices, reads, observing) for part in parts.values()]
            return [dict(zip(parts, row, strict=True)) for row in zip(*columns, strict=True)]
        return list(zip(*(_batch(part, indices, reads, observing) for part in parts), strict=True))
    leaf: Dataset[Sample] = dataset  # type: ignore[assignment]  # anything else is one
    return [
        _unwritten(read, observing, lambda i=i: leaf[i])  # type: ignore[misc]  # bound
        for i, read in zip(indices, reads, strict=True)
    ]


def _address_of(item: Item) -> str:
    """That of a file; "" for an object of a creel dataset."""
    if isinstance(item, str):
        return item
    return item[0] if isinstance(item[0], str) else ""


def _items(noted: list[Any], versions: dict[str, int]) -> list[Item]:
    """What a sample was recorded to read; enters the versions of files in `versions`."""
    items: list[Item] = []
    for one in noted:
        if isinstance(one, int):
            enter_version(versions, _address_of(items[-1]), one)
        else:
            items.append(one)
    return items


def _look_again(versions: dict[str, int]) -> None:
    """Enter the versions of files that had changed a moment before they were read."""
    changing = [address for address, of in versions.items() if of == CHANGING][:_MAX_CHANGING]
    for pause in (0.0, _SETTLED_S):
        if changing:
            time.sleep(pause)
        for address in changing:
            versions[address] = version_at(address)
        changing = [address for address in changing if versions[address] == CHANGING]


def _marks(items: list[Item | int]) -> int:
    """A bit for each item, by its digest: where two have none in common, so have their items."""
    marks = 0
    for item in items:
        if isinstance(item, int):  # a version
            continue
        text = item if isinstance(item, str) else f"{item[0]} {item[1] if len(item) == 2 else ''}"
        marks |= 1 << xxhash.xxh32_intdigest(text.encode()) % 32
    return marks


def new_journal(suffix: str = "") -> int:
    """The descriptor of a journal. `suffix`: of the name of its memfd."""
    memory = os.memfd_create(f"{JOURNAL}{suffix}", os.MFD_CLOEXEC)
    # reopened: only open() makes O_APPEND atomic on every kernel
    journal = os.open(f"/proc/self/fd/{memory}", os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
    os.close(memory)
    return journal


def _is_utf8(address: str) -> bool:
    """Whether an address can be sent to the daemon: a file name may not be UTF-8."""
    try:
        return "\0" not in address and (address.isascii() or bool(address.encode()))
    except UnicodeEncodeError:
        return False


def recordable(dataset: Dataset[Sample]) -> bool:
    """Whether the reads of a dataset are known by sample, and not of too many."""
    serve_torchvision()  # its folders may be inside
    try:
        return by_sample(dataset) and len(dataset) <= _MAX_SAMPLES  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001  a user's __len__ may raise anything
        return False
