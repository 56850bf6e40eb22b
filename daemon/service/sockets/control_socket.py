"""Control socket: client handshake and descriptor passing (SOCK_SEQPACKET).

Packets from clients are checked here, once: a request that reaches the core is well-formed and
concerns only its sender. A malformed packet costs its sender the connection and never stops the
daemon. Work per turn is bounded, so a flood of packets delays only its sender.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import secrets
import select
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from creel.cache.memory.memfd import (
    F_GET_SEALS,
    F_SEAL_SHRINK,
    F_SEAL_WRITE,
    Descriptor,
    mapped,
)
from creel.cache.storage.manifest import Manifest
from creel.daemon.listener import Listener
from creel.daemon.service.node import Answer, Node
from creel.daemon.service.registry import SessionRecord
from creel.daemon.service.sockets.journals import JointJournals
from creel.daemon.service.sockets.keepalive import KeepAlive
from creel.errors import ConfigError, MalformedError, UnavailableError
from creel.messages import (
    MAX_BODY,
    MAX_FDS,
    PROTOCOL,
    AnyHello,
    Attach,
    Close,
    ControlReply,
    ControlRequest,
    Hello,
    Host,
    Hosting,
    Join,
    Joined,
    JointJournal,
    OfferJournal,
    Open,
    Opened,
    Refused,
    Register,
    Registered,
    Renew,
    Welcome,
    WithdrawJournal,
    decode,
    encode,
)
from creel.system.fd_packets import close_all, receive, send
from creel.system.transfers import transfer
from creel.system.unix_peers import peer_of, why_apart

log = logging.getLogger("creel.control_socket")

_ROLES = frozenset({"trainer", "worker", "cli", "service"})
_REFUSALS = 32  # most refused connections that wait for a reason; others are closed at once
_HELLO_S = 5.0  # time after which a connection without a Hello is closed
_MAX_MANIFEST = 16 << 30
_RELEASE_S = 2.0  # time for the answer of a daemon that is asked to release its address


@dataclass(eq=False)
class _Connection:
    socket: socket.socket
    pid: int
    hello_by: float
    role: str = ""
    token: str = ""
    busy: bool = False
    refusal: Refused | None = None  # the answer to the first packet of a refused connection


class ControlSocket:
    """The listening socket and all its connections, served from one epoll."""

    def __init__(self, address: str, node: Node, epoll: select.epoll, *, limit: int) -> None:
        """Bind and listen.

        Raises:
            OSError: EADDRINUSE when another daemon listens at this address.
        """
        self._node = node
        self._epoll = epoll
        self._limit = limit
        self._uid = os.getuid()  # whose processes may connect
        self._connections: dict[int, _Connection] = {}  # by descriptor
        self._by_token: dict[str, _Connection] = {}  # the same, by the token that each was given
        self.keep_alive = KeepAlive(epoll)
        self._journals = JointJournals()
        #: How requests without descriptors are answered, from the client's token and the request.
        self._answers: dict[type, Callable[[str, Any], Answer]] = {
            Attach: lambda token, asked: _opened(node.registry.owned(token, asked.session)),
            Host: lambda _, asked: Answer(Hosting(node.clusters.host(asked.host, asked.port))),
            Join: lambda token, asked: Answer(Joined(node.clusters.join(token, asked))),
        }
        kind = socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        listening = socket.socket(socket.AF_UNIX, kind)
        try:
            listening.bind(address)
            listening.listen(256)
        except OSError:
            listening.close()
            raise
        self.fd = listening.fileno()  # of the listening socket
        self._listener = Listener(listening, epoll)

    @property
    def clients(self) -> int:
        """Number of connections that have completed the handshake."""
        return sum(1 for c in self._connections.values() if c.role)

    def pids(self) -> dict[str, int]:
        """Return the process id of each token's owner."""
        return {token: c.pid for token, c in self._by_token.items()}

    def knows(self, token: str) -> bool:
        """Return whether the owner of this token is connected."""
        return token in self._by_token

    def handles(self, fd: int) -> bool:
        """Return whether this descriptor belongs to the control socket."""
        return fd == self.fd or fd in self._connections or fd in self.keep_alive

    def ready(self, fd: int, now: float) -> None:
        """Handle a descriptor that is readable or hung up."""
        if fd == self.fd:
            for sock in self._listener.accepted():
                self._admit(sock, now)
            return
        if fd in self.keep_alive:
            self.keep_alive.ended(fd)
            return
        connection = self._connections.get(fd)
        if connection is None:
            return
        if connection.busy:  # epoll reports only hang-ups of busy connections
            self._end(connection)
            return
        self._serve(connection)

    def sweep(self, now: float) -> None:
        """Close connections without a handshake; accept again after a lack of descriptors."""
        self._listener.resume()
        for connection in list(self._connections.values()):
            if not connection.role and now > connection.hello_by:
                self._end(connection)

    def drop(self, token: str, why: str) -> None:
        """Close the connection of a client that violated the protocol."""
        connection = self._by_token.get(token)
        if connection is not None:
            log.warning("dropping client %d: %s", connection.pid, why)
            self._end(connection)

    def stop_listening(self) -> None:
        """Stop accepting connections; another daemon may use the address at once."""
        if self._listener.socket.fileno() >= 0:
            self._epoll.unregister(self.fd)
            self._listener.socket.close()

    def close(self) -> None:
        self.stop_listening()
        self.keep_alive.close()
        for connection in list(self._connections.values()):
            self._end(connection)

    # --- connections --------------------------------------------------------------------------

    def _admit(self, sock: socket.socket, now: float) -> None:
        pid, uid = peer_of(sock)
        # Refused connections do not count against the limit, as other users may connect.
        waiting = sum(c.refusal is not None for c in self._connections.values())
        refusal = self._refusal(sock, uid, len(self._connections) - waiting)
        if refusal is not None and waiting >= _REFUSALS:
            sock.close()
            return
        connection = _Connection(sock, pid, now + _HELLO_S, refusal=refusal)
        self._connections[sock.fileno()] = connection
        self._epoll.register(sock.fileno(), select.EPOLLIN | select.EPOLLRDHUP)

    def _refusal(self, sock: socket.socket, uid: int, served: int) -> Refused | None:
        if uid != self._uid:  # also root: this daemon reads files with the rights of its own user
            return Refused(f"this daemon belongs to user {self._uid}: start your own")
        if why := why_apart(sock):
            return Refused(
                f"this daemon cannot verify that your process sees the same files ({why}):"
                " start your own"
            )
        if served >= self._limit:
            return Refused(
                f"the limit of {self._limit} clients is reached: raise daemon.max_connections"
            )
        return None

    def _end(self, connection: _Connection) -> None:
        fd = connection.socket.fileno()
        if self._connections.pop(fd, None) is None:
            return
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(fd)
        connection.socket.close()
        if connection.role not in {"", "worker"}:
            del self._by_token[connection.token]
            self._journals.client_left(connection.token)
            self._node.client_left(connection.token)

    def _serve(self, connection: _Connection) -> None:
        fds: list[int] = []
        try:
            body, fds, flags = receive(connection.socket, MAX_BODY, MAX_FDS, socket.MSG_DONTWAIT)
            if connection.refusal is not None:
                # Not before the hello was read: closing would discard the answer.
                self._send(connection, Answer(connection.refusal))
                self._end(connection)
                return
            if not body:
                self._end(connection)
                return
            self._request(connection, _whole(body, flags), fds)
        except BlockingIOError:
            return
        except (UnavailableError, ConfigError) as e:
            self._send(connection, Answer(Refused(str(e))))
        except (MalformedError, OSError) as e:
            log.info("closing the connection of process %d: %s", connection.pid, e)
            self._end(connection)
        except Exception:  # a bug of ours, or no memory: only the sender loses its connection
            log.exception("a request of process %d could not be handled", connection.pid)
            self._end(connection)
        finally:
            close_all(fds)

    def _send(self, connection: _Connection, answer: Answer) -> None:
        """Send an answer without blocking; close the connection of a client that does not read."""
        try:
            send(connection.socket, encode(answer.message), answer.fds, socket.MSG_DONTWAIT)
        except OSError:
            self._end(connection)

    # --- requests -----------------------------------------------------------------------------

    def _request(self, connection: _Connection, request: Any, fds: list[int]) -> None:
        if isinstance(request, Hello):
            self._hello(connection, request, fds)
        elif not connection.role:
            raise MalformedError("the first message must be Hello")
        elif connection.role == "worker" and not isinstance(request, Attach):
            raise UnavailableError(f"a {connection.role} must not send this request")
        elif isinstance(request, (Register, Renew)):
            self._register(connection, request, fds)
        elif isinstance(request, Open):
            session = self._node.sessions.open(connection.token, request, fds)
            self._send(connection, _opened(session))
        elif answer := self._answers.get(type(request)):
            self._send(connection, answer(connection.token, request))
        elif isinstance(request, OfferJournal):
            self._join_journal(connection, request, fds)
        elif isinstance(request, WithdrawJournal):
            self._journals.withdraw(connection.token, request.name)
        elif isinstance(request, Close):
            self._close(connection, request)

    def _hello(self, connection: _Connection, hello: Hello, fds: list[int]) -> None:
        if connection.role:
            raise MalformedError("a second Hello on one connection")
        if hello.role not in _ROLES:
            raise MalformedError(f"no such role: {hello.role!r}")
        if hello.role == "worker":
            if hello.token not in self._by_token:
                raise UnavailableError("the trainer of this worker is not connected")
            connection.token = hello.token
        else:
            connection.token = secrets.token_hex(16)
            self._by_token[connection.token] = connection
        connection.role = hello.role
        if hello.role == "service":
            if not self._node.embedded:
                raise UnavailableError("this daemon is a service, too")
            # Frees the address at once; the daemon ends later.
            self._node.loop.stop(False, "a service took its address")
        if fds:
            self.keep_alive.take(fds.pop())
        welcome, arena = self._node.welcome(connection.token)
        self._send(connection, Answer(welcome, (arena,)))

    def _close(self, connection: _Connection, request: Close) -> None:
        with contextlib.suppress(UnavailableError):  # the session may have ended already
            self._node.sessions.close(self._node.registry.owned(connection.token, request.session))

    def _join_journal(self, connection: _Connection, request: OfferJournal, fds: list[int]) -> None:
        if len(fds) != 1:
            raise MalformedError(f"a journal is one descriptor, not {len(fds)}")
        joint = self._journals.offer(connection.token, request.name, Descriptor(fds.pop()))
        self._send(connection, Answer(JointJournal(), (joint.fd,)))

    def _register(self, connection: _Connection, request: Register | Renew, fds: list[int]) -> None:
        if isinstance(request, Renew):
            self._node.datasets.renew(request.dataset, request.grants)
            self._send(connection, Answer(Registered(request.dataset)))
            return
        if len(fds) != 1:
            raise MalformedError(f"a manifest comes in one descriptor, not {len(fds)}")
        if not 0 < request.nbytes <= _MAX_MANIFEST:
            raise MalformedError(f"a manifest of {request.nbytes} bytes")
        self._node.quota.check(request.nbytes, "a manifest")
        fd = fds.pop()  # `read_manifest` closes it
        connection.busy = True
        self._epoll.modify(connection.socket.fileno(), select.EPOLLRDHUP)

        def reply(answer: Registered | Refused) -> None:
            if self._connections.get(connection.socket.fileno()) is connection:
                connection.busy = False
                events = select.EPOLLIN | select.EPOLLRDHUP
                self._epoll.modify(connection.socket.fileno(), events)
                self._send(connection, Answer(answer))

        self._node.datasets.register(
            connection.token,
            lambda: read_manifest(fd, request.nbytes),
            request.grants,
            reply,
        )


