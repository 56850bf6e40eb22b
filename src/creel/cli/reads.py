"""What a script reads from storage, and how long it waits for it, as the kernel says.

For `creel explain`: no code of the script's is changed, so any library's reads count. The script's
processes are looked at some hundred times a second (`kernel_waits`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import psutil

from creel.loader.line.observers.watch import watch
from creel.loader.making.batch_times import READING
from creel.loader.making.workers.kernel_waits import process

#: Seconds between two looks, and between two lists of the processes.
_EVERY_S, _TREE_S = 0.01, 0.25
#: A file is a container of many samples if this part of all waits is for it.
_CONTAINER = 0.2
#: Of databases, whose own code reads parts of a file.
_DATABASES = (".db", ".sqlite", ".sqlite3", ".mdb", ".lmdb", ".lance")
_RECORDS = (".npy", ".bin", ".dat", ".raw")


class OwnReads(NamedTuple):
    """What some processes read for samples while they were looked at.

    Attributes:
        share: for how much of the time one of them waited for storage, summed over them.
        asleep: for how much of it one waited for anything else.
        files: how many looks saw a wait for each file, by path and whether it is mapped.
        nbytes: read by system calls, or from disks by faults.
        seconds: how long they were looked at.
    """

    share: float
    asleep: float
    files: dict[tuple[str, bool], int]
    nbytes: int
    seconds: float

    @property
    def mapped(self) -> bool:
        """Whether most waits are for pages of mapped files."""
        waits: Counter[bool] = Counter()
        for (_, mapped), count in self.files.items():
            waits[mapped] += count
        return waits[True] > waits[False]

    @property
    def container(self) -> str:
        """The path of a file that many samples read; "" if there is none."""
        known = {path: count for (path, _), count in self.files.items() if path}
        most = max(known, key=lambda path: known[path], default="")
        return most if known and known[most] >= max(_CONTAINER * sum(known.values()), 3) else ""

    def line(self, *, ahead: bool) -> str:
        """Return what to write for the dataset, so that training waits less.

        ahead: whether mapped pages are read ahead as it is.
        """
        container = self.container
        if container.endswith(_DATABASES) or (ahead and self.mapped):
            return "creel.kept(dataset, size)"
        if container.endswith(_RECORDS):
            return "creel.RecordDataset(path, dtype, shape)"
        if self.mapped:
            return "a method ranges(index), or creel.kept(dataset, size)"
        return "creel.wrap(dataset)"


class _Process:
    """What is known of one process."""

    def __init__(self, pid: int) -> None:
        self.waits = self.asleep = 0
        self.files: Counter[tuple[str, bool]] = Counter()
        self.reader = process(pid, lambda: (READING, 0))
        self.first = self.last = _read_nbytes(pid)

    def poll(self) -> None:
        wait = self.reader.waits()
        if wait.storage:
            self.waits += 1
            self.files[wait.path, wait.mapped] += 1
        elif not self.reader.runs():
            self.asleep += 1


class ProcessSamples:
    """Looks at the processes of a script, between `begin` and `end`."""

    def __init__(self, roots: Sequence[int]) -> None:
        self._roots = roots
        self._known: dict[int, _Process] = {}
        self._parents: dict[int, int] = {}
        self._samples = 0
        self._began = self._looked = 0.0
        self.over, self.next_at = False, 0.0

    @property
    def seconds(self) -> float:
        """How long it has looked."""
        return self._looked - self._began

    def begin(self) -> None:
        """Begin to look, at the first call."""
        if not self._began:
            self._began = self._looked = time.monotonic()
            watch.add(self)

    def end(self) -> None:
        self.over = True

    def of(self, trainer: int, *, workers: bool) -> OwnReads:
        """Return what the workers of a trainer have read; without workers, what it has itself."""
        readers = [
            process
            for pid, process in list(self._known.items())
            if (self._is_below(pid, trainer) if workers else pid == trainer)
        ]
        files: Counter[tuple[str, bool]] = Counter()
        for reader in readers:
            files.update(reader.files)
        looks = max(self._samples, 1)
        return OwnReads(
            sum(reader.waits for reader in readers) / looks,
            sum(reader.asleep for reader in readers if reader.waits) / looks,
            dict(files),
            sum(reader.last - reader.first for reader in readers),
            self.seconds,
        )

    def _is_below(self, pid: int, trainer: int) -> bool:
        while pid in self._parents:
            pid = self._parents[pid]
            if pid == trainer:
                return True
        return False

    def poll(self) -> None:
        if self._samples % round(_TREE_S / _EVERY_S) == 0:
            self._list()
        self._samples += 1
        for known in self._known.values():
            known.poll()
        self._looked = time.monotonic()
        self.next_at = self._looked + _EVERY_S

    def _list(self) -> None:
        """Add the processes that the script has started since."""
        for root in self._roots:
            with suppress(psutil.Error):
                below = psutil.Process(root).children(recursive=True)
                self._parents |= {child.pid: child.ppid() for child in below if child.is_running()}
                for pid in {root, *self._parents} - self._known.keys():
                    self._known[pid] = _Process(pid)
        for pid, known in self._known.items():
            known.last = max(known.last, _read_nbytes(pid))


def _read_nbytes(pid: int) -> int:
    """Return the bytes that a process has read so far; 0 if we may not know."""
    with suppress(psutil.Error):
        count = psutil.Process(pid).io_counters()
        return max(int(count.read_chars), int(count.read_bytes))
    return 0
