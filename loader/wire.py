"""Packets between a trainer and one of its workers: a unix packet socket, no threads, no queues.

A packet is one pickled message, whole or not at all; descriptors ride along. Messages are small by
construction (payload lies in slots); one that is not travels in a memfd, or in several packets
where there is none to be had. A full socket buffer can never make two processes wait for each
other: the trainer never blocks in `post`, and reads while it waits.
"""

from __future__ import annotations

import copyreg
import errno
import io
import os
import pickle
import select
import socket
import threading
from array import array
from collections import ChainMap, deque
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import torch

#: Longest packet; what is longer goes through a memfd. A socket's buffer is 208 KiB by default.
_INLINE = 16 << 10
#: Most descriptors of one packet (the kernel's SCM_MAX_FD); more of them go ahead in packets of
#: their own.
_MAX_FDS = 253
_PLAIN, _SPILLED, _AHEAD, _PIECE = b"p", b"s", b"a", b"c"
_Reduced: TypeAlias = "str | tuple[Any, ...]"


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends; both close on exec."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class _Packet:
    """Bytes on their way, and descriptors that go with them."""

    __slots__ = ("_ours", "data", "fds")

    def __init__(self, data: bytes, fds: list[int], ours: list[int]) -> None:
        """`ours`: the descriptors that are not the caller's."""
        self.data = data
        self.fds = fds
        self._ours = [fd for fd in fds if fd in ours]

    def close(self) -> None:
        """It left, or never will."""
        _close(self._ours)
        self._ours = self.fds = []

    def keep(self) -> None:
        """It did not leave yet, and the caller may close its own descriptors.

        Raises:
            OSError: no descriptor is free.
        """
        for i, fd in enumerate(self.fds):
            if fd not in self._ours:
                self.fds[i] = os.dup(fd)
                self._ours.append(self.fds[i])


