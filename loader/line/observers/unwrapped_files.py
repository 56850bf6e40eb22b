"""OwnFiles: notices that a loader waits for files that its dataset reads itself, past creel.

Nothing is asked while batches come in time. Once training has waited long, a thread (`watch`) looks
for a second or two at what the readers of the dataset wait for (`kernel_waits`). One line then
names a file, and what would keep training from waiting for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from creel.loader.client.cluster.ranks import speaks
from creel.loader.data.reading.bad_samples import printable
from creel.loader.line.observers.watch import watch
from creel.loader.making.batch_times import READING
from creel.loader.making.workers.kernel_waits import Reader

_log = logging.getLogger("creel.loader")

#: Warn once training has waited for this part of an epoch; the threshold is at most, and at least,
#: so many seconds.
_PART, _MOST_S, _LEAST_S = 0.1, 30.0, 1.0
_SAMPLES, _EVERY_S = 150, 0.01
#: After looks that found nothing, waits must have grown by this factor before the next ones.
_AGAIN = 2.0

_KEPT = "creel.kept(dataset, size) below the random transforms keeps its samples"
_WRAP = f"creel.wrap(dataset) caches what Python code, h5py or pyarrow opens; {_KEPT}"

_said: set[str] = set()


class AwaitedFile(NamedTuple):
    """A file that readers waited for; `batches`: while they made these."""

    path: str
    mapped: bool
    batches: frozenset[int]


class ThreadSamples:
    """Looks at some readers, `_SAMPLES` times.

    Attributes:
        over: whether all looks are done.
        file: one that was waited for; None: none was seen.
    """

    def __init__(self, readers: Sequence[Reader], serves: Callable[[str], bool]) -> None:
        """`serves`: whether creel serves a file, so that it needs no word."""
        self.over, self.next_at = False, 0.0
        self.file: AwaitedFile | None = None
        self._readers, self._serves = readers, serves
        self._seen: dict[str, set[int]] = {}
        self._mapped: set[str] = set()
        self._looks = self._looked = self._waits = 0
        watch.add(self)

    @property
    def share(self) -> float:
        """The share of looks at readers amid a batch that found them waiting for storage."""
        return self._waits / max(self._looked, 1)

    def poll(self) -> None:
        self.next_at = time.monotonic() + _EVERY_S
        for reader in self._readers:
            stage, batch = reader.stage()
            if stage == READING:
                self._sample(reader, batch)
        self._looks += 1
        if self._looks >= _SAMPLES:
            self.end()

    def end(self) -> None:
        """Look no more, and say which file was waited for."""
        # The file of most batches: a container that many samples read, if there is one.
        for path, batches in sorted(self._seen.items(), key=lambda e: (-len(e[1]), not e[0])):
            if not path or not self._serves(path):
                self.file = AwaitedFile(path, bool({path, ""} & self._mapped), frozenset(batches))
                break
        self.over = True

    def _sample(self, reader: Reader, batch: int) -> None:
        wait = reader.waits()
        self._looked += 1
        if wait.storage:
            self._waits += 1
        if (wait.path or wait.mapped) and reader.stage()[1] == batch:
            self._seen.setdefault(wait.path, set()).add(batch)
            if wait.mapped:  # it is opened first, which can take as long as a page of it
                self._mapped.add(wait.path)


class OwnFiles:
    """What is known of the files that one loader's dataset reads itself.

    Attributes:
        path: one that training waited for; "" if none is known.
        remedy: what would help.
    """

    def __init__(self) -> None:
        self.path = self.remedy = ""
        self._unserved = self._wrapped = False
        self._serves: Callable[[str], bool] = _serves_none
        self._batches = 0
        self._began = self._waited = self._next = 0.0
        self._looks: ThreadSamples | None = None

    def epoch_begins(
        self,
        *,
        unserved: bool,
        batches: int,
        waited_s: float,
        wrapped: bool = False,
        serves: Callable[[str], bool] | None = None,
    ) -> None:
        """Begin an epoch.

        Args:
            unserved: whether samples may read files that creel does not serve.
            batches: of the epoch; 0 if unknown.
            waited_s: what training has waited for samples so far.
            wrapped: whether `creel.wrap` has been tried.
            serves: whether creel serves a file; None: it serves none.
        """
        self._unserved, self._batches = unserved and not self.path, batches
        self._wrapped, self._serves = wrapped, serves or _serves_none
        self._began, self._waited = time.monotonic(), waited_s
        self._next = 0.0

    def delivered(self, batches: int, waited_s: float, readers: Sequence[Reader]) -> None:
        """Look at the readers if training has waited long; called a few times a second.

        Args:
            batches: delivered in this epoch.
            waited_s: as above.
        """
        if not self._unserved:
            return
        waited, looks = waited_s - self._waited, self._looks
        if looks is None:
            if waited >= max(self._long_s(batches), self._next):
                self._looks = ThreadSamples(readers, self._serves)
        elif looks.over:
            self._looks, self._next = None, _AGAIN * waited
            if looks.file is not None and looks.share * waited >= self._long_s(batches):
                self._tell(looks.file)

    def ends(self) -> None:
        """End the looks with the readers."""
        if self._looks is not None:
            self._looks.end()

    def _long_s(self, batches: int) -> float:
        """Return how many seconds of waiting in this epoch are long."""
        if not batches or not self._batches:
            return _MOST_S
        epoch_s = (time.monotonic() - self._began) * self._batches / batches
        return max(min(_PART * epoch_s, _MOST_S), _LEAST_S)

    def _tell(self, file: AwaitedFile) -> None:
        self.path, self._unserved = printable(file.path) or "a file mapped into memory", False
        reason, self.remedy = _reason(file), _KEPT
        if self._wrapped:
            text = f"creel.wrap cannot serve {self.path}: {reason}; {_KEPT}"
        elif file.mapped:
            text = f"this dataset reads {self.path} itself, and {reason}; {_KEPT}"
        else:
            self.remedy = _WRAP
            text = f"this dataset opens files itself ({self.path}): {_WRAP}"
        kind = text.replace(self.path, "")
        if kind not in _said and speaks():  # the others have the same dataset
            _said.add(kind)
            _log.warning("training waits for storage: %s", text)


def _serves_none(_: str) -> bool:
    return False


def _reason(file: AwaitedFile) -> str:
    """Return why `creel.wrap` does not serve a file."""
    if file.mapped:
        return "it is mapped into memory: a method ranges(index) can say what is read, and when"
    if len(file.batches) > 1:
        return "a library in C, C++ or Rust reads it, or it was open before the first sample"
    return "a library in C, C++ or Rust opens it, or a thread"
