"""Batches for several ranks (`replicate`): the leader's workers make them, all others map them.

Of the ranks of a group that share a node the first is the *leader*. It passes on to the others, the
*followers*, what its workers send it: a message of some hundred bytes, and the descriptors of new
slots. All of them map the slots privately, so what one rank writes into its batch no other sees.
A worker gets a slot back once all ranks have returned it.

Messages (tuples over a `Channel`, one per loader and follower; L from the leader, F from a
follower). All ranks number their iterators alike:
    L "batch", iterator, SentBatch     with descriptors of new slots
    L "closed", iterator               no more batches come
    F "taken", iterator, how many more batches it has taken, ((worker, ids of slots), ...)
"""

from __future__ import annotations

import logging
import select
import time
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from creel.forks import forget_in_child
from creel.loader.reading.bad_samples import BadSample
from creel.loader.torch_private import ExceptionWrapper
from creel.loader.workers.batch_message import BatchMessage, Outbox
from creel.loader.workers.channel import Channel
from creel.loader.workers.worker import portable

if TYPE_CHECKING:
    from creel.loader.iterators.inline_iter import BatchReader

_log = logging.getLogger("creel.loader")

#: How many batches a follower may be behind the leader; pipeline stages are behind by fewer.
_MAX_BEHIND = 256
#: Seconds that the end of an iterator waits for room in the followers' sockets.
_FLUSH_S = 5.0
#: Who holds a slot: the leader, or a follower by its number, from 1 on.
_LEADER = 0

#: A worker, and the id of one of its slots.
WorkerSlot: TypeAlias = "tuple[int, int]"


class SentBatch(NamedTuple):
    """A batch as its worker has sent it, and `read`, the checksum of what it is made of.

    `times` are those of `BatchTimes`.
    """

    tag: int
    batch: int
    read: int
    worker: int
    message: BatchMessage
    times: tuple[int, ...]
    bad: tuple[BadSample, ...]


def checksum(index: object) -> int:
    """The checksum of what a sampler yielded, if that is samples by number; else 0.

    >>> checksum([1, 2]) == checksum(np.array([1, 2])) != checksum([2, 1])
    True
    """
    try:
        found = np.asarray(index)
    except Exception:  # noqa: BLE001  numpy cannot convert it, whatever it raises
        return 0
    return zlib.crc32(found.astype(np.int64).tobytes()) if found.dtype.kind in "iu" else 0


class Leader:
    """A leader's connections to its followers, for one loader.

    They are closed once `close` was called and all iterators have ended.
    """

    def __init__(self, followers: Sequence[Channel]) -> None:
        self._followers = dict(enumerate(followers, _LEADER + 1))
        self._sent: dict[int, SentBatches] = {}
        self._count = 0
        self._closing = False
        forget_in_child(self)

    def open(self, ahead: int) -> SentBatches:
        """Begin an iterator that makes up to `ahead` batches ahead of use."""
        self._count += 1
        sent = self._sent[self._count] = SentBatches(self, self._count, ahead + _MAX_BEHIND)
        return sent

    def send(self, message: tuple[object, ...], fds: Sequence[int] = ()) -> list[int]:
        """Send to all followers without waiting; returns their numbers."""
        self._with_each(lambda _, channel: channel.post(message, fds))
        return list(self._followers)

    def collect(self) -> None:
        """Take in what the followers have returned."""
        self._with_each(self._read)

    def _read(self, number: int, channel: Channel) -> None:
        channel.flush()
        while (got := channel.get(0)) is not None:
            match got[0]:
                case ("taken", int(it), int(taken), tuple(slots)) if it in self._sent:
                    self._sent[it].took(number, taken, slots)

    def _with_each(self, act: Callable[[int, Channel], object]) -> None:
        """Do something with each follower; one that is gone is left out from then on."""
        for number, channel in list(self._followers.items()):
            try:
                act(number, channel)
            except (OSError, EOFError) as e:  # noqa: PERF203  each has an error of its own
                self.drop(number, str(e))

    def drop(self, number: int, why: str) -> None:
        """Go on without a follower; it raises when it misses a batch."""
        channel = self._followers.pop(number, None)
        if channel is not None:
            _log.info("a rank gets no more of this rank's batches: %s", why)
            channel.close()
        for sent in self._sent.values():
            sent.forget(number)

    def end(self, iterator: int) -> None:
        if self._sent.pop(iterator, None) is None:
            return
        self.send(("closed", iterator))
        until = time.monotonic() + _FLUSH_S
        self._with_each(lambda _, channel: _flush(channel, until))
        if self._closing:
            self.close()

    def close(self) -> None:
        """Close all connections, now or with the last iterator."""
        self._closing = True
        while self._followers and not self._sent:
            self._followers.popitem()[1].close()

    def forget(self) -> None:
        """In a forked child: close its copies of the connections."""
        for channel in self._followers.values():
            channel.abandon()
        self._followers.clear()