class Wire:
    """One end. Messages are tuples of picklable values; `get` gives them with their descriptors."""

    def __init__(self, sock: socket.socket) -> None:
        """Take over `sock` and close it in `close`."""
        self._sock = sock
        self._backlog: deque[_Packet] = deque()
        self._ahead: list[int] = []  # descriptors of the message that comes next,
        self._pieces: list[bytes] = []  # and its first bytes
        # A finaliser may post while this thread is inside `post`: hence the reentrant kind.
        self._lock = threading.RLock()

    def fileno(self) -> int:
        """The socket's descriptor, -1 when closed."""
        return self._sock.fileno()

    @property
    def congested(self) -> bool:
        """Whether packets wait for room in the socket's buffer."""
        return bool(self._backlog)

    def post(self, message: tuple[object, ...], fds: Sequence[int] = ()) -> None:
        """Send, or keep for the next `flush` when the buffer is full. Never blocks.

        Raises:
            OSError: the other end is gone, or no descriptor is free.
            Exception: whatever pickling `message` raises; then nothing was sent.
        """
        body, owned = _packed(message)
        with self._lock:
            packets = [_Packet(*one, owned) for one in _packets(body, [*owned, *fds])]
            self._backlog += packets
            try:
                self.flush()
                for packet in packets:
                    packet.keep()
            except OSError:
                self._backlog = deque(p for p in self._backlog if p not in packets)
                for packet in packets:
                    packet.close()
                raise

    def flush(self) -> bool:
        """Send what waits, as far as there is room; whether nothing is left."""
        with self._lock:
            while self._backlog:
                packet = self._backlog[0]
                try:
                    _send(self._sock, packet.data, packet.fds, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return False
                self._backlog.popleft()
                packet.close()
            return True

    def put(self, message: tuple[object, ...], fds: Sequence[int] = ()) -> None:
        """Send and wait for room as long as it takes (the worker's side; the trainer always reads).

        Raises:
            OSError: the other end is gone.
            Exception: whatever pickling `message` raises; then nothing was sent.
        """
        body, owned = _packed(message)
        try:
            for piece, some in _packets(body, [*owned, *fds]):
                _send(self._sock, piece, some)
        finally:
            _close(owned)

    def get(self, timeout_s: float | None = None) -> tuple[tuple[object, ...], list[int]] | None:
        """The next message and its descriptors (now the caller's); None when none came in time.

        Raises:
            EOFError: the other end is gone, or this one was closed.
            OSError: this process may have no more descriptors, so the message is lost.
        """
        while True:
            try:
                if timeout_s is not None and not self._readable(timeout_s):
                    return None
                packet, fds, flags, _ = socket.recv_fds(
                    self._sock, 2 * _INLINE, _MAX_FDS, socket.MSG_CMSG_CLOEXEC
                )
            except ConnectionError as e:
                raise EOFError("the other end is gone") from e
            except (OSError, ValueError) as e:
                if self.fileno() < 0:  # by another thread: the pinning one reads, this one replaces
                    raise EOFError("this end is closed") from e
                raise
            if not packet:
                raise EOFError("the other end is gone")
            if flags & socket.MSG_CTRUNC:
                _close(fds)
                raise OSError(errno.EMFILE, "Too many open files: raise the limit (ulimit -n)")
            self._ahead += fds
            if packet[:1] == _PIECE:
                self._pieces.append(packet[1:])
            elif packet[:1] != _AHEAD:
                return self._message(packet)

    def _message(self, packet: bytes) -> tuple[tuple[object, ...], list[int]]:
        """The message whose last packet this is."""
        fds, self._ahead = self._ahead, []
        pieces, self._pieces = self._pieces, []
        if packet[:1] == _SPILLED:
            return _spilled(fds)
        body = b"".join([*pieces, packet[1:]]) if pieces else memoryview(packet)[1:]
        return pickle.loads(body), fds  # noqa: S301  our own child's words

    def _readable(self, timeout_s: float) -> bool:
        poll = select.poll()  # select() knows no descriptor beyond 1023
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def abandon(self) -> None:
        """Close the descriptor in a forked child; another thread may have held the lock."""
        self._sock.close()

    def close(self) -> None:
        """Close the socket and forget what was not sent."""
        with self._lock:
            while self._backlog:
                self._backlog.popleft().close()
            self._sock.close()


def _send(sock: socket.socket, data: bytes, fds: list[int], flags: int = 0) -> None:
    """`socket.send_fds`, whose flags Python passes over (3.11 does): it would wait for room."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
    sock.sendmsg([data], rights, flags)


def _packets(body: bytes, fds: list[int]) -> list[tuple[bytes, list[int]]]:
    """The packets of a message; the last one tells what it is."""
    cut = max(len(fds) - 1, 0) // _MAX_FDS * _MAX_FDS
    packets = [(_AHEAD, fds[i : i + _MAX_FDS]) for i in range(0, cut, _MAX_FDS)]
    if len(body) > _INLINE:  # there was no memfd to be had
        *pieces, last = [body[i : i + _INLINE] for i in range(1, len(body), _INLINE)]
        packets += [(_PIECE + piece, []) for piece in pieces]
        body = _PLAIN + last
    return [*packets, (body, fds[cut:])]


def _packed(message: tuple[object, ...]) -> tuple[bytes, list[int]]:
    """The message as bytes, or the descriptor it lies behind (the caller's to close)."""
    sink = io.BytesIO()
    pickler = pickle.Pickler(sink, 5)
    pickler.dispatch_table = _REDUCERS
    sink.write(_PLAIN)
    pickler.dump(message)
    body = sink.getvalue()
    if len(body) <= _INLINE:
        return body, []
    try:
        fd = os.memfd_create("creel-message", os.MFD_CLOEXEC)
    except OSError:  # no descriptor to be had
        return body, []
    try:
        with os.fdopen(fd, "wb", closefd=False) as file:
            file.write(memoryview(body)[1:])
    except OSError:  # no memory there
        os.close(fd)
        return body, []
    except BaseException:
        os.close(fd)
        raise
    return _SPILLED, [fd]


def _reduced(tensor: torch.Tensor) -> _Reduced:
    """An index that is a tensor, by its own elements: it may be one of a whole permutation's."""
    if tensor.is_cpu and tensor.layout is torch.strided and tensor.dtype in _INDICES:
        return torch.from_numpy, (tensor.numpy(),)
    as_ever: _Reduced = tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]  # torch's
    return as_ever


_INDICES = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool})
_REDUCERS = ChainMap({torch.Tensor: _reduced}, cast(Any, copyreg.dispatch_table))


def _spilled(fds: list[int]) -> tuple[tuple[object, ...], list[int]]:
    with os.fdopen(fds[0], "rb") as file:
        file.seek(0)
        return pickle.loads(file.read()), fds[1:]  # noqa: S301  our own child's words


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
