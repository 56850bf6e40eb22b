"""OwnFiles: notices that a loader waits for files that its dataset opens itself, past creel.

Such files are cached only below `creel.wrap`. Nothing is asked while batches come in time. Once
training has waited long, a thread looks for a second or two at what the readers of the dataset are
doing: the kernel says which descriptor a thread that sleeps in a read is reading. Nothing of the
dataset is replaced, and no call of its costs more.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from creel.loader.cluster.ranks import speaks
from creel.loader.reading.bad_samples import printable
from creel.system.forks import join, pause_before_fork

_log = logging.getLogger("creel.loader")

#: Waits that are worth a word: a part of an epoch, so many seconds at most, and at least.
_PART, _MOST_S, _LEAST_S = 0.1, 30.0, 1.0
_LOOKS, _EVERY_S = 150, 0.01
#: After looks that found nothing, waits must have grown by this factor before the next ones.
_AGAIN = 2.0
#: Numbers of system calls whose first argument is a descriptor that they read: read, pread64,
#: readv, preadv.
_READS = {"x86_64": {0, 17, 19, 295}, "aarch64": {63, 67, 65, 69}}
#: Of those that wait for storage and name no descriptor that is read: open, openat, openat2, stat,
#: fstat, lstat, newfstatat, statx.
_OPENS = {"x86_64": {2, 257, 437, 4, 5, 6, 262, 332}, "aarch64": {56, 437, 79, 80, 291}}
_FAULT = -1  # a page of a mapped file
_OTHER = ("/dev/", "/proc/", "/sys/", "/memfd:")
_CODE = (".py", ".pyc", ".so")

_said: set[str] = set()


class Reader(NamedTuple):
    """Who reads samples.

    Attributes:
        pid: its process.
        threads: returns the numbers of its threads that may read samples.
        reads: whether it reads a batch at the moment.
    """

    pid: int
    threads: Callable[[], Sequence[int]]
    reads: Callable[[], bool]


def process(pid: int, reads: Callable[[], bool]) -> Reader:
    """Return the reader that is a whole process."""

    def threads() -> list[int]:
        with suppress(OSError):
            return [int(name) for name in os.listdir(f"/proc/{pid}/task")]  # noqa: PTH208
        return []

    return Reader(pid, threads, reads)


def this_thread(reads: Callable[[], bool]) -> Reader:
    """Return the reader that is the present thread."""
    threads = [threading.get_native_id()]
    return Reader(os.getpid(), lambda: threads, reads)


def awaited(pid: int, thread: int) -> tuple[bool, str]:
    """Return whether a thread waits for storage at the moment, and for which file.

    The file is "" where the kernel does not say: in an open, in a fault, without the right to look.
    """
    try:
        words = Path(f"/proc/{pid}/task/{thread}/syscall").read_text(encoding="ascii").split()
        if words[0] == "running":
            return False, ""
        call, machine = int(words[0]), platform.machine()
        if call in _READS.get(machine, ()):
            path = os.readlink(f"/proc/{pid}/fd/{int(words[1], 16)}")  # noqa: PTH115  may be no path
            is_file = path.startswith("/") and not path.startswith(_OTHER)
            return is_file, path if is_file and not path.endswith(_CODE) else ""
    except (OSError, ValueError, IndexError):  # it has ended, or we may not look
        return False, ""
    return call == _FAULT or call in _OPENS.get(machine, ()), ""


class Looks:
    """A thread that looks at some readers, until it was done `_LOOKS` times.

    Attributes:
        over: whether all looks are done.
        path: a file that was waited for; "": none was seen.
    """

    def __init__(self, readers: Sequence[Reader]) -> None:
        self.over, self.path = False, ""
        self._readers = readers
        self._looked = self._waits = 0
        self._stop = threading.Event()
        pause_before_fork(self)
        self._thread = threading.Thread(target=self._run, name="creel-looks", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no thread available
            self.over = True

    @property
    def share(self) -> float:
        """The share of looks at readers amid a batch that found them waiting for storage."""
        return self._waits / max(self._looked, 1)

    def pause(self) -> None:
        """End the looks; called before a fork."""
        self._stop.set()
        join(self._thread)

    def _run(self) -> None:
        for _ in range(_LOOKS):
            if self._stop.wait(_EVERY_S):
                break
            for reader in self._readers:
                if reader.reads():
                    self._look(reader)
        self.over = True

    def _look(self, reader: Reader) -> None:
        found = [awaited(reader.pid, thread) for thread in reader.threads()]
        self._looked += 1
        self._waits += any(waits for waits, _ in found)
        self.path = next((path for _, path in found if path), self.path)


class OwnFiles:
    """What is known of the files that one loader's dataset opens itself.

    Attributes:
        path: one that training waited for; "" if none is known.
    """

    def __init__(self) -> None:
        self.path = ""
        self._unseen = False
        self._batches = 0
        self._began = self._waited = self._next = 0.0
        self._looks: Looks | None = None

    def epoch_begins(self, *, unseen: bool, batches: int, waited_s: float) -> None:
        """Begin an epoch.

        Args:
            unseen: whether creel knows no object of the dataset.
            batches: of the epoch; 0 if unknown.
            waited_s: what training has waited for samples so far.
        """
        self._unseen, self._batches = unseen and not self.path, batches
        self._began, self._waited = time.monotonic(), waited_s
        self._next = 0.0

    def delivered(self, batches: int, waited_s: float, readers: Sequence[Reader]) -> None:
        """Look at the readers if training has waited long; called a few times a second.

        Args:
            batches: delivered in this epoch.
            waited_s: as above.
        """
        if not self._unseen:
            return
        waited, looks = waited_s - self._waited, self._looks
        if looks is None:
            if waited >= max(self._long_s(batches), self._next):
                self._looks = Looks(readers)
        elif looks.over:
            self._looks, self._next = None, _AGAIN * waited
            if looks.path and looks.share * waited >= self._long_s(batches):
                self._found(looks.path)

    def ends(self) -> None:
        """End the looks with the readers."""
        if self._looks is not None:
            self._looks.pause()

    def _long_s(self, batches: int) -> float:
        """Return how many seconds of waiting in this epoch are long."""
        if not batches or not self._batches:
            return _MOST_S
        epoch_s = (time.monotonic() - self._began) * self._batches / batches
        return max(min(_PART * epoch_s, _MOST_S), _LEAST_S)

    def _found(self, path: str) -> None:
        self.path, self._unseen = printable(path), False
        text = "this dataset opens files itself; creel.wrap(dataset) caches them"
        if text not in _said and speaks():  # the others have the same dataset
            _said.add(text)
            _log.warning("%s (training waits for %s)", text, self.path)
