"""Session: one stream of a dataset's steps, on the side of the trainer and its workers.

The daemon marks ready steps in the shared words; a warm batch costs one comparison and no message.
If the daemon is slow, lost or draining, `ready` and `wait` return False, and the caller reads the
source itself.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from creel import messages
from creel.cache.memory.arena import Rows
from creel.cache.memory.pools import runs
from creel.cache.memory.pools.free_ranges import NOWHERE
from creel.cache.memory.shared_words import (
    DONE,
    EARLY,
    EARLY_STEPS,
    HEARTBEAT,
    KNOWN,
    OBJECT_NS,
    READY,
    REVOKED,
    STATE,
    TRUNCATED,
    WANTED,
    LocationTable,
    SharedWords,
)
from creel.loader.client.backoff import pauses
from creel.policies.cluster.job_order import JobOrder, SampleObjects
from creel.system.forks import reset_in_child

if TYPE_CHECKING:  # the two modules import each other
    from creel.loader.client.client import Client

_log = logging.getLogger("creel.loader")

#: A heartbeat older than this means a stopped or swapped-out daemon; it beats every 0.1 s.
STALE_NS = 2_000_000_000
#: A heartbeat must look stale for this long before the daemon counts as lost, because the whole
#: machine or job may have been suspended (Slurm). A daemon that resumes beats again much sooner.
STALE_CONFIRM_NS = 500_000_000
#: Most objects that `holds_most` looks at.
_LOOKED_AT = 4096
#: No step comes so late.
_NEVER = sys.maxsize
#: Longest delay with which a waiting thread notices a stale heartbeat.
POLL_S = 0.05
#: A live daemon without a step's plan after this time will never get it: libzmq connects in the
#: background, and fails as long as the process has no free descriptor.
ARRIVAL_S = 10.0


@dataclass(frozen=True)
class MessageSizes:
    """Objects in one `Extend`.

    Attributes:
        limit: the daemon handles it in 3 ms, and serves no other client meanwhile.
        fresh: the limit at the start of an epoch. For nearly each object the daemon touches fresh
            memory, a page of a thousand objects in each of its columns (10 ms,
            benchmarks/planning.py). The first message has only the step that a reader waits for.
        fresh_part: the start of an epoch ends once the plan has this part (1/n) of all objects:
            eight for each page.
        messages: most messages for one plan; libzmq queues 1,000 that the daemon has not received.
    """

    limit: int = 1 << 14
    fresh: int = 1 << 10
    fresh_part: int = 128
    messages: int = 256


SIZES = MessageSizes()
#: Samples in one message; the daemon copies and checks it in 1 ms.
SAMPLES = 1 << 18


class Session:
    """One stream of steps. The trainer extends and completes it; its workers only read.

    Attributes:
        lost: whether no step will become ready any more, and nothing is sent.
        truncating: whether READY may mean an old plan, until `settle`.
        gone: whether the daemon was seen to have ended.
    """

    def __init__(
        self,
        client: Client,
        opened: messages.Opened,
        words: SharedWords,
        table: LocationTable,
        trainer: bool,
    ) -> None:
        self.id = opened.session  # the daemon's number for it
        self.words = words
        self.table = table
        self.client = client
        self.token = client.token  # a worker needs it, and `id`, to attach
        self._trainer = trainer
        self._closed = False
        self.lost = self.gone = self.truncating = False
        self._among: SampleObjects | None = None  # what the daemon knows of the samples
        self._epoch, self._sent = -1, 0  # epoch of the last plan; its objects sent so far
        self._truncates = 0  # that were sent; the daemon counts those it has done
        #: READY may mean the old plan for steps from here on, until all truncates are processed.
        self._void_from = _NEVER
        self._stale_beat = (0, 0)  # (beat, time when it was first seen stale)
        self._rows: tuple[int, Rows] | None = None  # (bytes of an object, its row copier)
        reset_in_child(self)

    @property
    def ended(self) -> bool:
        """Whether it was closed or lost: no step will become ready, and nothing is sent."""
        return self._closed or self.lost

    @property
    def alive(self) -> bool:
        """Whether the daemon serves: connected, beating, not draining."""
        self.gone = self.gone or not self.client.alive
        if self.ended or self.gone or self.words[STATE] != 0:
            return False
        now, beat = time.monotonic_ns(), self.words[HEARTBEAT]
        if now - beat < STALE_NS:
            return True
        if self._stale_beat[0] != beat:
            self._stale_beat = (beat, now)
        return now - self._stale_beat[1] < STALE_CONFIRM_NS

    def _dead(self) -> bool:
        return not self.alive

    def extend(
        self,
        epoch: int,
        step: int,
        objects: NDArray[np.integer],
        ends: NDArray[np.integer],
        *,
        unplanned: bool = False,
    ) -> bool:
        """Add the plan of steps `step, step+1, ...`; see `messages.Extend`.

        Args:
            objects: (k,) object ids in order of reading.
            ends: (b,) step+i reads objects[ends[i-1]:ends[i]]; ends[-1] == k.
            unplanned: whether the steps are about to be read, with unknown steps after them.

        Returns:
            False if the plan has become useless: the daemon is lost, or a finaliser has truncated
                the plan during this call.
        """
        objects = np.asarray(objects, np.dtype("<i4"))
        ends = np.asarray(ends, np.dtype("<i8"))
        if epoch != self._epoch:
            self._epoch, self._sent = epoch, 0
        truncates = self._truncates
        first, min_objects = 0, len(objects) // SIZES.messages
        while first < len(ends):
            start = int(ends[first - 1]) if first else 0
            fresh = self._sent < len(self.table.offset) // SIZES.fresh_part
            max_objects = max(SIZES.fresh if fresh else SIZES.limit, min_objects)
            if fresh and not self._sent:
                max_objects = 0
            last = max(int(np.searchsorted(ends, start + max_objects, side="right")), first + 1)
            message = messages.Extend(self.token, self.id, epoch, step + first, unplanned)
            piece = objects[start : int(ends[last - 1])]
            if not self._send(message, piece, ends[first:last] - start):
                self.lost |= first > 0  # the daemon has an incomplete plan
                return False
            if self._truncates != truncates:
                return False
            self._sent += len(piece)
            first = last
        return True

    def truncate(self, step: int) -> bool:
        """Cancel the plan from `step` on; False if the daemon is lost.

        Steps from `step` on are then not ready until the plan is extended again. Batches that were
        given out of the old plan must not be used any more. Does not wait: `settle` must return
        True before a step from `step` on is given to another process.
        """
        self._void_from = step if self._settled() else min(step, self._void_from)
        self._truncates += 1
        self.truncating = True
        self.words[WANTED] = min(self.words[WANTED], step)  # it belonged to the cancelled plan
        if not self._send(messages.Truncate(self.token, self.id, step)):
            self.lost = True  # READY would still mean the old plan
            return False
        return True

    def settle(self) -> bool:
        """Wait until the daemon has processed every `truncate`; False if it is lost.

        If the daemon is found lost here, the session ends, since READY could mean either plan.
        """
        if self._void_from == _NEVER:
            return not self.lost
        waits = pauses(2e-5, 0.001)
        while not self._settled():
            if self._dead():
                self.lost = True
                return False
            time.sleep(next(waits))
        self._void_from, self.truncating = _NEVER, False
        return not self.lost

    def _settled(self) -> bool:
        return self._truncates == 0 or self.words[TRUNCATED] >= self._truncates

    def begin(self, epoch: int) -> bool:
        """Begin an epoch: the daemon checks its files' versions before its steps are ready."""
        return self._send(messages.Begin(self.token, self.id, epoch))

    def hold(self, step: int) -> int:
        """Return the stamp under which a step's objects may be copied; -1 if it is not ready.

        The stamp counts how often READY was revoked: bytes copied while it changes may be torn.
        """
        cells = self.words.cells
        stamp = cells[REVOKED]  # must precede the read of READY
        # What `ready` says, mostly: who trains asks this for each batch.
        settled = step < self._void_from and not (self._closed or self.lost)
        if settled and cells[READY] > step >= cells[DONE]:
            return stamp
        return stamp if self.ready(step) else -1

    def held(self, step: int, stamp: int) -> bool:
        """Whether the bytes copied under `stamp` are intact."""
        cells = self.words.cells
        settled = step < self._void_from and not (self._closed or self.lost)
        ready = (settled and cells[READY] > step >= cells[DONE]) or self.ready(step)
        return ready and cells[REVOKED] == stamp  # in this order: see `hold`

    def ready(self, step: int) -> bool:
        """Whether the objects of `step` can be read from the arena (or have failed) now.

        They are pinned from then on, until the step is done.
        """
        if self._closed or self.lost or (step >= self._void_from and not self._settled()):
            return False
        words = self.words.cells
        if step < words[DONE]:
            return False
        return words[READY] > step or words[EARLY + step % EARLY_STEPS] == step + 1

    @property
    def object_ns(self) -> int:
        """The daemon's recent time for one read of the source, in ns; 0 while unknown."""
        return self.words[OBJECT_NS]

    def holds_most(self) -> bool:
        """Whether more than half of the dataset's objects are in the arena, judged by some."""
        offset = self.table.offset
        some = offset[:: len(offset) // _LOOKED_AT + 1]
        return 2 * int(np.count_nonzero(some != NOWHERE)) > len(some)

    def nbytes(self, ids: NDArray[np.integer]) -> int:
        """Return the total bytes of these (k,) objects; unknown lengths count as 0."""
        # Not `take`, which copies the whole table if all lengths are one and the same number.
        return int(self.table.length[ids].clip(0).sum())

    def wait(self, step: int, timeout_s: float) -> bool:
        """Wait until `step` is ready; False if it is late or done, or the daemon is lost.

        A session whose plan does not reach the daemon within ARRIVAL_S is also lost.
        """
        if self.ready(step):
            return True
        if step < self.words[DONE] or not self.alive:
            return False
        if self._trainer:
            self.words[WANTED] = max(self.words[WANTED], step + 1)
        client = self.client
        call = next(client.calls)
        if not self._send(messages.Wait(self.token, call, self.id, step)):
            return False
        began = time.monotonic()
        while True:
            received = client.received
            if self.ready(step):
                return True
            waited = time.monotonic() - began
            left = timeout_s - waited
            self.lost |= waited > ARRIVAL_S and self.words[KNOWN] <= step
            over = step < self.words[DONE]  # its iterator has begun anew meanwhile
            if left <= 0 or over or self._dead() or client.refused(call):
                return self.ready(step)
            client.listen(min(left, POLL_S), received)

    def done(self, step: int) -> None:
        """Raise DONE (never lower it): all steps < `step` were read, and may be evicted."""
        cells = self.words.cells
        if not (self._closed or self.lost) and step > cells[DONE]:
            cells[DONE] = step

    def deal(self, epoch: int, deal: JobOrder) -> None:
        """Tell the daemon how an epoch is dealt to all ranks of the job."""
        if deal.object_of is not None:
            self.tell_samples(deal.object_of)
        replays = None
        if deal.replays is not None:
            kept, each, _, seed = deal.replays.passes
            replays = messages.DealtReplays(kept, each, seed, deal.replays.first_step)
        self._send(
            messages.Deal(
                self.token,
                self.id,
                epoch,
                self.client.cluster,
                deal.samples,
                deal.world,
                deal.each,
                deal.batch,
                deal.seed,
                deal.remapped,
                deal.object_of is not None,
                replays,
            )
        )

    def tell_samples(self, object_of: SampleObjects, *, rehearsed: bool = False) -> None:
        """Tell the daemon which object each sample is, once; see `messages.DealtSamples`."""
        if object_of is self._among:
            return
        samples = len(object_of.objects)
        for first in range(0, samples, SAMPLES):
            piece = object_of.objects[first : first + SAMPLES]
            message = messages.DealtSamples(self.token, self.id, samples, first, rehearsed)
            self._send(message, piece)
        self._among = object_of

    def follow(self) -> None:
        """Tell the daemon that the job's nodes should ask each other without a common plan."""
        self._send(messages.Follow(self.token, self.id, self.client.cluster))

    def reset_for_process(self) -> None:
        """Stop using the session in a forked child: its shared words belong to the parent."""
        self.lost = True

    def pieces(self, ids: NDArray[np.integer]) -> dict[int, list[memoryview]]:
        """Return the bytes of those of (k,) objects that are in the arena, read-only and in order.

        Valid while their step is in [DONE, READY).
        """
        ids = ids[self.table.offset[ids] != NOWHERE]
        if not len(ids):
            return {}
        columns = ids, self.table.offset[ids], self.table.length[ids]
        by_object = {}
        with contextlib.suppress(ValueError):  # another thread has closed the client
            view = self.client.arena.view
            for i, place, nbytes in zip(*(column.tolist() for column in columns), strict=True):
                pieces = runs.pieces(view, place, nbytes)
                if pieces is not None:
                    by_object[i] = pieces
        return by_object

    def rows(self, ids: NDArray[np.integer], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Fill row i of (n, nbytes) `out` with object ids[i], unless it is absent.

        Returns:
            (n,) True for each row that was filled.
        """
        nbytes = out.shape[1]
        if self._rows is None or self._rows[0] != nbytes:
            self._rows = nbytes, Rows(self.client.arena, nbytes)
        where = self.table.offset.rows(ids, nbytes)
        if where is not None:
            self._rows[1].copy_rows(where, out)
            return np.ones(len(ids), np.bool_)
        there = np.zeros(len(ids), np.bool_)
        with contextlib.suppress(ValueError):  # another thread has closed the client
            for i, place in enumerate(self.table.offset[ids].tolist()):
                pieces = runs.pieces(self.client.arena.view, place, nbytes)
                if pieces is not None:
                    out[i] = np.frombuffer(b"".join(pieces), np.uint8)
                    there[i] = True
        return there

    def close(self) -> None:
        """End the session; a worker's close only releases its own side."""
        if self._closed:
            return
        self._closed = True
        if self._trainer:
            self.client.notify(messages.Close(self.id))
        # Words and table stay mapped until the session is freed: other threads may be reading.

    def _send(self, message: messages.RequestMessage, *arrays: NDArray[Any]) -> bool:
        if self.ended:
            return False
        try:
            self.client.send(message, *arrays)
        except Exception:  # noqa: BLE001  lost, or no memory: costs speed, never a batch
            _log.debug("the daemon did not receive a message", exc_info=True)
            return False
        except BaseException:  # Ctrl-C: it may have been sent or not
            self.lost = True
            raise
        return True
