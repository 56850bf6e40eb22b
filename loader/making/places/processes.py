"""WorkerPool: the worker processes of one iterator at a time, their sockets and results."""

from __future__ import annotations

import atexit
import contextlib
import errno
import mmap
import os
import select
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from multiprocessing.process import BaseProcess
from pickle import PicklingError
from typing import TYPE_CHECKING, Protocol, cast

from creel.cache.memory.memfd import Descriptor, sealed_memfd
from creel.loader.data.reading.bad_samples import BadSample, Key
from creel.loader.making.batch_times import STAGE_NAMES, STARTING, BatchTimes
from creel.loader.making.places.made import Death, Event, Made
from creel.loader.making.places.place import BatchPlace, Slots, WorkerProcess
from creel.loader.making.task import Task
from creel.loader.making.transport.batch_message import BatchMessage, Inbox
from creel.loader.making.transport.channel import Channel, pair
from creel.loader.making.transport.unpacking import discard
from creel.loader.making.workers.kernel_waits import Reader, process
from creel.loader.making.workers.worker import WorkerArgs, worker_main
from creel.loader.making.workers.worker_words import BATCH, SINCE_NS, STAGE, WorkerWords
from creel.system.forks import at_fork
from creel.system.limits import may_keep
from creel.system.python_open import text_of

if TYPE_CHECKING:
    from creel.loader.making.places.other_ranks import Followers

#: Seconds that closing waits for workers that run user code, as in torch.
GRACE_S = 5.0
#: torch's wording.
_UNPICKLED = (
    "Got pickle error when attempting to start a worker Process. "
    "This might be because the worker Process arguments are not picklable. "
    "Python 3.14+ changed the multiprocessing start method in non-Mac POSIX platforms "
    "to 'forkserver', which requires the worker Process arguments to be picklable. "
    "You can also try multiprocessing.set_start_method('fork')."
)
#: Most bytes of slots that a pool leaves to the next one; they are kept while the loader lives.
_SPARE_NBYTES = 256 << 20
#: Errors for lack of descriptors, memory or space, in the machine or the process.
_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC})


class Context(Protocol):
    """The parts of a multiprocessing context that a pool uses."""

    Process: Callable[..., BaseProcess]

    def get_start_method(self) -> str:
        """Return "fork", "spawn" or "forkserver"."""
        ...


