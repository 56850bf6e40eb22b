"""ArrivalIter: deals the records of a log to the batches of one rank (see `batches`), and waits."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

from creel.errors import ConfigError, UnavailableError
from creel.loader.client.backoff import pauses
from creel.loader.extras.streams.reader_notes import ReaderNotes, known_needs
from creel.loader.extras.streams.replays import PLACES, SavedMemory, StreamReplays
from creel.loader.line.order.custom.orders import PacedIterator
from creel.streams.arrivals import Arrived
from creel.streams.cursors import Cursor
from creel.streams.log import ABSENT
from creel.streams.memories import Needed

if TYPE_CHECKING:
    from creel.loader.extras.streams.batches import StreamBatches

_log = logging.getLogger("creel.stream")

#: Seconds between looks for the next chunk; the longest is a hundredth of the wait for a step.
_FIRST_S, _LONGEST_S = 0.0005, 0.005
#: Seconds between listings of the folder in a wait, which NFS needs to see new names.
_LIST_S = 0.25
_WARN_S = 60.0
#: Batches that torch's own loader may ask for before it has read the first: `prefetch_factor` 2 for
#: 16 workers. It does not say which ones it has read.
_UNREAD = 32


class Place(NamedTuple):
    """A place in the order of a log: a window, its first record, and how much of it is dealt."""

    chunk: int
    record: int
    window: int
    used: int


class SavedPlace(TypedDict, total=False):
    """`StreamBatches.state_dict()`: where the next epoch begins, and in which stream."""

    rehearsal: SavedMemory
    stream: str
    shuffle: int
    seed: int
    place: list[int] | None  # None: at the beginning


class ArrivalIter(PacedIterator):
    """One epoch: the batches of a rank as they arrive.

    creel's loader says which batches training has (`delivered`). Under torch's own, the last
    `_UNREAD` that were pulled count as unread.
    """

    def __init__(self, sampler: StreamBatches) -> None:
        self._sampler, self._log = sampler, sampler.log
        self._arrived: Arrived | None = None  # None until the first batch is asked for
        self._left: NDArray[np.int64] = np.empty(0, np.int64)  # of the window, not dealt yet
        self._window = Place(0, 0, 0, 0)
        self._drop = 0  # positions of the next window that were dealt before this epoch
        self._index = 0  # of the next window
        self._rank, self._global_size, self._size = 0, 0, 0  # the last one: of a window
        self._batch = 0  # number of the next batch
        self._first_batch = 0  # of those that this iterator returns
        self._first_step = 0  # its number among all steps of the stream
        self._replays: StreamReplays | None = None
        self._places: dict[int, Place] = {}  # before each of the last batches, by its number
        self._notes: ReaderNotes | None = None  # once it has begun, of a reader with a name
        self.reports = False  # whether creel's loader says which batches training has

    # --- as PacedIterator -----------------------------------------------------------------------

    def __iter__(self) -> ArrivalIter:
        return self

    def __next__(self) -> list[int]:
        if not self.reports:
            self.delivered(self._batch - _UNREAD)
        if not self.arrived():
            self._wait()
        before = self._place()
        numbers = self._global_batch()
        if numbers is None:
            raise StopIteration
        self._batch += 1
        self._places[self._batch] = self._place()
        self._places.pop(self._batch - PLACES, None)
        b, rank = self._sampler.batch_size, self._rank
        own: list[int] = numbers[rank * b : (rank + 1) * b].tolist()
        if self._replays is None:
            return own
        return self._replays.joined(own, numbers, before.chunk)

    def arrived(self) -> bool:
        arrived = self._arrived or self._begin()
        if arrived.poll(self._wanted()):
            return True
        if self._notes is not None:
            self._notes.write()
        return False

    def begin_at(self, batch: int) -> None:
        self._batch = batch

    def state(self, batches: int) -> SavedPlace:
        if self._arrived is None and batches == self._batch:
            return self._sampler.state_dict()
        place = self._places.get(batches)
        if place is None:
            raise ConfigError(f"batch {batches} is not one of the last {PLACES} of this stream")
        memory = None if self._replays is None else self._replays.state(self._step(batches))
        return self._sampler.state(place, memory)

    def _step(self, batch: int) -> int:
        return self._first_step + batch - self._first_batch

    def delivered(self, batches: int) -> None:
        place = self._places.get(batches)
        if place is None:
            return
        if self._notes is not None:
            self._notes.keep(self._needed(batches))
            over = self._arrived is not None and self._arrived.ended
            self._notes.moved(place.chunk, place.record, at_once=over)
        elif (before := self._places.get(batches - 1)) and self._log.size(before.chunk) == ABSENT:
            Arrived(self._log, before.chunk, before.record).check()  # it may have had holes

    # --- windows and places ---------------------------------------------------------------------

    def _begin(self) -> Arrived:
        """Begin the epoch: note that this reader holds back the producers."""
        self._rank, world = self._sampler.share.ranks()  # first: it may raise
        start, memory = self._sampler.start()
        self._arrived = Arrived(self._log, start.chunk, start.record)
        self._arrived.check()  # first: a reader that cannot go on must not hold back producers
        self._global_size = self._sampler.batch_size * world
        self._size = self._sampler.shuffle or self._global_size
        self._index, self._drop = start.window, start.used
        self._places[self._batch] = start
        needed = self._global_size * (1 if self.reports else 1 + _UNREAD)
        if self._sampler.shuffle:  # whole windows, from the beginning of the one it is in
            needed = -(-(self._size - 1 + needed) // self._size) * self._size
        if self._sampler.content is not None:
            content = self._sampler.content
            self._replays = StreamReplays(content, self._rank, world, start.chunk, memory)
            self._first_batch, self._first_step = self._batch, self._replays.step
            self._replays.check(self._log, known_needs(self._log.medium, self._sampler.name or ""))
        if self._sampler.name is not None:
            cursor = Cursor(start.chunk, start.record, needed * self._log.nbytes, world)
            self._notes = ReaderNotes(self._log, self._sampler.name, self._rank, cursor)
            self._notes.begin(self._needed(self._batch))
        return self._arrived

    def _needed(self, batch: int) -> Needed | None:
        """Return what the memory needs once training has the batches below one; None if as before.

        There is no memory, or it needs the same.
        """
        if self._replays is None:
            return None
        steps = self._log.about.keep // (self._global_size * self._log.nbytes) + 1
        return self._replays.needed(self._step(batch), steps)

    def _wanted(self) -> int:
        """Return how many records must be known for the next batch: whole windows."""
        lacking = self._global_size + self._drop - len(self._left)
        return -(-lacking // self._size) * self._size

    def _global_batch(self) -> NDArray[np.int64] | None:
        """Return the numbers of the next global batch, None at the end of the epoch."""
        assert self._arrived is not None  # noqa: S101  see `arrived`
        parts, lacking = [self._left[: self._global_size]], self._global_size
        lacking -= len(parts[0])
        self._left = self._left[self._global_size :]
        while lacking:
            if not self._arrived.count:
                return self._incomplete(np.concatenate(parts))
            self._open_window()
            parts.append(self._left[:lacking])
            self._left = self._left[lacking:]
            lacking -= len(parts[-1])
        return np.concatenate(parts)

    def _incomplete(self, records: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Return the last records if they are a batch; says so once if they cannot be."""
        sampler = self._sampler
        if not len(records) or sampler.drop_last:
            return None
        if self._global_size == sampler.batch_size:
            return records
        if self._rank == 0 and not sampler.said:
            sampler.said = True
            _log.warning(
                "%s: records left out at the end: %d, fewer than a step of all ranks takes (%d)",
                self._log.path,
                len(records),
                self._global_size,
            )
        return None

    def _open_window(self) -> None:
        assert self._arrived is not None  # noqa: S101  see `arrived`
        self._window = Place(*self._arrived.place, self._index, 0)
        numbers = self._arrived.take(self._size)
        if self._sampler.shuffle:
            generator = torch.Generator().manual_seed(self._sampler.seed + self._index)
            numbers = numbers[torch.randperm(len(numbers), generator=generator).numpy()]
        self._window = self._window._replace(used=len(numbers))
        self._left = numbers[self._drop :]
        self._index, self._drop = self._index + 1, 0

    def _place(self) -> Place:
        """Return the place after the last batch."""
        if len(self._left):
            return self._window._replace(used=self._window.used - len(self._left))
        assert self._arrived is not None  # noqa: S101  as above
        return Place(*self._arrived.place, self._index, self._drop)

    # --- waiting --------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Wait until the next batch has arrived, or the stream has ended.

        Raises:
            UnavailableError: not within the stream's `timeout_s`.
            SourceNotFoundError: it was deleted before it was read.
        """
        began, listed, warn_s = time.monotonic(), time.monotonic(), _WARN_S
        for pause_s in pauses(_FIRST_S, _LONGEST_S):
            time.sleep(pause_s)
            if self.arrived():
                return
            now = time.monotonic()
            if now - listed < _LIST_S:
                continue
            if self._arrived is not None:
                self._arrived.check()
            listed, waited_s = time.monotonic(), now - began
            text = f"{self._log.path}: the next batch has not arrived for {waited_s:.0f} s"
            if self._sampler.timeout_s is not None and waited_s >= self._sampler.timeout_s:
                raise UnavailableError(text)
            if waited_s >= warn_s:
                ended = f"{self._log.ends()} of {self._log.about.producers} producers have ended"
                _log.warning("%s; %s", text, ended)
                warn_s += _WARN_S
