"""AccessRecorder: records what an undeclared dataset reads during its first epoch.

Below creel.wrap, a user's `__getitem__` reads through creel.open, creel.read or a creel dataset
that it holds. These reads are recorded, one record per batch, in a journal: a memfd shared by the
trainer, its workers and the ranks of a node (`recording`). Once enough samples have been read
twice, or the journal is too long, a process seals it. The records before the seal are the trace,
the same in all processes. Reads of untraced samples, and reads that differ from the trace, are
direct.

If two ranks share a journal, and read entirely different items as the same sample, their datasets
differ. The journal is then void for all ranks.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from torch.utils.data import Dataset, StackDataset, Subset

from creel.cache.storage.version import UNKNOWN
from creel.errors import MalformedError
from creel.loader.data.binding.adapters import serve_torchvision
from creel.loader.data.binding.tree import unchanged
from creel.loader.data.binding.wrapped import AS_IT_IS, Wrapping, is_wrapped, unwrap
from creel.loader.data.datasets.base import Transformed, fetch_many, position
from creel.loader.data.interception.intercept import replace_imported
from creel.loader.data.page_cache import remote
from creel.loader.data.reading.this_thread import Asked
from creel.loader.data.tracing.journal import (
    ALL,
    BETWEEN,
    NUMBER,
    PART,
    EndOfTrace,
    Item,
    JournalPlace,
    ListedFiles,
    NoTrace,
    Reads,
    Record,
    RecordedReads,
    TraceJournal,
    joined,
    own_place,
    record_of,
)
from creel.loader.data.tracing.lists.file_lists import solved
from creel.loader.data.tracing.lists.hypothesis import LEAST, Hypothesis
from creel.loader.data.tracing.observed import FoundVersions, ObservedReads
from creel.loader.data.tracing.trace import AccessTrace, by_sample, parts_of
from creel.system.forks import reset_in_child

if TYPE_CHECKING:
    from creel.loader.data.datasets.base import Sample

T = TypeVar("T")
#: The reads of each sample of a batch.
BatchReads = list[list[Asked]]

#: The first epoch is over when no sample was new for 1/16 of the number recorded.
_END_SHARE = 16
#: Larger datasets must declare their objects.
MAX_SAMPLES = 10_000_000
#: Recording ends at this many bytes of journal. A sample that reads one file takes some 110.
MAX_JOURNAL_NBYTES = 1 << 29


class AccessRecorder:
    """Records the reads of one dataset; thread-safe, and shared with forked workers."""

    def __init__(
        self,
        dataset: Dataset[Sample],
        place: JournalPlace | None = None,
        wrapping: Wrapping = AS_IT_IS,
        *,
        seals: bool = True,
    ) -> None:
        """Begin to record.

        Args:
            place: the journal of another process; None for a new one.
            wrapping: what `creel.wrap` was asked for.
            seals: whether recording ends when this journal has enough.
        """
        self.place = own_place() if place is None else place
        #: Whose reads are recorded.
        self.dataset = dataset
        self._seals = seals
        self._wrapping = wrapping
        self._size = len(dataset)  # type: ignore[arg-type]  # the caller handles a TypeError
        #: The datasets in it that have numbers of their own.
        self._parts = parts_of(dataset)
        #: By id of a part: its place in `_parts`.
        self._number = {id(part): i for i, part in enumerate(self._parts)}
        #: What its lists say of files that no sample has read yet.
        self._supposed: Hypothesis | None = None
        self.reset_for_process()
        reset_in_child(self)

    def reset_for_process(self) -> None:
        """Create the state that belongs to one process."""
        self._lock = threading.Lock()
        self._observed: deque[tuple[int, list[Asked]]] = deque()  # since the last `write`
        self._versions = FoundVersions()  # of local files read since the last `write`
        self._journal = TraceJournal(self.place)
        self._known = np.zeros(self._size, np.bool_)  # (samples,) those that were recorded
        #: In a joint journal, `RecordedReads.marks` of each known sample.
        self._marks = np.zeros(self._size if self.place.joint else 0, np.uint32)
        self._count = 0  # known samples
        self._again = 0  # known samples read since the last new one
        self._differ = False  # whether ranks read different items as the same sample
        #: Whether recording is over; whether `trace` has returned its result.
        self._sealed = self._returned = False
        self._first: list[Reads] = []  # of `LEAST` samples
        self._listed: ListedFiles | None = None
        self._solves = True  # whether the first samples are still to be looked at
        self._far: bool | None = None  # whether they read network storage; None: not known yet
        #: Whether the ranks that share the journal have different datasets.
        self.void = False

    @property
    def over(self) -> bool:
        """Whether this process knows that recording has ended."""
        return self._sealed

    def suppose(self, hypothesis: Hypothesis | None) -> None:
        """Prove or refute a hypothesis by all samples that are recorded, from now on."""
        with self._lock:
            self._supposed = hypothesis
            if hypothesis is not None:
                hypothesis.judge(joined(self._trace_records()))

    def listed_files(self) -> ListedFiles | None:
        """Return the files that a process thinks all samples read; None: none does."""
        with self._lock:
            self._catch_up()
            return self._listed

    def _observing(self) -> ObservedReads:
        """Return a record for the samples of one thread."""
        whole, options = self._wrapping
        return ObservedReads(whole, options, versions=self._versions)

    def __getitem__(self, index: int) -> Sample:
        """Read a sample of the dataset, and keep its reads for `write`."""
        if self._sealed:
            return self.dataset[index]
        return self._each([index])[0]

    def _each(self, indices: Iterable[int]) -> list[Sample]:
        samples = []
        with self._observing() as observed:
            for index in indices:
                replace_imported()  # the last sample may have imported a library to read with
                samples.append(self.dataset[index])
                self._observed.append((index, observed.end_sample()))
        return samples

    def __getitems__(self, indices: Sequence[int]) -> Iterable[Sample]:
        """Read a batch's samples in torch's order of calls, which determines random numbers."""
        if self._sealed:
            return fetch_many(self.dataset, indices)
        if not hasattr(self.dataset, "__getitems__"):
            return self._each(indices)
        reads: BatchReads = [[] for _ in indices]
        with self._observing() as observed:
            samples = _batch(self.dataset, indices, reads, observed)
        self._observed += zip(indices, reads, strict=True)
        return samples

    def _items(self, reads: list[Asked]) -> list[tuple[Item, int]]:
        """Return the items that a sample read; each file has its version once per batch."""
        items = (self._item(read) for read in dict.fromkeys(reads))
        return [(item, self._version(item)) for item in items if item is not None]

    def _version(self, item: Item) -> int:
        """Return a file's version for its first item since the last `write`, else UNKNOWN."""
        address = item if isinstance(item, str) else item[0]
        return self._versions.take(address) if isinstance(address, str) else UNKNOWN

    def trace(self) -> AccessTrace | None:
        """Return the complete trace, once; None while recording, or if nothing was read."""
        with self._lock:
            self._catch_up()
            if not self._sealed or self._returned:
                return None
            self._returned = True
            self.void |= self._differ
            if self.void:
                return None
        recorded = self._here(joined(self._trace_records()))
        options = self._wrapping.storage_options
        trace = AccessTrace(self._size, recorded, self._parts, options)
        return trace if trace.leaves else None

    def _here(self, recorded: RecordedReads) -> RecordedReads:
        """Drop objects of parts that only another rank's dataset has."""
        sizes = np.array([*(part.object_count for part in self._parts), 0])
        part, number = recorded.items[:, PART], recorded.items[:, NUMBER]
        return recorded.only(recorded.files | (number < sizes[np.minimum(part, len(sizes) - 1)]))

    def _item(self, read: Asked) -> Item | None:
        """Return a read as the journal stores it; None if the daemon cannot fetch it.

        The daemon cannot fetch an address that is not UTF-8, or an object of an unknown dataset.
        """
        if isinstance(read, str):
            return read if _is_utf8(read) else None
        if len(read) == 4:
            return read if _is_utf8(read[0]) else None
        part = self._number.get(read[0])
        return None if part is None else (part, read[1])

    def write(self, *, waits: bool = True) -> None:
        """Append the reads of a batch to the journal, and process those of other processes.

        waits: whether samples are known to wait for files. Else only files of network storage are
            looked for in lists: with others the page cache is as quick.
        """
        with self._lock:
            if self.place.joint:
                self._catch_up()  # to compare with the reads of other ranks
            noted = list(self._noted())
            new = [entry for entry in noted if not self._known[entry[0]]]
            again = len(noted) - len(new)
            if self.place.joint and again:
                self._compare(
                    joined([record_of([entry for entry in noted if self._known[entry[0]]])])
                )
            if (new or again) and not self._sealed:
                self._append(record_of(new, again))
            self._catch_up()
            self._solve(waits)
            if not self._sealed and self._seals and (self._differ or self._over()):
                self._append(NoTrace() if self._differ else EndOfTrace())

    def _noted(self) -> Iterator[tuple[int, list[tuple[Item, int]]]]:
        """Yield (sample, items) of all reads since the last `write`, also in other threads."""
        for index, reads in _drained(self._observed):
            items = self._items(reads)
            if isinstance(index, (int, np.integer)):
                with suppress(IndexError):  # a dataset may give more samples than its length
                    yield position(index, self._size), items

    def take_over(self, journal: TraceJournal) -> bool:
        """Append what was written to another journal since last time; return whether it was any."""
        with self._lock:
            records = [
                record for record in _sound(journal) if isinstance(record, (Reads, ListedFiles))
            ]
            for record in records:
                self._append(record)
        self.write()
        return bool(records)

    def give(self, journal: TraceJournal) -> None:
        """End another journal with the trace of this one, for workers that know only that."""
        journal.append(EndOfTrace(None if self.void else self._trace_records()))

    def _trace_records(self) -> list[Reads]:
        """Return the records of the trace."""
        reads: list[Reads] = []
        for record in _sound(TraceJournal(self.place)):
            if isinstance(record, EndOfTrace) and record.instead is not None:
                return record.instead
            if isinstance(record, Reads):
                reads.append(record)
            elif not isinstance(record, ListedFiles):
                break
        return reads

    def _solve(self, waits: bool) -> None:
        """Once the first samples are known, say which files all may read, unless it is known."""
        if not self._solves or self._listed is not None or self._count < LEAST:
            return
        if not waits and self._far is False:
            return
        read = joined(self._first)
        if not waits and self._far is None:
            self._far = any(map(remote, map(os.path.realpath, read.addresses[:1])))
            if not self._far:
                return
        self._solves = False
        if self._supposed is not None and self._supposed.exact(read)[:LEAST].all():
            return
        stops = read.counts.cumsum()[:LEAST].tolist()
        if not (read.files & (read.items[:, NUMBER] == ALL))[: stops[-1]].all():
            return
        starts = [0, *stops[:-1]]
        files = [read.addresses[a:b] for a, b in zip(starts, stops, strict=True)]
        file_list = solved(self.dataset, self._size, read.samples[:LEAST].tolist(), files)
        if file_list is not None:
            addresses = BETWEEN.join(file_list.addresses)
            if len(addresses) < MAX_JOURNAL_NBYTES // 2:
                self._append(ListedFiles(file_list.files, addresses))

    def drop(self) -> None:
        """Forget the reads since the last `write`."""
        self._observed.clear()
        self._versions.clear()

    def _append(self, record: Record) -> None:
        """Append a record. Without memory for all of it, recording ends without a trace."""
        if not self._journal.append(record):
            self._sealed = self._returned = True

    def _over(self) -> bool:
        """Whether the first epoch is over; reading a few samples often does not end it."""
        known, again, size = self._count, self._again, self._size
        if known == size or self._journal.nbytes >= MAX_JOURNAL_NBYTES:
            return True
        return again * _END_SHARE > known and max(2 * known, again) >= size

    def _catch_up(self) -> None:
        """Process the records of other processes."""
        if self._sealed:
            return
        try:
            for record in self._journal.new():
                if isinstance(record, ListedFiles):
                    self._listed = self._listed or record
                    continue
                if not isinstance(record, Reads):
                    self._sealed = True
                    self.void = self._returned = isinstance(record, NoTrace)
                    return
                self._take_in(record)
        except MalformedError:  # of a rank with another version of creel
            self._sealed = self._returned = True

    def _take_in(self, read: Reads) -> None:
        """Add recorded samples to the known ones."""
        samples = np.frombuffer(read.samples, "<i8")
        if not len(samples):
            self._again += read.again
            return
        self._again = 0
        if self._count < LEAST:
            self._first.append(read)
        if self._supposed is not None:
            self._supposed.judge(joined([read]))
        if self.place.joint:
            self._compare(joined([read]))
        samples = samples[samples < self._size]
        new = np.unique(samples[~self._known[samples]])
        self._known[new] = True
        self._count += len(new)

    def _compare(self, read: RecordedReads) -> None:
        """Compare the items of known samples, and set `_differ` if the ranks' datasets differ."""
        samples, marks, here = read.samples, read.marks, read.samples < self._size
        self._differ |= not here.all()  # another rank's dataset is longer
        samples, marks = samples[here], marks[here]
        before = self._marks[samples]
        self._differ |= bool(((before > 0) & (marks > 0) & (before & marks == 0)).any())
        new = ~self._known[samples]
        self._marks[samples[new]] = marks[new]


