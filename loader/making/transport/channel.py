"""Channel: messages between a trainer and one worker over a unix SOCK_SEQPACKET socket.

There are no threads and no queues. A packet is one whole message, with descriptors. It is pickled,
unlike the daemon's messages, because a sampler yields any Python object and a worker raises any
exception. Messages are small, since payload lies in slots. A longer message is sent in a memfd, or
in several packets if no memfd can be made. If the receiver has no descriptor left (MSG_CTRUNC), a
message of `put` is sent again without descriptors. A full socket buffer cannot block both
processes: the trainer never blocks in `post`, and reads while it waits.
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
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import torch

from creel.cache.memory.memfd import memfd
from creel.system.fd_packets import close_all, receive, send

#: Longest packet in bytes; longer messages use a memfd. A socket's buffer is 208 KiB by default.
_INLINE = 16 << 10
#: Most descriptors in one packet (the kernel's SCM_MAX_FD); further ones go ahead in packets of
#: their own.
_MAX_FDS = 253
_PLAIN, _SPILLED, _FDS_ALONE, _MESSAGE_PIECE = b"p", b"s", b"a", b"c"
#: Kinds _PLAIN and _SPILLED whose receiver answers whether all descriptors arrived (_WHOLE, _CUT).
_PLAIN_ACKED, _SPILLED_ACKED = b"P", b"S"
_WHOLE, _CUT = b"w", b"x"
_Reduced: TypeAlias = "str | tuple[Any, ...]"


def pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets that close on exec."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class _Packet:
    """A packet to send: bytes and descriptors."""

    __slots__ = ("_ours", "data", "fds")

    def __init__(self, data: bytes, fds: list[int], ours: list[int]) -> None:
        """`ours`: those of `fds` that the packet owns."""
        self.data = data
        self.fds = fds
        self._ours = [fd for fd in fds if fd in ours]

    def close(self) -> None:
        """Close the owned descriptors, after the packet was sent or dropped."""
        close_all(self._ours)
        self._ours = self.fds = []

    def keep(self) -> None:
        """Duplicate the caller's descriptors, which it may close before the packet is sent.

        Raises:
            OSError: no descriptor is free.
        """
        for i, fd in enumerate(self.fds):
            if fd not in self._ours:
                self.fds[i] = os.dup(fd)
                self._ours.append(self.fds[i])


class Channel:
    """One end. Messages are tuples of picklable values, sent with descriptors."""

    def __init__(self, sock: socket.socket, *, whole: bool = False) -> None:
        """Take over `sock` and close it in `close`.

        whole: send each message as one packet, as several processes read from the other end.
        """
        self._sock = sock
        self._whole = whole
        self._backlog: deque[_Packet] = deque()
        self._fds: list[int] = []  # descriptors received for the next message
        self._pieces: list[bytes] = []  # and the first bytes of its body
        self._cut = False  # whether some of its descriptors were cut off
        #: For each unanswered message: makes it again without descriptors.
        self._unanswered: deque[Callable[[], tuple[object, ...]]] = deque()
        # Reentrant: a finaliser may call `post` while this thread holds it.
        self._lock = threading.RLock()

    def fileno(self) -> int:
        """Return the socket's descriptor, -1 when closed."""
        return self._sock.fileno()

    @property
    def congested(self) -> bool:
        """Whether packets wait for room in the socket's buffer."""
        return bool(self._backlog)

    def post(self, message: tuple[object, ...], fds: Sequence[int] = ()) -> None:
        """Send without blocking; if the socket's buffer is full, the next `flush` sends the rest.

        Raises:
            OSError: the other process has closed the channel, or no descriptor is free.
            Exception: pickling `message` failed, and nothing was sent.
        """
        body, owned = _packed(message)
        if self._whole and len(body) > _INLINE:
            raise OSError(errno.EMFILE, "no descriptor for a long message: raise ulimit -n")
        with self._lock:
            if not (self._backlog or owned or fds) and len(body) <= _INLINE and self._sent(body):
                return
            packets = [_Packet(*packet, owned) for packet in _packets(body, [*owned, *fds])]
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

    def _sent(self, body: bytes) -> bool:
        """Send a packet without descriptors; False if the socket's buffer is full."""
        try:
            self._sock.send(body, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        return True

    def flush(self) -> bool:
        """Send waiting packets until the buffer is full; True if none is left."""
        with self._lock:
            while self._backlog:
                packet = self._backlog[0]
                try:
                    send(self._sock, packet.data, packet.fds, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return False
                self._backlog.popleft()
                packet.close()
            return True

    def put(
        self,
        message: tuple[object, ...],
        fds: Sequence[int] = (),
        without: Callable[[], tuple[object, ...]] | None = None,
    ) -> None:
        """Send, waiting for room without a limit. For workers: the trainer always reads.

        without: makes the same message without descriptors. A later `get` calls it if the other end
        had no descriptor left.

        Raises:
            OSError: the other process has closed the channel.
            Exception: pickling `message` failed, and nothing was sent.
        """
        body, owned = _packed(message)
        try:
            if without is not None and (owned or fds):
                body = body[:1].upper() + body[1:]
                self._unanswered.append(without)
            for piece, some in _packets(body, [*owned, *fds]):
                send(self._sock, piece, some)
        finally:
            close_all(owned)

    def _answered(self, answer: bytes) -> None:
        """Handle the answer to the earliest unanswered message."""
        without = self._unanswered.popleft()
        if answer == _CUT:
            for piece, _ in _packets(_pickled(without()), []):
                send(self._sock, piece, [])

    def get(self, timeout_s: float | None = None) -> tuple[tuple[object, ...], list[int]] | None:
        """Return the next message and its descriptors, which the caller owns; None on timeout.

        Raises:
            EOFError: the other process has closed the channel, or this one was closed.
            OSError: this process has no free descriptor; the message is lost.
        """
        while (packet := self._packet(timeout_s)) is not None:
            kind = packet[:1]
            if kind in (_WHOLE, _CUT):
                self._answered(kind)
            elif kind == _MESSAGE_PIECE:
                self._pieces.append(packet[1:])
            elif kind != _FDS_ALONE and self._received(kind):
                return self._message(packet)
        return None

    def _packet(self, timeout_s: float | None) -> bytes | None:
        """Return the next packet, and keep its descriptors; None on timeout. Raises as `get`."""
        try:
            if timeout_s and not self._readable(timeout_s):
                return None
            blocks = 0 if timeout_s is None else socket.MSG_DONTWAIT
            packet, fds, flags = receive(self._sock, 2 * _INLINE, _MAX_FDS, blocks)
        except BlockingIOError:
            return None
        except ConnectionError as e:
            raise EOFError("the other process has closed the channel") from e
        except (OSError, ValueError) as e:
            if self.fileno() < 0:  # another thread has closed it
                raise EOFError("this end is closed") from e
            raise
        self._fds += fds
        self._cut |= bool(flags & socket.MSG_CTRUNC)
        if not packet:
            raise EOFError("the other process has closed the channel")
        return packet

    def _received(self, kind: bytes) -> bool:
        """Answer a message if its kind wants that; False if the sender will repeat it.

        Raises:
            OSError: descriptors were cut off, and the message is lost.
        """
        cut, self._cut = self._cut, False
        if cut:
            close_all(self._fds)
            self._fds, self._pieces = [], []
        if kind in (_PLAIN_ACKED, _SPILLED_ACKED):
            with (
                self._lock,
                suppress(OSError),
            ):  # closed by the other process: the next read reports it
                self._backlog.append(_Packet(_CUT if cut else _WHOLE, [], []))
                self.flush()
        elif cut:
            raise OSError(errno.EMFILE, "Too many open files: raise the limit (ulimit -n)")
        return not cut

    def _message(self, packet: bytes) -> tuple[tuple[object, ...], list[int]]:
        """Return the message that ends with this packet."""
        fds, self._fds = self._fds, []
        pieces, self._pieces = self._pieces, []
        if packet[:1] in (_SPILLED, _SPILLED_ACKED):
            with os.fdopen(fds[0], "rb") as file:
                file.seek(0)
                return pickle.loads(file.read()), fds[1:]  # noqa: S301  from our own child or parent
        body = b"".join([*pieces, packet[1:]]) if pieces else memoryview(packet)[1:]
        return pickle.loads(body), fds  # noqa: S301  from our own child or parent

    def _readable(self, timeout_s: float) -> bool:
        poll = select.poll()  # select() fails for descriptors above 1023
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def abandon(self) -> None:
        """Close the descriptor in a forked child. Takes no lock: another thread may hold it."""
        self._sock.close()

    def close(self) -> None:
        """Close the socket and drop unsent packets."""
        with self._lock:
            while self._backlog:
                self._backlog.popleft().close()
            self._sock.close()


def _packets(body: bytes, fds: list[int]) -> list[tuple[bytes, list[int]]]:
    """Return (bytes, descriptors) of each packet of a message; the last one has its kind."""
    cut = max(len(fds) - 1, 0) // _MAX_FDS * _MAX_FDS
    packets = [(_FDS_ALONE, fds[i : i + _MAX_FDS]) for i in range(0, cut, _MAX_FDS)]
    if len(body) > _INLINE:  # no memfd could be made
        *pieces, last = [body[i : i + _INLINE] for i in range(1, len(body), _INLINE)]
        packets += [(_MESSAGE_PIECE + piece, []) for piece in pieces]
        body = body[:1] + last
    return [*packets, (body, fds[cut:])]


def _packed(message: tuple[object, ...]) -> tuple[bytes, list[int]]:
    """Return the message as bytes, or in a memfd, which the caller must close."""
    body = _pickled(message)
    if len(body) <= _INLINE:
        return body, []
    try:
        fd = memfd("creel-message")
    except OSError:  # no free descriptor
        return body, []
    try:
        with os.fdopen(fd, "wb", closefd=False) as file:
            file.write(memoryview(body)[1:])
    except OSError:  # no memory for the memfd
        os.close(fd)
        return body, []
    except BaseException:
        os.close(fd)
        raise
    return _SPILLED, [fd]


def _pickled(message: tuple[object, ...]) -> bytes:
    sink = io.BytesIO()
    pickler = pickle.Pickler(sink, 5)
    pickler.dispatch_table = _REDUCERS
    sink.write(_PLAIN)
    pickler.dump(message)
    return sink.getvalue()


def _reduced(tensor: torch.Tensor) -> _Reduced:
    """Pickle only an index tensor's elements: its storage may be a whole permutation."""
    if tensor.is_cpu and tensor.layout is torch.strided and tensor.dtype in _INDICES:
        return torch.from_numpy, (tensor.numpy(),)
    as_ever: _Reduced = tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]  # torch's
    return as_ever


_INDICES = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool})


class _Reducers(dict[type, Callable[[Any], _Reduced]]):
    """A dispatch table that falls back to Python's without copying it."""

    def __missing__(self, kind: type) -> Callable[[Any], _Reduced]:
        return copyreg.dispatch_table[kind]


_REDUCERS = _Reducers({torch.Tensor: _reduced})
