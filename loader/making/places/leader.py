"""Batches for several ranks (`replicate`): the leader's workers make them, all others map them.

The first rank of a group on each node is the *leader*. It forwards its workers' messages to the
other ranks of that node, the *followers*: per batch some hundred bytes and the descriptors of new
slots. All ranks map the slots privately, so no rank sees what another writes into its batch. A slot
belongs to the worker that wrote it (with `workers="shared"`, too), and goes back to it once all
ranks have returned it.

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
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from creel.loader.data.reading.bad_samples import BadSample
from creel.loader.making.batch_times import NO_TIMES, BatchTimes
from creel.loader.making.places.other_ranks import OtherRanks
from creel.loader.making.transport.batch_message import BatchMessage, Outbox
from creel.loader.making.transport.channel import Channel
from creel.loader.making.workers.worker import portable
from creel.loader.torch_private import ExceptionWrapper
from creel.system.forks import reset_in_child

if TYPE_CHECKING:
    from creel.loader.client.session import Session
    from creel.loader.making.stage import Make
    from creel.loader.making.task import Task

_log = logging.getLogger("creel.loader")

#: Most batches that a follower may be behind the leader; pipeline stages are fewer behind.
_MAX_BEHIND = 256
#: Seconds that the end of an iterator waits for room in the followers' sockets.
_FLUSH_S = 5.0
#: The leader's number among the holders of a slot; followers have numbers from 1 on.
_LEADER = 0

#: A worker, and the id of one of its slots.
WorkerSlot: TypeAlias = "tuple[int, int]"


class SentBatch(NamedTuple):
    """A batch as its worker sent it.

    `read` is the `checksum` of its samples.
    """

    tag: int
    batch: int
    read: int
    worker: int
    message: BatchMessage
    times: BatchTimes
    bad: tuple[BadSample, ...]


def checksum(index: object) -> int:
    """Return the checksum of what a sampler yielded, if those are sample numbers; else 0.

    >>> checksum([1, 2]) == checksum(np.array([1, 2])) != checksum([2, 1])
    True
    """
    try:
        array = np.asarray(index)
    except Exception:  # noqa: BLE001  numpy raises anything if it cannot convert it
        return 0
    return zlib.crc32(array.astype(np.int64).tobytes()) if array.dtype.kind in "iu" else 0


class Leader(OtherRanks):
    """A leader's connections to its followers, for one loader.

    They close after `close`, once all iterators have ended.
    """

    share = True

    def __init__(self, followers: Sequence[Channel]) -> None:
        self._followers = dict(enumerate(followers, _LEADER + 1))
        self._sent: dict[int, SentBatches] = {}
        self._count = 0
        self._closing = False
        reset_in_child(self)

    def followers(self, ahead: int) -> SentBatches:
        """Begin an iterator that makes up to `ahead` batches ahead of use."""
        self._count += 1
        sent = self._sent[self._count] = SentBatches(self, self._count, ahead + _MAX_BEHIND)
        return sent

    def tee(self, slots: int) -> LeaderTee:
        """Begin an iterator whose batches the training thread makes."""
        return LeaderTee(self.followers(0), slots)

    def send(self, message: tuple[object, ...], fds: Sequence[int] = ()) -> list[int]:
        """Send to all followers without waiting; return their numbers."""
        self._with_each(lambda _, channel: channel.post(message, fds))
        return list(self._followers)

    def collect(self) -> None:
        """Read the followers' messages."""
        self._with_each(self._read)

    def _read(self, number: int, channel: Channel) -> None:
        channel.flush()
        while (got := channel.get(0)) is not None:
            match got[0]:
                case ("taken", int(it), int(taken), tuple(slots)) if it in self._sent:
                    self._sent[it].took(number, taken, slots)

    def _with_each(self, act: Callable[[int, Channel], object]) -> None:
        """Call `act` for each follower, and drop those for which it fails."""
        for number, channel in list(self._followers.items()):
            try:
                act(number, channel)
            except (OSError, EOFError) as e:  # noqa: PERF203  each follower can fail
                self.drop(number, str(e))

    def drop(self, number: int, why: str) -> None:
        """Go on without a follower, which then raises for its first missing batch."""
        channel = self._followers.pop(number, None)
        if channel is not None:
            _log.info("a follower gets no more batches from this rank: %s", why)
            channel.close()
        for sent in self._sent.values():
            sent.remove(number)

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

    def reset_for_process(self) -> None:
        """Close the copies of the connections in a forked child."""
        for channel in self._followers.values():
            channel.abandon()
        self._followers.clear()


class SentBatches:
    """Batches of one iterator of the leader, and which ranks still hold their slots."""

    def __init__(self, leader: Leader, number: int, max_behind: int) -> None:
        self._leader = leader
        self._number = number
        self._max_behind = max_behind
        self._read: dict[tuple[int, int], int] = {}  # checksums by (tag, index of batch)
        self._behind: dict[int, int] = {}  # batches sent to each follower, less those it took
        self._holders: dict[WorkerSlot, set[int]] = {}
        self._spoilt: set[WorkerSlot] = set()  # some rank has said not to reuse them
        self._free: dict[int, list[int]] = {}  # by worker: slots that all ranks have returned

    def expect(self, tag: int, batch: int, index: object) -> None:
        """Note the samples of a batch."""
        self._read[tag, batch] = checksum(index)

    def send(
        self,
        tag: int,
        batch: int,
        worker: int,
        message: BatchMessage,
        fds: Sequence[int],
        times: BatchTimes = NO_TIMES,
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
        """Take back slots of this rank; return those that no rank holds any more."""
        self._leader.collect()
        self._give_back(_LEADER, worker, slots)
        return self._free.pop(worker, [])

    def took(self, follower: int, taken: int, slots: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Count batches that a follower has taken, and take back the slots it returns."""
        self._behind[follower] = self._behind.get(follower, 0) - taken
        for worker, ids in slots:
            self._give_back(follower, worker, ids)

    def remove(self, follower: int) -> None:
        """Take back all slots of a follower."""
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
        """End the iterator: no more batches come."""
        self._leader.end(self._number)


class LeaderTee:
    """Sends the batches that the leader itself makes (`num_workers=0`) to the followers, too."""

    def __init__(self, sent: SentBatches, slots: int) -> None:
        self._outbox = Outbox(slots)
        self._sent = sent

    def around(self, make: Make, times: Callable[[int], BatchTimes]) -> Make:
        """Return what makes a batch, and sends it, or its error; see `BatchMaker.times`."""

        def make_and_send(task: Task, session: Session | None) -> object:
            self._sent.expect(task.tag, task.batch, task.index)
            try:
                data = make(task, session)
                self.send(task, data, times(time.monotonic_ns()))
            except Exception:
                where = "in the rank that makes this one's batches"
                failure = ExceptionWrapper(where=where)  # type: ignore[no-untyped-call]  # torch's
                self.send(task, portable(failure))
                raise
            return data

        return make_and_send

    def send(self, task: Task, data: object, times: BatchTimes = NO_TIMES) -> None:
        """Send a batch. Raises what packing it raises."""
        message, fds = self._outbox.pack(data)
        self._sent.send(task.tag, task.batch, 0, message, fds, times)
        own = [slot for slot, once in message.packed.slots if not once]
        self._outbox.give_back(self._sent.returned(0, own))

    def close(self) -> None:
        self._sent.close()
        self._outbox.close()


def _flush(channel: Channel, until: float) -> None:
    """Send packets that wait for room in the socket."""
    while not channel.flush() and time.monotonic() < until:
        select.select([], [channel], [], 0.1)