def _sound(journal: TraceJournal) -> Iterator[Record]:
    """Yield the new records before the first of another version of creel."""
    with suppress(MalformedError):
        yield from journal.new()


def _drained(queue: deque[T]) -> Iterator[T]:
    while queue:
        yield queue.popleft()


def _unwritten(reads: list[Asked], observed: ObservedReads, act: Callable[[], T]) -> T:
    """Call `act`, add its reads to `reads`, and return its result."""
    observed.end_sample()  # drops reads made between two samples
    replace_imported()
    result = act()
    reads += observed.end_sample()
    return result


def _batch(
    dataset: object, indices: Iterable[int], reads: BatchReads, observed: ObservedReads
) -> list[Sample]:
    """`fetch_many` of a dataset that `by_sample` allows, recording the reads of each sample.

    Calls are made in torch's order: a StackDataset takes all samples of its first part before those
    of the second, and `Transformed` calls its function after all samples were taken.
    """
    if is_wrapped(dataset):
        return _batch(unwrap(dataset), indices, reads, observed)
    if unchanged(dataset, Subset):
        below: Iterable[int] = map(dataset.indices.__getitem__, indices)
        if hasattr(dataset.dataset, "__getitems__"):
            below = list(below)
        return _batch(dataset.dataset, below, reads, observed)
    if type(dataset) is Transformed:
        return [
            _unwritten(read, observed, lambda sample=sample: dataset.fn(sample))  # type: ignore[misc]  # bound
            for sample, read in zip(
                _batch(dataset.dataset, indices, reads, observed), reads, strict=True
            )
        ]
    if unchanged(dataset, StackDataset):
        parts = dataset.datasets
        if isinstance(parts, dict):
            columns = [_batch(part, indices, reads, observed) for part in parts.values()]
            return [dict(zip(parts, row, strict=True)) for row in zip(*columns, strict=True)]
        return list(zip(*(_batch(part, indices, reads, observed) for part in parts), strict=True))
    leaf: Dataset[Sample] = dataset  # type: ignore[assignment]  # all others are leaves
    return [
        _unwritten(read, observed, lambda i=i: leaf[i])  # type: ignore[misc]  # bound
        for i, read in zip(indices, reads, strict=True)
    ]


def _is_utf8(address: str) -> bool:
    """Whether an address can be sent to the daemon: file names need not be UTF-8."""
    try:
        return "\0" not in address and (address.isascii() or bool(address.encode()))
    except UnicodeEncodeError:
        return False


def recordable(dataset: Dataset[Sample]) -> bool:
    """Whether the reads of each sample can be told apart, and the samples are not too many."""
    serve_torchvision()  # torchvision's folders may be inside
    try:
        return by_sample(dataset) and len(dataset) <= MAX_SAMPLES  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001  a user's __len__ may raise anything
        return False
