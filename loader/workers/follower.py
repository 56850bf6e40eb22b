"""The follower's side of `leader`: a rank that takes the batches that another one has made."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

from creel.forks import forget_in_child
from creel.loader.client.packets import close_all
from creel.loader.torch_private import ExceptionWrapper
from creel.loader.workers.batch_message import Inbox
from creel.loader.workers.batch_pool import BatchPool
from creel.loader.workers.channel import Channel
from creel.loader.workers.events import BatchResult, LeaderLoss, WorkerEvent
from creel.loader.workers.leader import SentBatch, checksum
from creel.loader.workers.stages import IDLE, BatchTimes, StallWarning

if TYPE_CHECKING:
    from creel.loader.workers.pool import Slots, WorkerProcess

#: Seconds that one thread reads while others of its process may want to.
_TURN_S = 0.1

#: What came for an iterator, with its descriptors; None: no more batches come.
Arrived: TypeAlias = "tuple[SentBatch | None, list[int]]"


class Follower:
    """A follower's connection to its leader, for one loader.

    It is closed once `close` was called and all iterators have ended.
    """

    def __init__(self, channel: Channel, leader: int) -> None:
        """`leader`: its rank in the job."""
        self.leader = leader
        self._channel = channel
        self._count = 0
        self._open: set[int] = set()
        self._closing = False
        self._arrived: dict[int, deque[Arrived]] = {}  # by iterator
        self._lock = threading.Lock()  # several iterators may have threads that pin memory
        forget_in_child(self)

    def open(self) -> int:
        """Begin an iterator; returns its number."""
        self._count += 1
        self._open.add(self._count)
        self._arrived.setdefault(self._count, deque())
        return self._count

    def peek(self, iterator: int, timeout_s: float) -> SentBatch | None:
        """The next batch for an iterator, which stays the next; None on timeout.

        Raises:
            EOFError: there is none: the leader has ended the iterator, or itself, or has left this
                rank out.
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
            # Where a leader ends with words unread, a reset comes before its last ones.
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
        """Take what `peek` has returned."""
        return self._arrived[iterator].popleft()

    def took(self, iterator: int, taken: int, slots: tuple[tuple[int, list[int]], ...]) -> None:
        """Tell the leader of batches taken, and of slots to be used again."""
        with suppress(OSError):  # the next wait for a batch says that the leader is gone
            self._channel.post(("taken", iterator, taken, slots))

    def end(self, iterator: int) -> None:
        """End an iterator: what still comes for it is dropped."""
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

    def forget(self) -> None:
        """In a forked child: close its copy of the connection."""
        self._channel.abandon()


class ReplicaPool(BatchPool):
    """What a follower's iterator has in place of a `WorkerPool`: the leader's workers."""

    def __init__(self, follower: Follower, max_leased: int) -> None:
        super().__init__()
        self.pid = os.getpid()
        self.tag = 0
        self.members: list[WorkerProcess] = []  # none is this process's
        self._follower = follower
        self._number = follower.open()
        self._max_leased = max_leased
        self._inboxes: dict[int, Inbox] = {}  # by worker
        self._taken = 0
        self._ours: dict[int, int] = {}  # checksums by index of batch
        self._theirs: dict[tuple[int, int], int] = {}
        self._lost_tag = -1

    def again(self, bad: Mapping[int, str]) -> int:  # noqa: ARG002  the leader's workers know them
        """Begin another epoch; returns its tag."""
        self.tag += 1
        self._ours.clear()
        return self.tag

    def bind(self, digest: str) -> None:
        """Nothing is read here."""

    def join(self, ticket: tuple[str, str, int]) -> None:
        """Nothing is read here."""

    def task(
        self, worker: int, tag: int, batch: int, index: object, step: int, *, many: bool
    ) -> None:
        """Note what a batch is to be made of, and return slots."""
        del worker, tag, step, many
        self._ours[batch] = checksum(index)
        freed = [(worker, inbox.returned()) for worker, inbox in list(self._inboxes.items())]
        taken, self._taken = self._taken, 0
        if taken:
            self._follower.took(self._number, taken, tuple(one for one in freed if one[1]))

    def receive(self, timeout_s: float) -> WorkerEvent | None:
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
        self._bad.extend(sent.bad)
        times = BatchTimes(*sent.times)
        return BatchResult(sent.worker, sent.tag, sent.batch, packed, times, inbox)

    def _loss(self, why: str, timeout_s: float) -> WorkerEvent | None:
        """The event that the leader is lost; a pinning thread gets it only once in each epoch."""
        if self.pinner is not None and self._lost_tag == self.tag:
            time.sleep(timeout_s)
            return None
        self._lost_tag = self.tag
        rank = self._follower.leader
        return LeaderLoss(self.tag, f"rank {rank}, which makes this rank's batches, is lost: {why}")

    def open(self, event: BatchResult) -> object:
        """The batch itself, or an ExceptionWrapper if the leader's worker failed.

        Raises:
            RuntimeError: it is not made of what this rank's sampler yielded.
        """
        ours, theirs = self._ours.pop(event.index, 0), self._theirs[event.tag, event.index]
        if ours and theirs and ours != theirs:
            self.discard(event)
            raise RuntimeError(
                f"replicate: rank {self._follower.leader} reads other samples than this rank: all"
                " ranks of a group need the same sampler, as DistributedSampler with"
                " num_replicas=<groups> and rank=<group>, the same seed and the same set_epoch"
            )
        self._took(event)
        return super().open(event)

    def _took(self, event: BatchResult) -> None:
        self._taken += 1
        del self._theirs[event.tag, event.index]

    def discard(self, event: BatchResult) -> None:
        self._took(event)
        super().discard(event)

    def stage(self, worker: int) -> tuple[int, int, float]:  # noqa: ARG002  the same for all
        """(stage, batch, seconds) as of an idle worker."""
        return IDLE, -1, 0.0

    def new_counts(self) -> list[int]:
        """Zeros: this rank has no workers."""
        return [0] * 6

    def describe(self, worker: int) -> str:
        """Who makes a batch, for warnings."""
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


class ReplicaReader:
    """Reads batches from the leader's (`num_workers=0`)."""

    def __init__(self, follower: Follower, max_leased: int, warn_after_s: float) -> None:
        """`warn_after_s`: seconds of a wait after which it is named."""
        self._pool = ReplicaPool(follower, max_leased)
        self._warn_after_s = warn_after_s

    def read(self, i: int, step: int, index: Any) -> Any:
        """Wait for the i-th batch.

        Raises:
            RuntimeError: the leader is lost, or reads other samples.
            Exception: what reading it raised there.
        """
        self._pool.task(0, 0, i, index, step, many=False)
        event = self._pool.next_event(self._warn_after_s)
        if event is None:
            what = self._pool.describe(0)
            text = f"no batch for {self._warn_after_s:g} s: waiting for {what}"
            warnings.warn(text, StallWarning, stacklevel=4)
        while event is None:
            event = self._pool.next_event(1.0)
        if not isinstance(event, BatchResult):
            raise RuntimeError(event.reason if isinstance(event, LeaderLoss) else "")  # noqa: TRY004  as torch
        data = self._pool.open(event)
        if isinstance(data, ExceptionWrapper):
            data.reraise()  # type: ignore[no-untyped-call]  # torch's
        return data

    def close(self) -> None:
        self._pool.close()
