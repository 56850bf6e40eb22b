"""The workers of one iterator at a time: their processes, sockets, and results."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import select
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from pickle import PicklingError
from typing import Protocol

import numpy as np

from creel.forks import at_fork
from creel.loader.events import Batch, Death, Event
from creel.loader.parcel import Inbox, Parcel
from creel.loader.pinner import Pinner
from creel.loader.stages import STAGES, STARTING
from creel.loader.wire import Wire, pair
from creel.loader.worker import (
    BATCH,
    DIRECT_NBYTES,
    FIRST,
    SINCE_NS,
    SOURCE_NS,
    STAGE,
    VOID,
    WORDS,
    Outfit,
    board_nbytes,
    worker_main,
)

#: How long closing waits for workers that are in the user's code, as torch does, seconds.
_GRACE_S = 5.0
#: torch's words.
_UNPICKLED = (
    "Got pickle error when attempting to start a worker Process. "
    "This might be because the worker Process arguments are not picklable. "
    "Python 3.14+ changed the multiprocessing start method in non-Mac POSIX platforms "
    "to 'forkserver', which requires the worker Process arguments to be picklable. "
    "You can also try multiprocessing.set_start_method('fork')."
)
#: What a machine, or this process, may run out of.
_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC})


class Context(Protocol):
    """The parts of a multiprocessing context that we use."""

    Process: Callable[..., BaseProcess]


@dataclass(eq=False)
class Member:
    """One worker process as the trainer sees it."""

    process: BaseProcess
    wire: Wire
    inbox: Inbox
    ticket: tuple[str, str, int] | None = None  # of the session it reads through
    dead: bool = False


class Pool:
    """A number of workers, their sockets and their board.

    Only the process that made it may use it; `pid` tells. One thread receives; any may post.
    """

    def __init__(self, context: Context, outfit: Outfit, workers: int, max_leased: int) -> None:
        """Start `workers` processes in `context`; worker i is born with `outfit` (and its id)."""
        self.pid = os.getpid()
        self.tag = 0
        self.members: list[Member] = []
        self.pinner: Pinner | None = None
        self.closed = False
        self._workers = workers
        self._max_leased = max_leased
        self._events: deque[Event] = deque()
        self._poll = select.poll()
        self._watched: dict[int, tuple[Member, int, bool]] = {}
        self._open_board()
        self._heard = np.zeros(WORDS, np.int64)
        _pools.add(self)
        try:
            for i in range(workers):
                self.members.append(self._hire(context, i, outfit))
        except BaseException:
            self.close()  # those that are there: nobody else knows of them
            raise

    def _open_board(self) -> None:
        import mmap

        self._board_fd = os.memfd_create("creel-workers", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._board_fd).atexit = False
        os.ftruncate(self._board_fd, board_nbytes(self._workers))
        self.board = memoryview(mmap.mmap(self._board_fd, 0)).cast("q")

    # --- hiring and firing ----------------------------------------------------------------

    def _hire(self, context: Context, worker: int, outfit: Outfit) -> Member:
        ours, theirs = pair()
        wire = Wire(ours)
        _ends.add(wire)
        self.board[FIRST + WORDS * worker + STAGE] = STARTING
        self.board[FIRST + WORDS * worker + SINCE_NS] = time.monotonic_ns()
        process = context.Process(
            target=worker_main, args=(theirs, replace(outfit, worker_id=worker))
        )
        process.daemon = True
        try:
            process.start()
        except BaseException as e:
            wire.close()
            if isinstance(e, (TypeError, AttributeError, PicklingError)):
                warnings.warn(_UNPICKLED, stacklevel=2)
            raise
        finally:
            theirs.close()
        wire.post(("board",), [self._board_fd])
        member = Member(process, wire, Inbox(self._max_leased))
        for fd, is_sentinel in ((wire.fileno(), False), (process.sentinel, True)):
            self._watched[fd] = (member, worker, is_sentinel)
            self._poll.register(fd, select.POLLIN)
        return member

    def _dismiss(self, member: Member) -> None:
        self._unwatch(member)
        with contextlib.suppress(OSError):
            member.wire.post(("quit",))
        member.wire.close()
        member.inbox.close()

    def _unwatch(self, member: Member) -> None:
        for fd in (member.wire.fileno(), member.process.sentinel):
            if self._watched.pop(fd, None) is not None:
                self._poll.unregister(fd)

    # --- sending --------------------------------------------------------------------------

    def again(self) -> int:
        """Tell all workers to go on as they are; the tag of the epoch that begins."""
        self.tag += 1
        for member in self.members:
            self._post(member, ("again", self.tag))
        return self.tag

    def join(self, ticket: tuple[str, str, int]) -> None:
        """Let all workers read through a session of the daemon."""
        for member in self.members:
            if member.ticket != ticket:
                member.ticket = ticket
                self._post(member, ("join", *ticket))

    def task(
        self, worker: int, tag: int, batch: int, index: object, step: int, *, many: bool
    ) -> None:
        """Give a batch to a worker; `many`: the index is an array that stands for a list of ints.

        Raises:
            OSError: no descriptor or no memory is left for a long index.
            Exception: whatever pickling `index` raises.
        """
        member = self.members[worker]
        kind = "tasks" if many else "task"
        self._post(member, (kind, tag, batch, index, member.inbox.take_freed(), step))

    @staticmethod
    def _post(member: Member, message: tuple[object, ...]) -> None:
        try:
            member.wire.post(message)
        except OSError as e:
            # A dead worker is noticed, and named, where its batch is waited for.
            if e.errno in _SHORT:
                member.dead = True  # to us: who goes on would get an epoch that lacks a batch
                raise

    def void(self, below: int) -> None:
        """Let workers skip the tasks of all tags < `below` that they have not begun."""
        self.board[VOID] = max(self.board[VOID], below)

    # --- receiving ------------------------------------------------------------------------

    def check_process(self) -> None:
        """Raise RuntimeError in a forked child: the sockets and the pids are its parent's."""
        if os.getpid() != self.pid:
            raise RuntimeError(
                f"this iterator belongs to process {self.pid}, whose workers answer to it alone;"
                f" in the forked process {os.getpid()} begin a new one: iter(loader)"
            )

    def next_event(self, timeout_s: float) -> Event | None:
        """What happened next, or None when nothing did in time. Death comes after all results."""
        return self.receive(timeout_s) if self.pinner is None else self.pinner.get(timeout_s)

    def receive(self, timeout_s: float) -> Event | None:
        """`next_event` for the one thread that reads the sockets."""
        deadline = time.monotonic() + timeout_s
        while not self._events:
            left = deadline - time.monotonic()
            if self._congested():
                left = min(left, 0.02)
            ready = self._poll.poll(max(left, 0) * 1000)
            for fd, _ in ready:
                self._on_ready(fd)
            if not ready and time.monotonic() >= deadline:
                break
        return self._events.popleft() if self._events else None

    def _congested(self) -> bool:
        """Send what waits; whether some of it still does."""
        waiting = [m for m in self.members if not m.dead and m.wire.congested]
        return any([not self._flush(m) for m in waiting])  # noqa: C419  flush all of them

    @staticmethod
    def _flush(member: Member) -> bool:
        try:
            return member.wire.flush()
        except OSError:
            return True

    def _on_ready(self, fd: int) -> None:
        watched = self._watched.get(fd)
        if watched is None:
            return
        member, worker, is_sentinel = watched
        if not is_sentinel:
            self._read(member, worker)
            return
        while member.wire.fileno() in self._watched and self._read(member, worker):
            pass
        self._unwatch(member)
        member.dead = True
        self._events.append(Death(worker))

    def _read(self, member: Member, worker: int) -> bool:
        """Take one message from a worker; False when there is none."""
        try:
            return self._take(member, worker)
        except EOFError:
            # Its sentinel tells the rest; a readable end of file would only keep us awake.
            fd = member.wire.fileno()
            if self._watched.pop(fd, None) is not None:
                self._poll.unregister(fd)
            return False
        except OSError:
            member.dead = True  # to us: one of its batches is lost, and would be waited for
            raise

    def _take(self, member: Member, worker: int) -> bool:
        """`_read`, or EOFError; OSError where there is no descriptor or no room for a mapping."""
        got = member.wire.get(0)
        if got is None:
            return False
        message, fds = got
        match message:
            case ("batch", int(tag), int(index), Parcel() as parcel, tuple() as times):
                packed = member.inbox.accept(parcel, fds)
                self._events.append(Batch(worker, tag, index, packed, times, member.inbox))
        return True

    def open(self, event: Batch) -> object:
        """The batch itself (an ExceptionWrapper when the worker failed)."""
        if self.pinner is not None:
            return event.packed
        return event.inbox.unpack(event.packed)

    def discard(self, event: Batch) -> None:
        """Give back what a batch holds that nobody will take."""
        if self.pinner is None:
            event.inbox.discard(event.packed)

    # --- watching -------------------------------------------------------------------------

    def stage(self, worker: int) -> tuple[int, int, float]:
        """(stage, batch, seconds in it) of a worker, by its own account."""
        words = FIRST + WORDS * worker
        since = (time.monotonic_ns() - self.board[words + SINCE_NS]) / 1e9
        return self.board[words + STAGE], self.board[words + BATCH], since

    def news(self) -> list[int]:
        """All workers' counters (SOURCE_NS to DIRECT_NBYTES) since this was asked last."""
        words = np.array(self.board[FIRST:], np.int64).reshape(-1, WORDS).sum(axis=0)
        new, self._heard = words - self._heard, words
        return [int(n) for n in new[SOURCE_NS : DIRECT_NBYTES + 1]]

    def describe(self, worker: int) -> str:
        """One sentence on what a worker is doing, for warnings."""
        stage, batch, seconds = self.stage(worker)
        pid = self.members[worker].process.pid
        state = _process_state(pid)
        return (
            f"worker {worker} (pid {pid}, {state}) has been {STAGES[stage]}"
            f" for {seconds:.0f} s (batch {batch})"
        )

    # --- the end --------------------------------------------------------------------------

    def close(self) -> None:
        """End all workers: politely, after 5 s by force. Does nothing in a forked child."""
        if self.closed or os.getpid() != self.pid:
            return
        self.closed = True
        self.void(self.tag + 1)
        if self.pinner is not None:
            self.pinner.stop()
        for member in self.members:
            self._dismiss(member)
        deadline = time.monotonic() + _GRACE_S
        for stop in (None, "terminate", "kill"):
            for member in self.members:
                if stop is not None and member.process.is_alive():
                    getattr(member.process, stop)()
            for member in self.members:
                member.process.join(max(deadline - time.monotonic(), 0.0))
            deadline = time.monotonic() + 1
        _pools.discard(self)


def _process_state(pid: int | None) -> str:
    """What /proc says of a process, in a word."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "gone"
    letter = line.rpartition(")")[2].split()[0]
    names = {"T": "stopped by a signal", "t": "held by a debugger", "D": "in uninterruptible I/O"}
    return names.get(letter, {"S": "asleep", "R": "running", "Z": "dead"}.get(letter, letter))


_ends: weakref.WeakSet[Wire] = weakref.WeakSet()
#: All pools that are not closed: no garbage collection gets at their sockets before `close` does.
_pools: set[Pool] = set()


def _forget_inherited() -> None:
    """In a forked child: drop the parent's ends, so that workers notice when the parent dies."""
    for wire in list(_ends):
        wire.abandon()
    _ends.clear()
    _pools.clear()


def _close_all() -> None:
    for pool in list(_pools):
        pool.close()


at_fork(after_in_child=_forget_inherited)
# Registered after multiprocessing's own handler, hence run before it, which waits without a limit.
atexit.register(_close_all)
