"""Session: one stream of a dataset's steps, as the trainer that makes it and its workers see it.

The daemon says on a board in shared memory which steps are ready; a warm batch costs one comparison
there and no message. Where the daemon is slow, lost or draining, `ready` and `wait` say False, and
the caller reads the source itself.
"""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from creel.cache.arena import Rows
from creel.cache.board import (
    ABSENT,
    DONE,
    HEARTBEAT,
    READY,
    REVOKED,
    STATE,
    TRUNCATED,
    WANTED,
    Board,
    Table,
)
from creel.errors import DaemonLostError
from creel.forks import at_fork
from creel.messages import Begin, Close, Extend, LineRequest, Opened, Truncate, Wait

if TYPE_CHECKING:  # each knows the other
    from creel.loader.client import Client

#: A heartbeat older than this means a stopped or swapped-out daemon; it beats every 0.1 s.
STALE_NS = 2_000_000_000
#: Nor is that believed at the first look: the whole machine may have stood still, or all of a job
#: (Slurm's suspend). A daemon that goes on has beaten again long before this.
DOUBT_NS = 500_000_000
#: How late, at worst, a waiting thread notices a stale heartbeat.
SLICE_S = 0.05
_PIECE = 1 << 15  # objects of one Extend: the daemon takes it in in about 3 ms


