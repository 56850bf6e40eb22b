"""DiskStore: objects on local disk, which survive a restart, however the daemon ended.

Methods do not raise errors of the disk. An object that cannot be written is not stored. A damaged
object counts as missing. After an I/O error the disk tier is switched off (`nbytes` 0).

The index takes 6 bytes per object of a dataset in use (`attach`). Records of other datasets stay on
disk until their room is needed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from creel.cache.disk.folder import DataFile, mark_leaving, open_folder
from creel.cache.disk.index import MANY_UNITS, DatasetIndex, entries_of, half, runs_of
from creel.cache.disk.journal import ENTRY, Entries, Journal, intact
from creel.cache.disk.pieces import AlignedScratch, PieceWriter
from creel.cache.disk.records import (
    HEADER_NBYTES,
    Identity,
    Verifier,
    alignment,
    dataset_id,
    header,
    room_nbytes,
)
from creel.cache.memory.buffers import Part, copy_over, cut
from creel.cache.memory.pools.free_ranges import NOWHERE, FreeRanges, must
from creel.policies.arrays import Ints, Mask

log = logging.getLogger("creel.disk")

#: Most runs of a record, each of which is a read of its own; nearly all records have few.
_MAX_RUNS = 1024


class DiskStore:
    """The records in one folder. All methods may be called from any thread.

    Args:
        path: an existing folder on local disk; the store creates its own folder in it.
        budget: largest size, in bytes.
        keep_free: bytes that the store leaves free on the file system.

    Raises:
        OSError: the folder cannot be used.
    """

    def __init__(self, path: str, budget: int, keep_free: int) -> None:
        self._lock = threading.RLock()  # guards the index; not held during reads and writes
        #: Of whoever writes records.
        self._writing = threading.Lock()
        #: Aligned memory for reads past the page cache.
        self._scratch = AlignedScratch()
        #: Indexes of datasets in use.
        self._datasets: dict[str, DatasetIndex] = {}
        #: Whether the tier is switched off.
        self._off = False
        self.failure = ""  # why it is switched off, if the disk has failed
        with contextlib.ExitStack() as stack:
            #: Descriptor of the folder, which is locked.
            self._folder = open_folder(path)
            stack.callback(os.close, self._folder)
            #: All records.
            self._file = DataFile(self._folder, budget, keep_free)
            stack.callback(self._file.close)
            #: Bytes of which records take multiples.
            self.unit = self._file.unit
            #: Where each record is.
            self._journal = Journal(self._folder, self.unit)
            stack.callback(self._journal.close)
            self._load()
            #: Closes the three above.
            self._closing = stack.pop_all()

    # --- index -----------------------------------------------------------------------------------

    def _load(self) -> None:
        entries = self._journal.load()
        self._serial = int(entries["serial"].max(initial=0))  # of the latest entry
        entries = intact(entries, self._file.nbytes // self.unit)
        #: Runs of datasets that are not attached, by the first half of their identity.
        self._idle: dict[int, Entries] = {}
        names = np.unique(entries["dataset"])
        parts = [entries[entries["dataset"] == name] for name in names]
        # The dataset that was written to last comes last.
        for part in sorted(parts, key=lambda part: int(part["serial"].max())):
            self._idle[int(part["dataset"][0])] = part
        self._free = FreeRanges(0)
        self._grown(0, self._file.nbytes // self.unit, entries)
        if self._journal.too_long(len(entries)):
            self._rewrite()

    def _grown(self, start: int, end: int, held: Entries) -> None:
        """Free all units in [start, end) that do not belong to these entries."""
        held = held[held["start"].argsort()]
        gaps = np.append(start, held["start"].astype(np.int64) + held["units"])
        stops = np.append(held["start"].astype(np.int64), end)
        some = stops > gaps
        for a, b in zip(gaps[some].tolist(), stops[some].tolist(), strict=True):
            self._free.put(a, b - a)

    @property
    def nbytes(self) -> int:
        """Bytes that all records may take, given the file system's free room; 0: switched off."""
        return 0 if self._off else self._file.limit

    def attach(self, dataset: str, objects: int) -> tuple[NDArray[np.int32], Ints]:
        """Start to use a dataset; return (k,) its objects on disk and (k,) their sizes.

        Returns no objects if the dataset is in use already.
        """
        if dataset in self._datasets:
            return np.empty(0, np.int32), np.empty(0, np.int64)
        identity = dataset_id(dataset)
        index = DatasetIndex(identity, np.zeros(objects, np.int32), np.zeros(objects, np.uint16))
        with self._lock:
            entries = self._idle.pop(half(identity), np.empty(0, ENTRY))
            outside = entries["object"] >= objects
            self._release(entries[outside])
            entries = entries[~outside]
            entries = entries[entries["object"].argsort(kind="stable")]
            first = np.flatnonzero(np.append(True, np.diff(entries["object"]) != 0)[: len(entries)])
            single = np.diff(np.append(first, len(entries))) == 1
            single &= entries["units"][first] < MANY_UNITS
            single_entries = entries[first[single]]
            index.place[single_entries["object"]] = single_entries["start"].astype(np.int64) + 1
            index.units[single_entries["object"]] = single_entries["units"]
            ends = np.append(first[1:], len(entries))
            for a, b in zip(first[~single].tolist(), ends[~single].tolist(), strict=True):
                index.put(int(entries["object"][a]), runs_of(entries[a:b]))
            self._datasets[dataset] = index
        return entries["object"][first].astype(np.int32), entries["nbytes"][first].copy()

    def detach(self, dataset: str, length: Ints) -> None:
        """Stop using a dataset, after writes in progress; records stay until their room is needed.

        length: (n,) bytes of each object; only those of objects on disk are used.
        """
        with self._writing, self._lock:
            index = self._datasets.pop(dataset, None)
            if index is not None:
                self._idle[half(index.identity)] = entries_of(index, length)

    # --- reading ---------------------------------------------------------------------------------

    def read(
        self, dataset: str, object_id: int, nbytes: int, parts: Part
    ) -> tuple[int, int] | None:
        """Fill `parts`, of `nbytes` together, with an object; return (nbytes, version) or None.

        None means that the object is missing, or was damaged and has been removed; the contents of
        `parts` are undefined then.
        """
        with self._lock:
            index = self._datasets.get(dataset)
            runs = None if index is None or self._off else index.runs(object_id)
        if index is None or runs is None:
            return None
        try:
            identity = self._read(runs * self.unit, nbytes, parts)
        except OSError as e:
            self._give_up("read", e)
            return None
        if identity is not None and identity[:3] == (index.identity, object_id, nbytes):
            return nbytes, identity.version
        with self._lock:
            now = index.runs(object_id)
            if now is not None and np.array_equal(now, runs):  # not written again meanwhile
                self._drop(index, object_id)
        return None

    def _read(self, ranges: Ints, nbytes: int, parts: Part) -> Identity | None:
        """Read a record from (r, 2) offsets and sizes; return its identity, None if damaged."""
        piece = self._scratch.view
        verifier: Verifier | None = None
        left, done = list(parts), 0
        for start, size in ranges.tolist():
            for at in range(start, start + size, len(piece)):
                data = piece[: min(start + size - at, len(piece))]
                if self._file.read(data, at) < len(data):
                    return None
                if verifier is None:
                    verifier, data = Verifier(data), data[HEADER_NBYTES:]
                    if verifier.identity is None or verifier.identity.nbytes != nbytes:
                        return None
                data = data[: nbytes - done]
                verifier.update(data)
                filled, left = cut(left, len(data))
                copy_over(data, filled)
                done += len(data)
        if verifier is None or done < nbytes or not verifier.matches():
            return None
        return verifier.identity

    # --- writing ---------------------------------------------------------------------------------

    def write(
        self, dataset: str, ids: NDArray[np.integer], objects: Sequence[Part], versions: Ints
    ) -> tuple[Mask, bool]:
        """Store objects; `objects[i]` has version versions[i] and must not change meanwhile.

        To make room, records of datasets that are not attached are removed, and earlier records of
        these objects; all other records stay.

        Returns:
            (k,) whether each object is stored; whether there was no room for some.
        """
        stored = np.zeros(len(ids), np.bool_)
        with self._writing:
            index = self._datasets.get(dataset)
            if index is None or self._off:
                return stored, False
            nbytes = np.array([sum(map(len, parts)) for parts in objects], np.int64)
            rooms = self._take_rooms(index, ids, nbytes)
            try:
                self._write(index, ids, objects, nbytes, versions, rooms)
            except OSError as e:
                self._give_up("write", e)
                return stored, False
            with self._lock:
                for i, runs in rooms.items():
                    index.put(int(ids[i]), runs)
                    stored[i] = True
        return stored, len(rooms) < len(ids) and not self._off

    def _take_rooms(
        self, index: DatasetIndex, ids: NDArray[np.integer], nbytes: Ints
    ) -> dict[int, Ints]:
        """Allocate rooms for new records; return (r, 2) first unit and units by position."""
        out = {}
        units = room_nbytes(nbytes, self.unit) // self.unit
        align = alignment(nbytes + HEADER_NBYTES, self.unit) // self.unit
        with self._lock:
            for i, wanted in enumerate(zip(units.tolist(), align.tolist(), strict=True)):
                self._drop(index, int(ids[i]))
                runs = self._alloc(*wanted)
                if runs is not None:
                    out[i] = runs
        return out

    def _alloc(self, units: int, align: int) -> Ints | None:
        """Allocate room for a record, in one run if possible; return None without room."""
        while True:
            at = self._free.take(units, align)
            if at != NOWHERE:
                return np.array([[at, units]])
            if not self._grow():
                break
        while self._free.nbytes < units and self._idle:
            self._release(self._idle.pop(next(iter(self._idle))))
        runs = self._alloc_runs(units, align)
        if runs is None and align > 1:  # the free ranges are small
            runs = self._alloc_runs(units, 1)
        return runs

    def _alloc_runs(self, units: int, align: int) -> Ints | None:
        runs: list[tuple[int, int]] = []
        while units > 0 and len(runs) < _MAX_RUNS:
            at, got = self._free.take_most(units, align)
            if not got:
                break
            runs.append((at, got))
            units -= got
        if units:
            for at, got in runs:
                self._free.put(at, got)
            return None
        return np.array(sorted(runs))  # in the order in which the index returns them

    def _grow(self) -> bool:
        before = self._file.nbytes // self.unit
        try:
            more = self._file.grow() // self.unit
        except OSError as e:
            self._give_up("grow", e)
            return False
        if more:
            self._free.put(before, more)
        return more > 0

    def _write(
        self,
        index: DatasetIndex,
        ids: NDArray[np.integer],
        objects: Sequence[Part],
        nbytes: Ints,
        versions: Ints,
        rooms: dict[int, Ints],
    ) -> None:
        """Write records to their rooms, and after that their journal entries."""
        out = PieceWriter(self._file, self._scratch.view)
        entries = []
        for i, runs in rooms.items():
            identity = Identity(index.identity, int(ids[i]), int(nbytes[i]), int(versions[i]))
            out.record([header(identity, objects[i]), *objects[i]], runs * self.unit)
            self._serial += 1
            entries.append(self._entry(identity, self._serial, runs))
        out.flush()
        if entries:
            self._journal.append(np.concatenate(entries))
            self._tidy()

    def _entry(self, identity: Identity, serial: int, runs: Ints) -> Entries:
        entries = np.empty(len(runs), ENTRY)
        entries["dataset"], entries["object"] = half(identity.dataset), identity.object
        entries["nbytes"], entries["serial"] = identity.nbytes, serial
        entries["start"], entries["units"] = runs.T
        entries["room"] = runs[:, 1].sum()
        return entries

    # --- removal ---------------------------------------------------------------------------------

    def drop(self, dataset: str, ids: NDArray[np.integer]) -> None:
        """Remove objects and free their rooms; until these are reused, a restart may find them."""
        with self._lock:
            index = self._datasets.get(dataset)
            if index is not None:
                for object_id in ids.tolist():
                    self._drop(index, object_id)

    def remove(self, dataset: str) -> None:
        """Remove all objects of an attached dataset permanently, also from the journal."""
        with self._writing, self._lock:
            index = self._datasets.get(dataset)
            if index is None or self._off:
                return
            for object_id in np.flatnonzero(index.place).tolist():
                self._drop(index, object_id)
            try:
                self._rewrite()
            except OSError as e:
                self._give_up("write", e)

    def _drop(self, index: DatasetIndex, object_id: int) -> None:
        runs = index.pop(object_id)
        if runs is not None:
            for start, units in runs.tolist():
                self._free.put(start, units)

    def _release(self, entries: Entries) -> None:
        for start, units in zip(entries["start"].tolist(), entries["units"].tolist(), strict=True):
            self._free.put(start, units)

    def _tidy(self) -> None:
        """Rewrite the journal if most of its entries are obsolete."""
        with self._lock:
            idle = sum(map(len, self._idle.values()))
            live = idle + sum(
                int(np.count_nonzero(x.place)) + 4 * len(x.chains) for x in self._datasets.values()
            )
        if self._journal.too_long(live):
            self._rewrite()

    def _rewrite(self) -> None:
        """Rewrite the journal without obsolete entries; only in the thread that writes records."""
        entries = intact(self._journal.load(), self._file.nbytes // self.unit)
        with self._lock:
            here = np.zeros(len(entries), np.bool_)
            for name, idle in self._idle.items():
                here |= (entries["dataset"] == name) & np.isin(entries["object"], idle["object"])
            for index in self._datasets.values():
                own = np.flatnonzero(entries["dataset"] == half(index.identity))
                here[own] = index.place[entries["object"][own]] != 0
        entries = entries[here]
        self._journal.rewrite(entries[entries["serial"].argsort(kind="stable")])

    # --- the end ---------------------------------------------------------------------------------

    def _give_up(self, action: str, error: OSError) -> None:
        with self._lock:
            if self._off:
                return
            self._off = True
            self.failure = f"the disk cannot {action} ({error})"
        log.warning("the disk tier is switched off: %s", self.failure)

    def leave(self) -> None:
        """Announce that `close` will release the folder: another daemon waits up to `LEAVING_S`."""
        with contextlib.suppress(OSError):  # a daemon that starts too early then has no disk
            mark_leaving(self._folder)

    def close(self) -> None:
        """Close all files; another daemon may use the folder then."""
        with self._writing, self._lock:
            self._off = True
            self._closing.close()

    def check(self) -> None:
        """Raise IllegalEventError unless each unit has exactly one owner."""
        with self._lock:
            self._free.check()
            runs = [
                entries_of(x, np.zeros(len(x.place), np.int64)) for x in self._datasets.values()
            ]
            held = np.concatenate([np.empty(0, ENTRY), *self._idle.values(), *runs])
            start, size = self._free.sorted()
            start = np.append(held["start"].astype(np.int64), start)
            size = np.append(held["units"].astype(np.int64), size)
            order = start.argsort()
            end = np.append(0, (start + size)[order])
            must(np.array_equal(end[:-1], start[order]), "rooms overlap or leave a gap")
            must(end[-1] == self._file.nbytes // self.unit, "units are missing")