class SentBatches:
    """The batches of one iterator of the leader, as far as its followers hold them."""

    def __init__(self, leader: Leader, number: int, max_behind: int) -> None:
        self._leader = leader
        self._number = number
        self._max_behind = max_behind
        self._read: dict[tuple[int, int], int] = {}  # checksums by tag and index of batch
        self._behind: dict[int, int] = {}  # batches sent to each follower and not taken yet
        self._holders: dict[WorkerSlot, set[int]] = {}
        self._spoilt: set[WorkerSlot] = set()  # not to be used again, says a rank
        self._free: dict[int, list[int]] = {}  # by worker, slots that all ranks have returned

    def expect(self, tag: int, batch: int, index: object) -> None:
        """Note what a batch is made of."""
        self._read[tag, batch] = checksum(index)

    def send(
        self,
        tag: int,
        batch: int,
        worker: int,
        message: BatchMessage,
        fds: Sequence[int],
        times: tuple[int, ...] = (),
        bad: tuple[BadSample, ...] = (),
    ) -> None:
        """Send a batch to the followers. The caller keeps the descriptors."""
        read = self._read.pop((tag, batch), 0)
        sent = SentBatch(tag, batch, read, worker, message, times, bad)
        there = self._leader.send(("batch", self._number, sent), fds)
        for slot, once in message.packed.slots:
            if not once:
                self._holders[worker, slot] = {_LEADER, *there}
        for number in there:
            self._behind[number] = behind = self._behind.get(number, 0) + 1
            if behind > self._max_behind:
                self._leader.drop(number, f"it is {behind} batches behind")

    def returned(self, worker: int, slots: Sequence[int]) -> list[int]:
        """Return slots of this rank; returns those that no rank uses any more."""
        self._leader.collect()
        self._give_back(_LEADER, worker, slots)
        return self._free.pop(worker, [])

    def took(self, follower: int, taken: int, slots: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Take in how many more batches a follower has taken, and what slots it returns."""
        self._behind[follower] = self._behind.get(follower, 0) - taken
        for worker, ids in slots:
            self._give_back(follower, worker, ids)

    def forget(self, follower: int) -> None:
        """Take back everything from a follower."""
        for (worker, slot), holders in list(self._holders.items()):
            if follower in holders:
                self._give_back(follower, worker, [slot])

    def _give_back(self, holder: int, worker: int, slots: Sequence[int]) -> None:
        for number in slots:
            slot = worker, max(number, ~number)
            holders = self._holders.get(slot, set())
            holders.discard(holder)
            if number < 0:
                self._spoilt.add(slot)
            if not holders:
                self._holders.pop(slot, None)
                spoilt = slot in self._spoilt
                self._spoilt.discard(slot)
                self._free.setdefault(worker, []).append(~slot[1] if spoilt else slot[1])

    def close(self) -> None:
        """No more batches come."""
        self._leader.end(self._number)


class LeaderReader:
    """Reads batches in the leader itself (`num_workers=0`), and sends each to the followers."""

    def __init__(self, reader: BatchReader, leader: Leader, slots: int) -> None:
        self._reader = reader
        self._outbox = Outbox(slots)
        self._sent = leader.open(0)

    def read(self, i: int, step: int, index: Any) -> Any:
        """Read the i-th batch. Raises what the reader raises, as all followers do."""
        self._sent.expect(0, i, index)
        try:
            data = self._reader.read(i, step, index)
            packed = self._outbox.pack(data)
        except Exception:
            where = "in the rank that makes this one's batches"
            failure = ExceptionWrapper(where=where)  # type: ignore[no-untyped-call]  # torch's
            self._send(i, *self._outbox.pack(portable(failure)))
            raise
        self._send(i, *packed)
        return data

    def _send(self, i: int, message: BatchMessage, fds: list[int]) -> None:
        self._sent.send(0, i, 0, message, fds)
        own = [slot for slot, once in message.packed.slots if not once]
        self._outbox.give_back(self._sent.returned(0, own))

    def close(self) -> None:
        self._sent.close()
        self._outbox.close()


def _flush(channel: Channel, until: float) -> None:
    """Send what waits for room in the socket."""
    while not channel.flush() and time.monotonic() < until:
        select.select([], [channel], [], 0.1)