class WorkerPool(BatchPlace):
    """Worker processes, their sockets and their shared words.

    Only the process that made it (`pid`) may use it. One thread receives; any thread may send.
    """

    def __init__(
        self,
        context: Context,
        args: WorkerArgs,
        workers: int,
        max_leased: int,
        spare: Slots = (),
        followers: Followers | None = None,
    ) -> None:
        """Start `workers` processes in `context`, each with `args` and its own worker_id.

        spare: the slots of an ended pool, for each worker.
        followers: other ranks that also get the batches.
        """
        super().__init__()
        self._followers = followers
        self.closed = False
        self._workers = workers
        self._max_leased = max_leased
        # Other ranks cannot inherit slots.
        self._forks = context.get_start_method() == "fork" and followers is None
        self._events: deque[Event] = deque()
        self._poll = select.poll()
        self._watched: dict[int, tuple[WorkerProcess, int, bool]] = {}
        words = Descriptor(sealed_memfd("creel-workers", WorkerWords.nbytes(workers)))
        self._words = WorkerWords(words.fd, workers)
        self._last_counts = self._words.counts()
        _pools.add(self)
        try:
            for i in range(workers):
                inherited = tuple(spare[i]) if self._forks and i < len(spare) else ()
                self.members.append(
                    self._start_worker(context, i, words, replace(args, inherited=inherited))
                )
        except BaseException:
            self.close()  # stops those already started, which the caller cannot reach
            raise

    # --- starting and stopping ------------------------------------------------------------

    def _start_worker(
        self, context: Context, worker: int, words: Descriptor, args: WorkerArgs
    ) -> WorkerProcess:
        ours, theirs = pair()
        channel = Channel(ours)
        _ends.add(channel)
        row = self._words.rows[worker]
        row[STAGE], row[SINCE_NS] = STARTING, time.monotonic_ns()
        process = context.Process(
            target=worker_main, args=(theirs, replace(args, worker_id=worker))
        )
        process.daemon = True
        try:
            process.start()
        except BaseException as e:
            channel.close()
            if isinstance(e, (TypeError, AttributeError, PicklingError)):
                warnings.warn(_UNPICKLED, stacklevel=2)
            raise
        finally:
            theirs.close()
        channel.post(("words",), [words.fd, *self._given()])
        inbox = Inbox(
            max_leased=self._max_leased,
            inherited=args.inherited,
            private=self._followers is not None,
        )
        member = WorkerProcess(process, channel, inbox)
        for fd, is_sentinel in ((channel.fileno(), False), (process.sentinel, True)):
            self._watched[fd] = (member, worker, is_sentinel)
            self._poll.register(fd, select.POLLIN)
        return member

    def _given(self) -> list[int]:
        """Return what descriptors a worker gets beside that of its words."""
        return []

    def _stop_worker(self, member: WorkerProcess) -> None:
        self._unwatch(member)
        with contextlib.suppress(OSError):
            member.channel.post(("quit",))
        member.channel.close()

    def _unwatch(self, member: WorkerProcess) -> None:
        for fd in (member.channel.fileno(), member.process.sentinel):
            if self._watched.pop(fd, None) is not None:
                self._poll.unregister(fd)

    # --- sending --------------------------------------------------------------------------

    def again(self, bad: Mapping[Key, str]) -> None:
        super().again(bad)
        for member in self.members:
            self._post(member, ("again", self.tag, dict(bad)))

    def bind(self, digest: str) -> None:
        for member in self.members:
            self._post(member, ("bind", digest))

    def join(self, ticket: tuple[str, str, int]) -> None:
        for member in self.members:
            if member.ticket != ticket:
                member.ticket = ticket
                self._post(member, ("join", *ticket))

    def task(self, worker: int, task: Task) -> None:
        if self._followers is not None:
            self._followers.expect(task.tag, task.batch, task.index)
        self._post(self.members[worker], task.message(self._freed(worker)))

    def _freed(self, worker: int) -> list[int]:
        """Return the slots that a worker may use again."""
        freed = self.members[worker].inbox.returned()
        return freed if self._followers is None else self._followers.returned(worker, freed)

    @staticmethod
    def _post(member: WorkerProcess, message: tuple[object, ...]) -> None:
        try:
            member.channel.post(message)
        except OSError as e:
            # The wait for its batch finds and names a dead worker.
            if e.errno in _SHORT:
                member.dead = True  # unused from now on: it lacks this batch
                raise

    # --- receiving ------------------------------------------------------------------------

    def receive(self, timeout_s: float) -> Event | None:
        deadline = time.monotonic() + timeout_s
        while not self._events:
            left = deadline - time.monotonic()
            if self._congested():
                left = min(left, 0.02)
            ready = self._poll.poll(max(left, 0) * 1000)
            for fd, _ in ready:
                self._on_ready(fd)
            if not ready and time.monotonic() >= deadline:
                self._find_dead()
                break
        return self._events.popleft() if self._events else None

    def _find_dead(self) -> None:
        """Find ended workers whose sentinels another process keeps open.

        That process is a worker's child, or a worker that another thread forked at the same time.
        """
        for member in self.members:
            if not member.dead and member.process.exitcode is not None:
                self._on_ready(member.process.sentinel)

    def _congested(self) -> bool:
        """Send waiting packets; return whether any are left."""
        waiting = False
        for member in self.members:
            if not member.dead and member.channel.congested:
                waiting |= not self._flush(member)
        return waiting

    @staticmethod
    def _flush(member: WorkerProcess) -> bool:
        try:
            return member.channel.flush()
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
        while member.channel.fileno() in self._watched and self._read(member, worker):
            pass
        self._unwatch(member)
        member.dead = True
        self._died(worker)

    def _died(self, worker: int) -> None:  # noqa: ARG002  a subclass needs it
        """Note the death of a worker, all of whose results were taken."""
        self._events.append(Death())

    def _read(self, member: WorkerProcess, worker: int) -> bool:
        """Receive one message from a worker; False if there is none."""
        try:
            return self._take(member, worker)
        except EOFError:
            # The sentinel reports its death; polling the end of file would be a busy loop.
            fd = member.channel.fileno()
            if self._watched.pop(fd, None) is not None:
                self._poll.unregister(fd)
            return False
        except OSError:
            member.dead = True  # unused from now on: one of its batches is lost
            raise

    def _take(self, member: WorkerProcess, worker: int) -> bool:
        """`_read` without handling EOFError, or OSError for lack of a descriptor or mapping."""
        got = member.channel.get(0)
        if got is None:
            return False
        message, fds = got
        match message:
            case (
                "batch",
                int(tag),
                int(index),
                BatchMessage() as sent,
                BatchTimes() as times,
                tuple() as bad,
            ):
                self.bad.extend(cast("tuple[BadSample, ...]", bad))
                if not self._expects(tag, index, times):
                    discard(member.inbox.accept(sent, fds), member.inbox)
                    return True
                if self._followers is not None:
                    self._followers.send(tag, index, worker, sent, fds, times, bad)
                packed = member.inbox.accept(sent, fds)
                self._events.append(Made(worker, tag, index, packed, times, inbox=member.inbox))
            case _:
                self._take_part(worker, message, fds)
        return True

    def _take_part(self, worker: int, message: tuple[object, ...], fds: list[int]) -> None:
        """Take what is no whole batch."""

    def _expects(self, tag: int, batch: int, times: BatchTimes) -> bool:  # noqa: ARG002  as above
        """Note that a batch has arrived; False if it had before."""
        return True

    def lost(self) -> list[int]:
        return [i for i, member in enumerate(self.members) if member.dead]

    # --- watching -------------------------------------------------------------------------

    def stage(self, worker: int) -> tuple[int, int, float]:
        row = self._words.rows[worker]
        return row[STAGE], row[BATCH], (time.monotonic_ns() - row[SINCE_NS]) / 1e9

    def readers(self) -> list[Reader]:
        rows = zip(self.members, self._words.rows, strict=True)
        return [process(m.process.pid or 0, partial(_stage, row)) for m, row in rows]

    def new_counts(self) -> dict[str, int]:
        before, self._last_counts = self._last_counts, self._words.counts()
        return {name: n - before[name] for name, n in self._last_counts.items()}

    def describe(self, worker: int) -> str:
        stage, batch, seconds = self.stage(worker)
        pid = self.members[worker].process.pid
        state = _process_state(pid)
        return (
            f"worker {worker} (pid {pid}, {state}) has been {STAGE_NAMES[stage]}"
            f" for {seconds:.0f} s (batch {batch})"
        )

    # --- closing --------------------------------------------------------------------------

    def close(self) -> Slots:
        """Stop all workers, first by message, after 5 s by signals. Does nothing in a forked child.

        Returns:
            Slots for another pool.
        """
        if self.closed or os.getpid() != self.pid:
            return ()
        self.closed = True
        _pools.discard(self)  # first, since Ctrl-C may interrupt this
        if self._followers is not None:
            self._followers.close()
        self._words.void = self.tag + 1  # workers skip tasks they have not begun
        if self.pinner is not None:
            self.pinner.stop()
        for member in self.members:
            self._stop_worker(member)
        deadline = time.monotonic() + GRACE_S
        for stop in (None, "terminate", "kill"):
            for member in self.members:
                if stop is not None and member.process.is_alive():
                    getattr(member.process, stop)()
            for member in self.members:
                member.process.join(max(deadline - time.monotonic(), 0.0))
            deadline = time.monotonic() + 1
        spare = [self._spare(member) for member in self.members]
        for member in self.members:
            member.inbox.close()
        return spare

    def _spare(self, member: WorkerProcess) -> list[mmap.mmap]:
        if not self._forks or not may_keep() or member.process.is_alive():
            return []
        return member.inbox.unused(_SPARE_NBYTES // self._workers)


def _stage(row: memoryview) -> tuple[int, int]:
    """Return the stage of the worker with these shared words, and its batch."""
    return row[STAGE], row[BATCH]


def _process_state(pid: int | None) -> str:
    """Return the state of a process from /proc, in a few words."""
    try:
        line = text_of(f"/proc/{pid}/stat")
    except OSError:
        return "gone"
    letter = line.rpartition(")")[2].split()[0]
    names = {"T": "stopped by a signal", "t": "held by a debugger", "D": "in uninterruptible I/O"}
    return names.get(letter, {"S": "asleep", "R": "running", "Z": "dead"}.get(letter, letter))


_ends: weakref.WeakSet[Channel] = weakref.WeakSet()
#: All open pools, kept from garbage collection until `close`.
_pools: set[WorkerPool] = set()


def until_forked(*channels: Channel) -> None:
    """Close these channels in forked children."""
    _ends.update(channels)


def _abandon_inherited() -> None:
    """Close the parent's ends in a forked child, so that workers notice if the parent dies."""
    for channel in list(_ends):
        channel.abandon()
    _ends.clear()
    _pools.clear()


def _close_all() -> None:
    for pool in list(_pools):
        pool.close()


at_fork(after_in_child=_abandon_inherited)
# atexit runs this before multiprocessing's handler, registered earlier, which waits without limit.
atexit.register(_close_all)
