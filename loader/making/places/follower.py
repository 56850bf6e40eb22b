"""The follower's side of `leader`: a rank that takes batches made by another rank."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

from creel.loader.data.reading.bad_samples import Key
from creel.loader.making.places.leader import SentBatch, checksum
from creel.loader.making.places.made import Event, Loss, Made
from creel.loader.making.places.other_ranks import OtherRanks
from creel.loader.making.places.place import BatchPlace
from creel.loader.making.task import Task
from creel.loader.making.transport.batch_message import Inbox
from creel.loader.making.transport.channel import Channel
from creel.system.fd_packets import close_all
from creel.system.forks import reset_in_child

if TYPE_CHECKING:
    from creel.loader.making.places.place import Slots

#: Longest read in seconds by one thread while other threads of its process may want to read.
_TURN_S = 0.1

#: A batch for an iterator with its descriptors; None in its place: no more batches come.
Arrived: TypeAlias = "tuple[SentBatch | None, list[int]]"


class Follower(OtherRanks):
    """A follower's connection to its leader, for one loader.

    It closes after `close`, once all iterators have ended.
    """

    share = True

    def __init__(self, channel: Channel, leader: int) -> None:
        """`leader`: its rank in the job."""
        self.leader = leader
        self._channel = channel
        self._count = 0
        self._open: set[int] = set()
        self._closing = False
        self._arrived: dict[int, deque[Arrived]] = {}  # by iterator
        self._lock = threading.Lock()  # several iterators may have pinning threads
        reset_in_child(self)

    def place(self, max_leased: int) -> ReplicaPool:
        """Return where the batches of an iterator come from."""
        return ReplicaPool(self, max_leased)

    def open(self) -> int:
        """Begin an iterator; return its number."""
        self._count += 1
        self._open.add(self._count)
        self._arrived.setdefault(self._count, deque())
        return self._count

    def peek(self, iterator: int, timeout_s: float) -> SentBatch | None:
        """Return the next batch for an iterator without taking it; None on timeout.

        Raises:
            EOFError: the leader has ended the iterator or itself, or has dropped this rank.
            OSError: no descriptor is free.
        """
        until = time.monotonic() + timeout_s
        arrived = self._arrived[iterator]
        while not arrived:
            left = until - time.monotonic()
            if left < 0:
                return None
            with self._lock:
                if not arrived:
                    self._receive(min(left, _TURN_S))
        if arrived[0][0] is None:
            raise EOFError("it has ended this iterator")
        return arrived[0][0]

    def _receive(self, timeout_s: float) -> None:
        with suppress(OSError):
            self._channel.flush()
        try:
            got = self._channel.get(timeout_s)
        except EOFError:
            # A leader that ends with unread messages causes a reset, which arrives before its last
            # ones.
            got = self._channel.get(0)
        match got:
            case (("batch", int(iterator), SentBatch() as sent), list(fds)):
                self._keep(iterator, (sent, fds))
            case (("closed", int(iterator)), list(fds)):
                self._keep(iterator, (None, fds))

    def _keep(self, iterator: int, arrived: Arrived) -> None:
        if iterator in self._arrived or iterator > self._count:
            self._arrived.setdefault(iterator, deque()).append(arrived)
        else:
            close_all(arrived[1])

    def take(self, iterator: int) -> Arrived:
        """Take the batch that `peek` returned."""
        return self._arrived[iterator].popleft()

    def took(self, iterator: int, taken: int, slots: tuple[tuple[int, list[int]], ...]) -> None:
        """Tell the leader how many batches were taken, and which slots may be reused."""
        with suppress(OSError):  # the next wait for a batch reports that the leader is gone
            self._channel.post(("taken", iterator, taken, slots))

    def end(self, iterator: int) -> None:
        """End an iterator; batches that still arrive for it are dropped."""
        self._open.discard(iterator)
        for _, fds in self._arrived.pop(iterator, ()):
            close_all(fds)
        if self._closing:
            self.close()

    def close(self) -> None:
        """Close the connection, now or with the last iterator."""
        self._closing = True
        if self._open:
            return
        while self._arrived:
            for _, fds in self._arrived.popitem()[1]:
                close_all(fds)
        self._channel.close()

    def reset_for_process(self) -> None:
        """Close the copy of the connection in a forked child."""
        self._channel.abandon()


class ReplicaPool(BatchPlace):
    """Where a follower's batches are made: by the leader, or its workers."""

    def __init__(self, follower: Follower, max_leased: int) -> None:
        super().__init__()
        self._follower = follower
        self._number = follower.open()
        self._max_leased = max_leased
        self._inboxes: dict[int, Inbox] = {}  # by worker
        self._taken = 0
        self._ours: dict[int, int] = {}  # checksums of this rank's indices, by index of batch
        self._theirs: dict[tuple[int, int], int] = {}
        self._lost_tag = -1

    def again(self, bad: Mapping[Key, str]) -> None:
        self._ours.clear()
        super().again(bad)  # the leader's workers know the bad samples

    def task(self, worker: int, task: Task) -> None:  # noqa: ARG002  the leader chooses one
        """Note the samples expected in a batch, and return slots to the leader."""
        self._ours[task.batch] = checksum(task.index)
        freed = [(worker, inbox.returned()) for worker, inbox in list(self._inboxes.items())]
        taken, self._taken = self._taken, 0
        if taken:
            self._follower.took(self._number, taken, tuple(entry for entry in freed if entry[1]))

    def receive(self, timeout_s: float) -> Event | None:
        try:
            sent = self._follower.peek(self._number, timeout_s)
            if sent is None:
                return None
            if sent.tag > self.tag:
                return self._loss("it has begun the next epoch", timeout_s)
            _, fds = self._follower.take(self._number)
            inbox = self._inboxes.get(sent.worker)
            if inbox is None:
                inbox = self._inboxes[sent.worker] = Inbox(
                    max_leased=self._max_leased, private=True
                )
            packed = inbox.accept(sent.message, fds)
        except (EOFError, OSError) as e:
            return self._loss(str(e), timeout_s)
        self._theirs[sent.tag, sent.batch] = sent.read
        self.bad.extend(sent.bad)
        return Made(sent.worker, sent.tag, sent.batch, packed, sent.times, inbox=inbox)

    def _loss(self, why: str, timeout_s: float) -> Event | None:
        """Return the event that the leader is lost; a pinning thread gets it once per epoch."""
        if self.pinner is not None and self._lost_tag == self.tag:
            time.sleep(timeout_s)
            return None
        self._lost_tag = self.tag
        rank = self._follower.leader
        return Loss(self.tag, f"rank {rank}, which makes this rank's batches, is lost: {why}")

    def open(self, event: Made) -> object:
        """Return the batch itself, or an ExceptionWrapper if the leader's worker failed.

        Raises:
            RuntimeError: the batch is not of the samples that this rank's sampler yielded.
        """
        ours, theirs = self._ours.pop(event.batch, 0), self._theirs[event.tag, event.batch]
        if ours and theirs and ours != theirs:
            self.discard(event)
            raise RuntimeError(
                f"replicate: rank {self._follower.leader} reads other samples than this rank: all"
                " ranks of a group need the same sampler, as DistributedSampler with"
                " num_replicas=<groups> and rank=<group>, the same seed and the same set_epoch"
            )
        self._took(event)
        return super().open(event)

    def _took(self, event: Made) -> None:
        self._taken += 1
        del self._theirs[event.tag, event.batch]

    def discard(self, event: Made) -> None:
        self._took(event)
        super().discard(event)

    def describe(self, worker: int) -> str:
        return f"worker {worker} of rank {self._follower.leader}, which makes this rank's batches"

    def close(self) -> Slots:
        if os.getpid() != self.pid:
            return ()
        if self.pinner is not None:
            self.pinner.stop()
        self._follower.end(self._number)
        for inbox in self._inboxes.values():
            inbox.close()
        return ()