def released(address: str) -> bool:
    """Ask an embedded daemon of this user to release its address; return whether it has.

    A training process starts a daemon if none listens, even in the second in which a service
    restarts. Without this request, the service could not start again before that training ends.
    """
    kind = socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC
    with socket.socket(socket.AF_UNIX, kind) as asking:
        asking.settimeout(_RELEASE_S)
        try:
            asking.connect(address)
            if peer_of(asking).uid != os.getuid():
                return False
            asking.send(encode(Hello(PROTOCOL, "service")))
            return isinstance(decode(asking.recv(MAX_BODY), ControlReply), Welcome)
        except (OSError, MalformedError):
            return False


def _whole(body: bytes, flags: int) -> Any:
    if flags & socket.MSG_TRUNC:
        raise MalformedError("a packet too long")
    if flags & socket.MSG_CTRUNC:
        raise UnavailableError("this daemon can open no more descriptors, or these are too many")
    with contextlib.suppress(MalformedError):  # another request
        hello = decode(body, AnyHello)
        if hello.spoken() is None:  # its other fields may be others, too
            raise UnavailableError(
                f"this daemon uses protocol {PROTOCOL}, the client {hello.protocol}:"
                " restart the daemon with the installed version"
            )
    return decode(body, ControlRequest)


def _opened(session: SessionRecord) -> Answer:
    dataset = session.dataset
    message = Opened(session.id, len(dataset.manifest), dataset.record)
    return Answer(message, (session.words_fd, dataset.table_fd))


def read_manifest(fd: int, nbytes: int) -> Manifest:
    """Return the manifest in a client's memfd, and close `fd`.

    The manifest is mapped in place if seals keep the client from changing it, and copied otherwise.

    Raises:
        MalformedError: `fd` is not a memfd of this size, or has no valid manifest.
    """
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size != nbytes:
            raise MalformedError(f"not a file of {nbytes} bytes")
        data = mapped(fd, nbytes, mmap.PROT_READ) if _is_sealed(fd) else _copied(fd, nbytes)
        return Manifest.from_arrow(data)
    except OSError as e:
        raise MalformedError(f"the manifest cannot be read: {e}") from e
    finally:
        os.close(fd)


def _is_sealed(fd: int) -> bool:
    wanted = F_SEAL_SHRINK | F_SEAL_WRITE
    try:
        return fcntl.fcntl(fd, F_GET_SEALS) & wanted == wanted
    except OSError:
        return False


def _copied(fd: int, nbytes: int) -> bytearray:
    copy = bytearray(nbytes)
    if transfer(os.preadv, fd, [copy]) < nbytes:
        raise MalformedError(f"a file of fewer than {nbytes} bytes")
    return copy
