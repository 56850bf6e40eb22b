"""Client: a training process's side of the conversation with its node's daemon.

Nothing here raises into a training step: where the daemon is slow, lost or draining, `ready` and
`wait` say False, and the caller reads the source itself. Bytes of steps < READY stay valid even
when the daemon dies: the mapping outlives it, and nobody is left to write there.

A client belongs to the process that made it. After a fork the child's copy is dead (`alive` is
False) and its descriptors are closed, so that the daemon sees the parent's death at once.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import select
import socket
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, cast

from numpy.typing import NDArray

from creel.addresses import second_address
from creel.cache.arena import ArenaView
from creel.cache.board import Board, Table
from creel.cache.manifest import Manifest
from creel.errors import (
    ConfigError,
    DaemonLostError,
    MalformedError,
    NoDaemonError,
    UnavailableError,
)
from creel.forks import at_fork
from creel.loader.packets import (
    M,
    check_owner,
    close_all,
    default_name,
    exchange,
    map_arena,
    pidfd_of,
    resolve,
    sealed_copy,
)
from creel.loader.session import SLICE_S, Session
from creel.messages import (
    PROTOCOL,
    Ask,
    Attach,
    Close,
    DeskRequest,
    Failed,
    Hello,
    LineReply,
    LineRequest,
    Open,
    Opened,
    Register,
    Registered,
    Told,
    Welcome,
    decode,
    encode,
)
from creel.peers import holder

if TYPE_CHECKING:
    import zmq

_DESK_S = 10.0  # a desk answer takes well below 10 ms; the daemon may be starting on a busy node
_REGISTER_S = 120.0  # checking a manifest of 10 million files takes seconds
_LINE_FDS = 16  # a context and a DEALER have 8 (libzmq 4.3); other threads open some meanwhile
_LINE_THREADS = 4  # a context starts 2 (libzmq 4.3); others may start some meanwhile


class Client:
    """A connection to the daemon. Make one with `connect`; all methods are thread-safe."""

    def __init__(self, desk: socket.socket, welcome: Welcome, arena: ArenaView) -> None:
        self.token = welcome.token
        self.daemon_pid = welcome.pid
        self.arena = arena
        self._line_address = welcome.line
        self._desk = desk
        self._pid = os.getpid()
        self._lost = False
        # A finaliser may end a session while this thread is inside of either: hence reentrant.
        self._desk_lock = threading.RLock()
        self._line_lock = threading.RLock()
        self._sending = False
        self._line: zmq.Socket[bytes] | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._line_fd = -1
        self.heard = 0  # answers, so far
        self._bells: set[int] = set()  # of threads that listen: rung when others take in answers
        self.calls = itertools.count(1)
        self._answers: dict[int, Told | Failed] = {}
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        _clients.add(self)

    @classmethod
    def connect(
        cls,
        address: str = "",
        role: str = "trainer",
        token: str = "",
        *,
        patron: int = 0,
        timeout_s: float = _DESK_S,
    ) -> Client:
        """Connect to the daemon at `address` (a name, "@abstract", or "" for the default).

        Args:
            role: "trainer", "worker" (with its trainer's token) or "cli".
            patron: pid of a process that this one works for: an embedded daemon stays as long as it
                lives, and not just until this one ends.

        Raises:
            NoDaemonError: nobody listens, or who listens is somebody else.
            DaemonLostError: it listens, and does not answer.
            UnavailableError: the daemon refuses us, and says why; or cannot be understood.
        """
        where = resolve(address)
        try:
            return cls._connect(where, role, token, patron, timeout_s)
        except NoDaemonError:
            # Another user may hold the first address, or have held it when our daemon started.
            named = not address.startswith(("@", "\0"))
            second = second_address(address or default_name()) if named else None
            if second is None:
                raise
            with contextlib.suppress(NoDaemonError):
                return cls._connect(second, role, token, patron, timeout_s)
            raise

    @classmethod
    def _connect(cls, where: str, role: str, token: str, patron: int, timeout_s: float) -> Client:
        shown = where.replace(chr(0), "@")
        desk = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            desk.settimeout(timeout_s)
            _knock(desk, where, timeout_s)
            check_owner(desk, where)
            hello = Hello(PROTOCOL, role, os.getpid(), token)
            with pidfd_of(patron) as along:
                welcome, fds = exchange(desk, hello, Welcome, along)
            arena = map_arena(fds, welcome.arena_nbytes)
        except TimeoutError as e:
            desk.close()
            raise DaemonLostError(
                f"the daemon at {shown} has not answered for {timeout_s:g} s: is it stopped, or"
                " the machine out of memory?"
            ) from e
        except OSError as e:
            desk.close()
            raise NoDaemonError(f"no creel daemon at {shown}: {e}") from e
        except MalformedError as e:
            desk.close()
            raise UnavailableError(
                f"who sits at {shown} is no daemon of this version of creel: end it, or choose"
                f" another daemon.name ({e})"
            ) from e
        except BaseException:
            desk.close()
            raise
        try:
            return cls(desk, welcome, arena)
        except BaseException:
            desk.close()
            raise

    @property
    def alive(self) -> bool:
        """Whether the daemon still holds its end of the desk's connection."""
        return not self._lost and os.getpid() == self._pid and not self._hung_up()

    def register(self, manifest: Manifest) -> str:
        """Make a dataset known; the key under which sessions may be opened.

        Raises:
            UnavailableError: refused, or the daemon is lost.
        """
        data = manifest.to_arrow()
        fd = sealed_copy(data)
        try:
            reply, fds = self._call(Register(len(data)), Registered, (fd,), _REGISTER_S)
        finally:
            os.close(fd)
        close_all(fds)
        return reply.dataset

    def open(
        self,
        dataset: str,
        job: str = "",
        rank: int = 0,
        world: int = 1,
        name: str = "",
        recheck: str = "never",
    ) -> Session:
        """Begin a stream of batches over a registered dataset; see `messages.Open`.

        Raises:
            UnavailableError: refused, or the daemon is lost.
        """
        request = Open(dataset, job, rank, world, name, cast(Any, recheck))
        reply, fds = self._call(request, Opened)
        return self._session(reply, fds, trainer=True)

    def attach(self, session_id: int) -> Session:
        """The session of this worker's trainer.

        Raises:
            UnavailableError: no such session, or the daemon is lost.
        """
        reply, fds = self._call(Attach(session_id), Opened)
        return self._session(reply, fds, trainer=False)

    def ask(self, what: str, *, timeout_s: float = 10.0, **args: object) -> dict[str, Any]:
        """The daemon's answer to a command (see `messages.Ask`).

        Raises:
            ConfigError: the daemon does not know what is meant.
            DaemonLostError: no answer in time.
        """
        call = next(self.calls)
        self.send(Ask(self.token, call, what, args))
        deadline = time.monotonic() + timeout_s
        while True:
            heard = self.heard
            answer = self._answers.pop(call, None)
            if answer is not None:
                break
            left = deadline - time.monotonic()
            if left <= 0 or not self.alive:
                raise DaemonLostError(f"the daemon did not answer {what!r} within {timeout_s:g} s")
            self.listen(min(left, SLICE_S), heard)
        if isinstance(answer, Failed):
            raise ConfigError(answer.reason)
        return answer.body

    def close(self) -> None:
        """Hang up: the daemon takes back everything it held for us."""
        self._lost = True
        for session in list(self._sessions):
            session.close()
        with self._line_lock:
            if self._line is not None:
                self._line.close(linger=0)
            if self._context is not None:
                self._context.term()
            self._line = self._context = None
            self._ring()
        self._desk.close()
        self.arena.close()
        _clients.discard(self)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def forget(self) -> None:
        """In a child of a fork: drop what was inherited without a word to the daemon."""
        self._lost = True
        self._desk.close()
        self._line = self._context = None
        close_all(list(self._bells))
        self._bells.clear()

    def _hung_up(self) -> bool:
        poll = select.poll()  # a new one: two threads may not poll the same
        fd = self._desk.fileno()
        if fd < 0:
            return True
        poll.register(fd, select.POLLRDHUP)
        return bool(poll.poll(0))

    # --- desk ---------------------------------------------------------------------------------

    def _call(
        self,
        request: DeskRequest,
        kind: type[M],
        fds: tuple[int, ...] = (),
        timeout_s: float = _DESK_S,
    ) -> tuple[M, list[int]]:
        with self._desk_lock:
            if not self.alive:
                raise DaemonLostError("the daemon is gone")
            try:
                self._desk.settimeout(timeout_s)
                return exchange(self._desk, request, kind, fds)
            except (OSError, MalformedError) as e:
                self._lost = True  # its answer may still come: the conversation is out of step
                raise DaemonLostError(f"the daemon did not answer: {e}") from e
            except UnavailableError:  # that is an answer
                raise
            except BaseException:  # Ctrl-C: likewise
                self._lost = True
                raise

    def tell(self, request: Close) -> None:
        with self._desk_lock:
            if self.alive:
                try:
                    self._desk.send(encode(request))
                except OSError:
                    self._lost = True

    def _session(self, reply: Opened, fds: list[int], *, trainer: bool) -> Session:
        try:
            session = self._mapped(reply, fds, trainer=trainer)
        except BaseException:  # no room for a mapping, for one: nobody will read there
            if trainer:
                self.tell(Close(reply.session))
            raise
        finally:
            close_all(fds)
        self._sessions.add(session)
        return session

    def _mapped(self, reply: Opened, fds: list[int], *, trainer: bool) -> Session:
        if len(fds) != 2:
            raise DaemonLostError(f"a session comes with 2 descriptors, not {len(fds)}")
        return Session(self, reply, Board(fds[0]), Table(fds[1], reply.objects), trainer)

    # --- line ---------------------------------------------------------------------------------

    def send(self, message: LineRequest, *arrays: NDArray[Any]) -> None:
        """Say it over the line, or raise DaemonLostError."""
        if self._line is None:
            _check_descriptors()
            _check_threads()
        import zmq

        frames = [encode(message), *(a.tobytes() for a in arrays)]
        with self._line_lock:
            if not self.alive:
                raise DaemonLostError("the daemon is gone")
            if self._sending:  # a finaliser: its frames would lie between those of another message
                raise DaemonLostError("the line is busy")
            self._sending = True
            try:
                self._connected().send_multipart(frames, zmq.DONTWAIT)
            except zmq.ZMQError as e:
                raise DaemonLostError(f"the daemon takes no messages: {e}") from e
            finally:
                self._sending = False
            self._drain()  # sending swallows the sign that answers came

    def _connected(self) -> zmq.Socket[bytes]:
        """The DEALER, made at its first use (a process that only forks workers never pays)."""
        if self._line is None:
            import zmq

            self._context = zmq.Context()
            self._line = self._context.socket(zmq.DEALER)
            self._line.linger = 0
            self._line.connect(self._line_address)
            self._line_fd = int(self._line.getsockopt(zmq.FD))
        return self._line

    def listen(self, timeout_s: float, heard: int) -> None:
        """Take in answers; returns at the first one, at a hang-up, or after `timeout_s`.

        `heard` is what it was before the caller looked for what it waits for: returns at once where
        another thread took something in since then.

        Sleeps without the lock: nobody who sends waits for somebody who listens. libzmq shows one
        sign for many messages, to one thread: who takes them in rings the bells of the others.
        """
        with self._line_lock:
            self._drain()
            if self._line is None or self._lost or self.heard != heard:
                return
            poll = select.poll()
            poll.register(self._line_fd, select.POLLIN)
            poll.register(self._desk.fileno(), select.POLLRDHUP)
            bell = self._new_bell()
        try:
            if bell >= 0:
                poll.register(bell, select.POLLIN)
            poll.poll(max(timeout_s * 1000, 1) if bell >= 0 else 1)
        finally:
            with self._line_lock:
                if bell in self._bells:
                    self._bells.remove(bell)
                    os.close(bell)
                self._drain()

    def _new_bell(self) -> int:
        try:
            bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError:  # no more descriptors: this thread looks again soon instead
            return -1
        self._bells.add(bell)
        return bell

    def _ring(self) -> None:
        for bell in self._bells:
            os.eventfd_write(bell, 1)

    def refused(self, call: int) -> bool:
        """Whether the daemon said that this call cannot be met."""
        return self._answers.pop(call, None) is not None

    def _drain(self) -> None:
        """Take in what came; under the lock."""
        before = self.heard
        while self._line is not None and self._take(self._line):
            self.heard += 1
        if self.heard != before:
            self._ring()

    def _take(self, line: zmq.Socket[bytes]) -> bool:
        """Take in one message; False when there is none."""
        import zmq

        try:
            body = line.recv_multipart(zmq.DONTWAIT)[0]
            message = decode(body, LineReply)
        except zmq.Again:
            return False
        except (zmq.ZMQError, MalformedError):
            self._lost = True
            return False
        # Ready says nothing that the board does not say: its use is to wake us.
        if isinstance(message, (Told, Failed)):
            self._answers[message.call] = message
            while len(self._answers) > 1024:  # nobody waits for these any more
                self._answers.pop(next(iter(self._answers)))
        return True


def _check_descriptors() -> None:
    """Raise DaemonLostError where libzmq would find none: it ends the process then (epoll.cpp)."""
    free: list[int] = []
    try:
        while len(free) < _LINE_FDS:
            free.append(os.eventfd(0, os.EFD_CLOEXEC))
    except OSError as e:
        raise DaemonLostError(f"no descriptors for a line to the daemon: {e}") from e
    finally:
        close_all(free)


def _check_threads() -> None:
    """Raise DaemonLostError where libzmq could start none: it ends the process then (thread.cpp).

    A limit of processes (`ulimit -u`, a container's pids) counts threads, and the daemon's, too.
    """
    gate = threading.Event()
    begun: list[threading.Thread] = []
    try:
        while len(begun) < _LINE_THREADS:
            thread = threading.Thread(target=gate.wait, name="creel-room", daemon=True)
            thread.start()
            begun.append(thread)
    except RuntimeError as e:
        raise DaemonLostError(f"no threads for a line to the daemon: {e}") from e
    finally:
        gate.set()
        for thread in begun:
            thread.join()


def _knock(desk: socket.socket, where: str, timeout_s: float) -> None:
    """Connect; a daemon with a full backlog is there, so that is waited for and no failure."""
    deadline = time.monotonic() + timeout_s
    asked = False
    while error := desk.connect_ex(where):
        if error != errno.EAGAIN or time.monotonic() > deadline:
            raise OSError(error, os.strerror(error))
        if not asked and (uid := holder(where)) not in {None, os.getuid()}:
            raise NoDaemonError(
                f"user {uid} sits at {where.replace(chr(0), '@')} and does not answer"
            )
        asked = True
        time.sleep(0.005)


_clients: weakref.WeakSet[Client] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for client in list(_clients):
        client.forget()
    _clients.clear()


at_fork(after_in_child=_after_fork_in_child)