class Session:
    """One stream of steps. The trainer extends and completes it; its workers only read."""

    def __init__(
        self, client: Client, opened: Opened, board: Board, table: Table, trainer: bool
    ) -> None:
        self.id = opened.session
        self.dataset = opened.dataset
        self.board = board
        self.table = table
        self._client = client
        self._trainer = trainer
        self._closed = False
        self._lost = False
        self._truncates = 0
        self._doubted = (0, 0)  # a stale heartbeat, and when it was first seen to be
        self._rows: tuple[int, Rows] | None = None  # of objects of so many bytes
        _sessions.add(self)

    @property
    def token(self) -> str:
        """What a worker needs, besides `id`, to attach to this session."""
        return self._client.token

    @property
    def alive(self) -> bool:
        """Whether the daemon serves: connected, beating, not draining."""
        if self._closed or self._lost or not self._client.alive or self.board[STATE] != 0:
            return False
        now, beat = time.monotonic_ns(), self.board[HEARTBEAT]
        if now - beat < STALE_NS:
            return True
        if self._doubted[0] != beat:
            self._doubted = (beat, now)
        return now - self._doubted[1] < DOUBT_NS

    def _gone(self) -> bool:
        return not self.alive

    def extend(
        self,
        epoch: int,
        step: int,
        objects: NDArray[np.integer],
        ends: NDArray[np.integer],
        *,
        blind: bool = False,
    ) -> bool:
        """Add the plan of steps `step, step+1, ...`; see `messages.Extend`.

        Args:
            objects: (k,) object ids in order of reading.
            ends: (b,) step+i reads objects[ends[i-1]:ends[i]]; ends[-1] == k.
            blind: these are about to be read, and nobody knows what comes after them.

        Returns:
            False when the daemon is lost: the plan does not matter any more.
        """
        objects = np.asarray(objects, np.dtype("<i4"))
        ends = np.asarray(ends, np.dtype("<i8"))
        first = 0
        while first < len(ends):
            start = int(ends[first - 1]) if first else 0
            last = max(int(np.searchsorted(ends, start + _PIECE, side="right")), first + 1)
            message = Extend(self.token, self.id, epoch, step + first, blind)
            piece = objects[start : int(ends[last - 1])]
            if not self._say(message, piece, ends[first:last] - start):
                self._lost |= first > 0  # the daemon has a part of it, which does not go on
                return False
            first = last
        return True

    def truncate(self, step: int) -> bool:
        """Forget the plan from `step` on; False when the daemon is lost.

        Whoever reads a step from `step` on finds it not ready afterwards, until the plan goes on:
        what was given out of the old plan must not be used from then on. Returns when READY speaks
        of the new plan (a round trip); a daemon that does not say so in time is lost for good,
        since its READY could mean either.
        """
        self._truncates += 1
        self.board[WANTED] = min(self.board[WANTED], step)  # of the plan that is void now
        if not self._say(Truncate(self.token, self.id, step)):
            self._lost = True  # its READY goes on speaking of the old plan
            return False
        pause = 2e-5
        while self.board[TRUNCATED] < self._truncates:
            if self._gone():
                self._lost = True
                return False
            time.sleep(pause)
            pause = min(pause * 2, 0.001)
        return True

    def begin(self, epoch: int) -> bool:
        """The epoch begins now: its files are looked at again before its steps are ready."""
        return self._say(Begin(self.token, self.id, epoch))

    def stamp(self) -> int:
        """How often READY was taken back; what was copied while this changed may be torn."""
        return self.board[REVOKED]

    def hold(self, step: int) -> int:
        """The stamp under which the objects of a ready step may be copied; -1 when not ready."""
        stamp = self.stamp()  # before READY is looked at
        return stamp if self.ready(step) else -1

    def held(self, step: int, stamp: int) -> bool:
        """Whether what was copied under a stamp is whole."""
        return self.ready(step) and self.stamp() == stamp

    def ready(self, step: int) -> bool:
        """Whether the objects of `step` can be read from the arena (or have failed) now."""
        return not (self._closed or self._lost) and self.board[READY] > step

    def wait(self, step: int, timeout_s: float) -> bool:
        """Wait until `step` is ready; False when it is not in time or the daemon is lost."""
        if self.ready(step):
            return True
        if not self.alive:
            return False
        if self._trainer:
            self.board[WANTED] = max(self.board[WANTED], step + 1)
        client = self._client
        call = next(client.calls)
        if not self._say(Wait(self.token, call, self.id, step)):
            return False
        deadline = time.monotonic() + timeout_s
        while True:
            heard = client.heard
            if self.ready(step):
                return True
            left = deadline - time.monotonic()
            if left <= 0 or self._gone() or client.refused(call):
                return self.ready(step)
            client.listen(min(left, SLICE_S), heard)

    def done(self, step: int) -> None:
        """All steps < `step` were read: their bytes may go. Never goes back."""
        if not self._closed and not self._lost and step > self.board[DONE]:
            self.board[DONE] = step

    def forget(self) -> None:
        """In a forked child: the board is the parent's, and its bytes are not ours to free."""
        self._lost = True

    def view(self, object_id: int) -> memoryview | None:
        """The object's bytes, read-only, while its step is in [DONE, READY); None when absent."""
        offset = int(self.table.offset[object_id])
        if offset == ABSENT:
            return None
        try:
            return self._client.arena.view[offset : offset + int(self.table.length[object_id])]
        except ValueError:  # another thread has hung up
            return None

    def rows(self, offset: NDArray[np.int64], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Fill row i of (n, nbytes) `out` with the arena's bytes at offset[i], unless it is ABSENT.

        Returns:
            (n,) which rows were filled.
        """
        nbytes = out.shape[1]
        if self._rows is None or self._rows[0] != nbytes:
            self._rows = nbytes, Rows(self._client.arena, nbytes)
        there: NDArray[np.bool_] = offset != ABSENT
        if self._rows[1].copy(offset, out):
            return there
        arena = self._client.arena.array
        if not len(arena):  # another thread has hung up
            return np.zeros(len(offset), np.bool_)
        for i, at in enumerate(offset.tolist()):
            if there[i]:
                out[i] = arena[at : at + nbytes]
        return there

    def close(self) -> None:
        """End the session; a worker only lets go of it."""
        if self._closed:
            return
        self._closed = True
        if self._trainer:
            self._client.tell(Close(self.id))
        # Board and table go with the session: other threads may be reading right now.

    def _say(self, message: LineRequest, *arrays: NDArray[Any]) -> bool:
        if self._closed or self._lost:
            return False
        try:
            self._client.send(message, *arrays)
        except DaemonLostError:
            return False
        return True


_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def _forget_inherited() -> None:
    for session in list(_sessions):
        session.forget()
    _sessions.clear()


at_fork(after_in_child=_forget_inherited)
