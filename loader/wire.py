"""Packets between a trainer and one of its workers: a unix packet socket, no threads, no queues.

A packet is one pickled message, whole or not at all; descriptors ride along. Messages are small by
construction (payload lies in slots); one that is not travels in a memfd, so that a full socket
buffer can never make two processes wait for each other: the trainer never blocks in `post`.
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
from collections import ChainMap, deque
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import torch

#: Longest packet; what is longer goes through a memfd. A socket's buffer is 208 KiB by default.
_INLINE = 16 << 10
#: Most descriptors of one packet (the kernel's SCM_MAX_FD); more of them go ahead in packets of
#: their own.
_MAX_FDS = 253
_PLAIN, _SPILLED, _AHEAD = b"p", b"s", b"a"
_Reduced: TypeAlias = "str | tuple[Any, ...]"


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends; both close on exec."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Wire:
    """One end. Messages are tuples of picklable values; `get` gives them with their descriptors."""

    def __init__(self, sock: socket.socket) -> None:
        """Take over `sock` and close it in `close`."""
        self._sock = sock
        self._backlog: deque[tuple[bytes, list[int]]] = deque()
        self._ahead: list[int] = []  # descriptors of the message that comes next
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
        packet, owned = _packed(message)
        try:
            for fd in fds:  # the caller may close its own before the packet leaves
                owned.append(os.dup(fd))
        except OSError:
            _close(owned)
            raise
        with self._lock:
            self._backlog += _packets(packet, owned)
            self.flush()

    def flush(self) -> bool:
        """Send what waits, as far as there is room; whether nothing is left."""
        with self._lock:
            while self._backlog:
                packet, owned = self._backlog[0]
                try:
                    socket.send_fds(self._sock, [packet], owned, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return False
                self._backlog.popleft()
                _close(owned)
            return True

    def put(self, message: tuple[object, ...], fds: Sequence[int] = ()) -> None:
        """Send and wait for room as long as it takes (the worker's side; the trainer always reads).

        Raises:
            OSError: the other end is gone.
            Exception: whatever pickling `message` raises; then nothing was sent.
        """
        packet, owned = _packed(message)
        try:
            for piece, some in _packets(packet, [*owned, *fds]):
                socket.send_fds(self._sock, [piece], some)
        finally:
            _close(owned)

    def get(self, timeout_s: float | None = None) -> tuple[tuple[object, ...], list[int]] | None:
        """The next message and its descriptors (now the caller's); None when none came in time.

        Raises:
            EOFError: the other end is gone, or this one was closed.
            OSError: this process may have no more descriptors, so the message is lost.
        """
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
        if packet[:1] == _AHEAD:
            self._ahead += fds
            return self.get(timeout_s)
        fds, self._ahead = self._ahead + fds, []
        if packet[:1] == _SPILLED:
            return _spilled(fds)
        return pickle.loads(memoryview(packet)[1:]), fds  # noqa: S301  our own child's words

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
                _close(self._backlog.popleft()[1])
            self._sock.close()


def _packets(packet: bytes, fds: list[int]) -> list[tuple[bytes, list[int]]]:
    """The packets of a message; the message itself is the last one."""
    cut = max(len(fds) - 1, 0) // _MAX_FDS * _MAX_FDS
    ahead = [(_AHEAD, fds[i : i + _MAX_FDS]) for i in range(0, cut, _MAX_FDS)]
    return [*ahead, (packet, fds[cut:])]


def _packed(message: tuple[object, ...]) -> tuple[bytes, list[int]]:
    """The packet for `message` and the descriptors it needs (the caller's to close)."""
    sink = io.BytesIO()
    pickler = pickle.Pickler(sink, 5)
    pickler.dispatch_table = _REDUCERS
    pickler.dump(message)
    body = sink.getvalue()
    if len(body) < _INLINE:
        return _PLAIN + body, []
    fd = os.memfd_create("creel-message", os.MFD_CLOEXEC)
    try:
        with os.fdopen(fd, "wb", closefd=False) as file:
            file.write(body)
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
