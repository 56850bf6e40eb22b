"""Client: a training process's connection to its node's daemon, over both sockets.

No failure here raises into a training step: if the daemon is slow, lost or draining, `ready` and
`wait` return False, and the caller reads the source itself. Bytes of steps < READY stay valid even
when the daemon dies: the mapping outlives it, and no process is left that writes there. A service
that leaves its memory to the next daemon lowers READY to 0 before it ends.

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
import warnings
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from numpy.typing import NDArray

from creel import messages
from creel.addresses import first_address, second_address
from creel.cache.memory.arena import ArenaView
from creel.cache.memory.memfd import Descriptor, sealed_file
from creel.cache.memory.shared_words import LocationTable, SharedWords
from creel.cache.storage.manifest import Manifest
from creel.errors import (
    ConfigError,
    DaemonLostError,
    MalformedError,
    NoDaemonError,
    UnavailableError,
)
from creel.loader.client.packets import (
    M,
    check_owner,
    exchange,
    map_arena,
    pidfd_of,
)
from creel.loader.client.session import POLL_S, Session
from creel.loader.client.zmq_needs import check_descriptors, check_threads
from creel.system.fd_packets import close_all
from creel.system.forks import pause_before_fork, reset_in_child
from creel.system.unix_peers import owner_of

if TYPE_CHECKING:
    import zmq

_REPLY_TIMEOUT_S = 10.0  # a reply takes well below 10 ms; the daemon may be starting on a busy node
#: Longest time that a fork waits for the daemon's answer, and how long later ones do not wait.
_PING_S, _UNPAUSED_S = 0.5, 30.0
_REGISTER_TIMEOUT_S = 120.0  # checking a manifest of 10 million files takes seconds


#: Objects that are kept decoded, and the memfd that has their words.
DecodedIndexes: TypeAlias = Sequence[tuple[messages.DecodedWords, Descriptor]]


class Client:
    """A connection to the daemon. Make one with `connect`; all methods are thread-safe."""

    def __init__(
        self, control_socket: socket.socket, welcome: messages.Welcome, arena: ArenaView
    ) -> None:
        #: What the daemon knows this process by.
        self.token = welcome.token
        #: The daemon's process.
        self.daemon_pid = welcome.pid
        #: Whether a daemon that ends is expected to come back.
        self.returns = welcome.returns
        #: The node's cached objects, mapped read-only.
        self.arena = arena
        #: Where the daemon takes requests.
        self.request_address = welcome.request_address
        #: Whose end the daemon notices; also for what passes descriptors.
        self._control_socket = control_socket
        #: The process that connected: a forked child may not use it.
        self._pid = os.getpid()
        self.hung = False  # whether the daemon failed to answer in time
        #: Whether the connection has ended.
        self._lost = False
        #: Whether this process has closed it.
        self.closed = False
        # Reentrant: a finaliser may end a session while this thread holds either lock.
        self._control_lock = threading.RLock()
        #: Reentrant, as the other one: of the request socket.
        self._request_lock = threading.RLock()
        #: Whether this thread is amid a message.
        self._sending = False
        #: Made with the first request.
        self._request_socket: zmq.Socket[bytes] | None = None
        #: Of the request socket.
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        #: Readable when messages may have come; -1: no socket yet.
        self._request_fd = -1
        self.received = 0  # messages received so far
        self._wakeups: set[int] = set()  # eventfds that wake listening threads
        #: Numbers of calls, by which answers are known.
        self.calls = itertools.count(1)
        self._unpaused_until = 0.0  # time.monotonic(): forks do not wait for the daemon till then
        self._granted: dict[str, messages.Grants] = {}  # by dataset, as last sent
        #: By call: those that no thread has taken yet.
        self._answers: dict[int, messages.CommandReply | messages.Failed] = {}
        #: The cluster that this node's daemon has joined for this process's job; "": none.
        self.cluster = ""
        #: Whether the nodes of the job are about to join a cluster.
        self.joining = False
        #: Time (`time.monotonic`) until which the nodes are expected to join.
        self.joining_until = 0.0
        #: Those that are open.
        self.sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        reset_in_child(self)
        pause_before_fork(self)

    @classmethod
    def connect(
        cls,
        name: str,
        role: str = "trainer",
        token: str = "",
        *,
        trainer_pid: int = 0,
        timeout_s: float = _REPLY_TIMEOUT_S,
    ) -> Client:
        """Connect to the daemon of that name.

        Args:
            role: "trainer", "worker" (with its trainer's token) or "cli".
            trainer_pid: of the process that this one works for. An embedded daemon stays until that
                process ends, not only until this one does.

        Raises:
            NoDaemonError: no process listens there, or one of another user or with other files.
            DaemonLostError: it listens but does not answer.
            UnavailableError: the daemon refuses with a reason, speaks another protocol, or it is
                unknown which files this process sees.
        """
        try:
            return cls._connect(first_address(name), role, token, trainer_pid, timeout_s)
        except NoDaemonError:
            # Another user may hold the first address, or held it when our daemon started.
            second = second_address(name)
            if second is None:
                raise
            with contextlib.suppress(NoDaemonError):
                return cls._connect(second, role, token, trainer_pid, timeout_s)
            raise

    @classmethod
    def _connect(
        cls, where: str, role: str, token: str, trainer_pid: int, timeout_s: float
    ) -> Client:
        shown = where.replace(chr(0), "@")
        control_socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            control_socket.settimeout(timeout_s)
            _connect_socket(control_socket, where, timeout_s)
            check_owner(control_socket, where)
            hello = messages.Hello(messages.PROTOCOL, role, token)
            with pidfd_of(trainer_pid) as along:
                welcome, fds = exchange(control_socket, hello, messages.Welcome, along)
            return cls(control_socket, welcome, map_arena(fds, welcome.arena_nbytes))
        except BaseException as e:
            control_socket.close()
            if isinstance(e, TimeoutError):
                raise DaemonLostError(
                    f"the daemon at {shown} has not answered for {timeout_s:g} s: is it stopped, or"
                    " the machine out of memory?"
                ) from e
            if isinstance(e, OSError):
                raise NoDaemonError(f"no creel daemon at {shown}: {e}") from e
            if isinstance(e, MalformedError):
                raise UnavailableError(
                    f"the process at {shown} is not a daemon of this version of creel: end it, or"
                    f" choose another daemon.name ({e})"
                ) from e
            raise

    @property
    def alive(self) -> bool:
        """Whether the daemon still holds its end of the control socket."""
        return not self._lost and os.getpid() == self._pid and not self._hung_up()

    def register(self, manifest: Manifest) -> str:
        """Register a dataset; return the key under which sessions may be opened.

        Raises:
            UnavailableError: refused, the daemon is lost, or only this process can read these
                addresses.
        """
        grants = manifest.grants()
        with self._control_lock:  # threads that wait hold no memory and no descriptor
            own = Descriptor(sealed_file("creel-manifest", manifest.write_arrow))
            request = messages.Register(os.fstat(own.fd).st_size, grants)
            reply, _ = self._call(request, messages.Registered, (own.fd,), _REGISTER_TIMEOUT_S)
            self._granted[reply.dataset] = grants
            return reply.dataset

    def renew(self, manifest: Manifest) -> None:
        """Let the daemon read a registered dataset with this process's present keys.

        Costs a message only if they are others than before.

        Raises:
            UnavailableError: refused, not registered, or the daemon is lost.
        """
        grants = manifest.grants()
        if grants and self._granted.get(manifest.key) != grants:
            self._call(messages.Renew(manifest.key, grants), messages.Registered)
            self._granted[manifest.key] = grants

    def open_manifest(
        self,
        manifest: Manifest,
        job: str,
        rank: int,
        world: int,
        *,
        recheck: str,
        decoded: DecodedIndexes = (),
    ) -> Session:
        """Open a session over a dataset; register the dataset only if the daemon does not have it.

        To register a million files takes .3 s and more.

        Raises:
            UnavailableError: refused, or the daemon is lost.
        """
        with contextlib.suppress(UnavailableError):
            self.renew(manifest)
            return self.open(manifest.key, job, rank, world, recheck, decoded)
        return self.open(self.register(manifest), job, rank, world, recheck, decoded)

    def open(
        self,
        dataset: str,
        job: str,
        rank: int,
        world: int,
        recheck: str,
        decoded: DecodedIndexes = (),
    ) -> Session:
        """Open a session over a registered dataset; see `messages.Open`.

        Raises:
            UnavailableError: refused, or the daemon is lost.
        """
        decoded = decoded[: messages.MAX_FDS]
        words = [words for words, _ in decoded]
        request = messages.Open(dataset, job, rank, world, cast(Any, recheck), words)
        reply, fds = self._call(request, messages.Opened, tuple(own.fd for _, own in decoded))
        return self._session(reply, fds, trainer=True)

    def attach(self, session_id: int) -> Session:
        """Join the session of this worker's trainer.

        Raises:
            UnavailableError: no such session, or the daemon is lost.
        """
        reply, fds = self._call(messages.Attach(session_id), messages.Opened)
        return self._session(reply, fds, trainer=False)

    def host(self, address: str, port: int = 0) -> messages.Member:
        """Let the daemon serve peers at this address of this node; port 0: any.

        Raises:
            UnavailableError: refused, or the daemon is lost.
        """
        return self._call(messages.Host(address, port), messages.Hosting)[0].member

    def join(self, request: messages.Join) -> bool:
        """Give the daemon its peers (see `messages.Join`); return whether all of them are there.

        Raises:
            UnavailableError: refused, or the daemon is lost.
        """
        ready = self._call(request, messages.Joined)[0].ready
        if ready:
            self.cluster = request.cluster
        return ready

    def join_journal(self, name: str, own: int) -> int:
        """Offer a memfd; return a descriptor, for the caller, of the joint journal of this name.

        Raises:
            UnavailableError: refused, or the daemon is lost.
        """
        _, fds = self._call(messages.OfferJournal(name), messages.JointJournal, (own,))
        if len(fds) != 1:
            close_all(fds)
            raise DaemonLostError(f"the daemon sent {len(fds)} descriptors with a journal, not 1")
        return fds[0]

    def ask(self, command: str, *, timeout_s: float = 10.0, **args: object) -> dict[str, Any]:
        """Return the daemon's reply to a command (see `messages.Command`).

        Raises:
            ConfigError: the daemon rejects the command.
            DaemonLostError: no reply in time.
        """
        call = next(self.calls)
        self.send(messages.Command(self.token, call, command, args))
        deadline = time.monotonic() + timeout_s
        while True:
            received = self.received
            answer = self._answers.pop(call, None)
            if answer is not None:
                break
            left = deadline - time.monotonic()
            if left <= 0 or not self.alive:
                raise DaemonLostError(
                    f"the daemon did not answer {command!r} within {timeout_s:g} s"
                )
            self.listen(min(left, POLL_S), received)
        if isinstance(answer, messages.Failed):
            raise ConfigError(answer.reason)
        return answer.body

    def close(self) -> None:
        """Close the connection; the daemon then releases everything it held for this client.

        A pending call of another thread fails at once.
        """
        self._lost = self.closed = True
        for session in list(self.sessions):
            session.close()
        with self._request_lock:
            self._disconnect()
        with contextlib.suppress(OSError):
            self._control_socket.shutdown(socket.SHUT_RDWR)
        with self._control_lock:  # until then, no other file may get its number
            self._control_socket.close()
        self.arena.close()

    def pause(self) -> None:
        """End libzmq's threads before a fork; the next message starts them again.

        The daemon must have handled all messages by then, as those of a later connection could
        overtake them. If it does not say so soon, it may be stopped: the threads stay.
        """
        if self._request_socket is None or time.monotonic() < self._unpaused_until:
            return
        if not self._request_lock.acquire(timeout=_PING_S):
            return
        try:
            self.ask("ping", timeout_s=_PING_S)
            self._disconnect()
        except (ConfigError, UnavailableError):
            self._unpaused_until = time.monotonic() + _UNPAUSED_S
        finally:
            self._request_lock.release()

    def _disconnect(self) -> None:
        """Close the request socket; the caller holds the lock."""
        if self._request_socket is not None:
            self._request_socket.close(linger=0)
        if self._context is not None:
            self._context.term()
        self._request_socket = self._context = None
        self._wake_listeners()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reset_for_process(self) -> None:
        """Close inherited descriptors in a forked child, without notifying the daemon."""
        self._lost = True
        self._control_socket.close()
        with warnings.catch_warnings():  # zmq's may not be closed here; `python -X dev` would warn
            warnings.simplefilter("ignore", ResourceWarning)
            self._request_socket = self._context = None
        close_all(list(self._wakeups))
        self._wakeups.clear()

    def _hung_up(self) -> bool:
        poll = select.poll()  # a new one: two threads may not share a poll object
        fd = self._control_socket.fileno()
        if fd < 0:
            return True
        poll.register(fd, select.POLLRDHUP)
        return bool(poll.poll(0))

    # --- control socket -----------------------------------------------------------------------

    def _call(
        self,
        request: messages.ControlRequest,
        kind: type[M],
        fds: tuple[int, ...] = (),
        timeout_s: float = _REPLY_TIMEOUT_S,
    ) -> tuple[M, list[int]]:
        with self._control_lock:
            if not self.alive:
                raise DaemonLostError("the daemon has ended")
            try:
                self._control_socket.settimeout(timeout_s)
                return exchange(self._control_socket, request, kind, fds)
            except (OSError, MalformedError) as e:
                self._lost = True  # a late reply would be taken for the next request's
                self.hung = isinstance(e, TimeoutError)
                raise DaemonLostError(f"the daemon did not answer: {e}") from e
            except UnavailableError:  # a proper reply
                raise
            except BaseException:  # Ctrl-C: as above, a late reply may still come
                self._lost = True
                raise

    def notify(self, request: messages.Close | messages.WithdrawJournal) -> None:
        """Send a request that has no reply."""
        if self.alive:  # in a forked child another thread may have held the lock
            with self._control_lock:
                try:
                    self._control_socket.send(messages.encode(request))
                except OSError:
                    self._lost = True

    def _session(self, reply: messages.Opened, fds: list[int], *, trainer: bool) -> Session:
        try:
            session = self._mapped(reply, fds, trainer=trainer)
        except BaseException:  # e.g. no memory for a mapping: the session stays unused
            if trainer:
                self.notify(messages.Close(reply.session))
            raise
        finally:
            close_all(fds)
        self.sessions.add(session)
        return session

    def _mapped(self, reply: messages.Opened, fds: list[int], *, trainer: bool) -> Session:
        if len(fds) != 2:
            raise DaemonLostError(f"the daemon sent {len(fds)} descriptors with a session, not 2")
        table = LocationTable(fds[1], reply.objects, reply.record)
        return Session(self, reply, SharedWords(fds[0]), table, trainer)

    # --- request socket -----------------------------------------------------------------------

    def send(self, message: messages.RequestMessage, *arrays: NDArray[Any]) -> None:
        """Send a message over the request socket.

        Raises:
            DaemonLostError: it cannot be sent.
        """
        if self._request_socket is None:
            check_descriptors()
            check_threads()
        import zmq

        frames = [messages.encode(message), *(a.tobytes() for a in arrays)]
        with self._request_lock:
            if not self.alive:
                raise DaemonLostError("the daemon has ended")
            if self._sending:  # called by a finaliser: frames of two messages would mix
                raise DaemonLostError("another message is being sent")
            self._sending = True
            try:
                self._connected().send_multipart(frames, zmq.DONTWAIT)
            except zmq.ZMQError as e:
                raise DaemonLostError(f"the daemon accepts no messages: {e}") from e
            finally:
                self._sending = False
            self._receive_all()  # sending may consume libzmq's only signal for new messages

    def _connected(self) -> zmq.Socket[bytes]:
        """Return the DEALER, made at first use: a process that only forks workers needs none."""
        if self._request_socket is None:
            import zmq

            self._context = zmq.Context()
            self._request_socket = self._context.socket(zmq.DEALER)
            self._request_socket.linger = 0
            self._request_socket.connect(self.request_address)
            self._request_fd = int(self._request_socket.getsockopt(zmq.FD))
        return self._request_socket

    def listen(self, timeout_s: float, received: int) -> None:
        """Receive messages; return at the first one, at a hang-up, or after `timeout_s`.

        Args:
            received: `self.received` from before the caller last checked its condition. If another
                thread has received something since, this returns at once.

        Sleeps without the lock, so senders never wait for listeners. libzmq gives one signal for
        many messages, to one thread, which wakes the others (`_wake_listeners`).
        """
        with self._request_lock:
            self._receive_all()
            if self._lost or self.received != received:
                return
            if self._request_socket is None and self._control_socket.fileno() < 0:
                return
            poll = select.poll()
            if self._request_socket is not None:
                poll.register(self._request_fd, select.POLLIN)
            poll.register(self._control_socket.fileno(), select.POLLRDHUP)
            wakeup = self._new_wakeup()
        try:
            if wakeup >= 0:
                poll.register(wakeup, select.POLLIN)
            # Without a socket (after a fork) no message can come: the caller looks again.
            long = wakeup >= 0 and self._request_socket is not None
            poll.poll(max(timeout_s * 1000, 1) if long else 1)
        finally:
            with self._request_lock:
                if wakeup in self._wakeups:
                    self._wakeups.remove(wakeup)
                    os.close(wakeup)
                self._receive_all()

    def _new_wakeup(self) -> int:
        try:
            wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError:  # no more descriptors: this thread polls instead
            return -1
        self._wakeups.add(wakeup)
        return wakeup

    def _wake_listeners(self) -> None:
        for wakeup in self._wakeups:
            os.eventfd_write(wakeup, 1)

    def refused(self, call: int) -> bool:
        """Whether the daemon has replied that it cannot serve this call."""
        return self._answers.pop(call, None) is not None

    def _receive_all(self) -> None:
        """Receive all pending messages; the caller holds the lock."""
        before = self.received
        while self._request_socket is not None and self._receive_one(self._request_socket):
            self.received += 1
        if self.received != before:
            self._wake_listeners()

    def _receive_one(self, request_socket: zmq.Socket[bytes]) -> bool:
        """Receive one message; False if there is none."""
        import zmq

        try:
            body = request_socket.recv_multipart(zmq.DONTWAIT)[0]
            message = messages.decode(body, messages.RequestReply)
        except zmq.Again:
            return False
        except (zmq.ZMQError, MalformedError):
            self._lost = True
            return False
        # A Ready message only wakes this thread: the shared words hold the same information.
        if isinstance(message, (messages.CommandReply, messages.Failed)):
            self._answers[message.call] = message
            while len(self._answers) > 1024:  # the callers of the oldest have given up
                self._answers.pop(next(iter(self._answers)))
        return True


def _connect_socket(control_socket: socket.socket, where: str, timeout_s: float) -> None:
    """Connect, waiting while the daemon's backlog is full.

    Raises:
        OSError: no process listens, or the backlog stays full for `timeout_s`.
        NoDaemonError: another user holds the address, with a full backlog.
    """
    deadline = time.monotonic() + timeout_s
    checked = False
    while error := control_socket.connect_ex(where):
        if error != errno.EAGAIN or time.monotonic() > deadline:
            raise OSError(error, os.strerror(error))
        if not checked and (uid := owner_of(where)) not in {None, os.getuid()}:
            raise NoDaemonError(
                f"a process of user {uid} holds {where.replace(chr(0), '@')} and does not answer"
            )
        checked = True
        time.sleep(0.005)
