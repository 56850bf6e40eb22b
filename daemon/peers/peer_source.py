"""PeerSource: reads the objects of one dataset from another node's daemon.

It has the interface of `cache/storage/source.Source`, so that a fetch queue works with either. It
never raises: objects that the peer lacks, or did not send in time, get -1 bytes, and the caller
reads them from elsewhere. Every wait has a deadline.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from creel.cache.memory.buffers import Part
from creel.cache.storage.reads import Counters, Read, WholeObject
from creel.daemon.peers import wire
from creel.daemon.peers.link import PeerLink
from creel.daemon.peers.wire import LATER, Credentials
from creel.errors import MalformedError, ProtocolError, SourceError
from creel.policies.arrays import Index, Ints

log = logging.getLogger("creel.peers")

WAIT_S = 1.0  # longest time that a peer may take to get an object
ANSWER_S = 3.0  # time that an answer may take beyond WAIT_S
#: Bytes of one request; two requests are pending at a time, so that the peer always has one.
_REQUEST_NBYTES = 2 << 20
_WINDOW = 2
_GUESS_NBYTES = 128 << 10  # of an object of unknown length
#: Largest ratio between the rates of two nodes' clocks: NTP adjusts each by up to 500 ppm.
CLOCK_RATES = 1.001
#: Time after which a lost peer is tried again; each further failure doubles it, up to the maximum.
_LOST_S = 0.5
_LOST_MAX_S = 4.0

#: Called with the link, positions of objects and the answer about them; the payload follows.
_Take: TypeAlias = Callable[["PeerLink", Index, Read], None]


class PeerSource:
    """Reads objects from node `peer`; thread-safe.

    Each reading thread has a connection of its own; connections stay open for later reads.

    Args:
        address: host and port of the peer's `PeerServer`.
        peer: name of the peer's node.
        credentials: those of this node.

    Attributes:
        lost_until: time (`time.monotonic`) before which the peer is not asked: all reads fail at
            once.
    """

    def __init__(
        self,
        address: tuple[str, int],
        peer: str,
        dataset: str,
        credentials: Credentials,
    ) -> None:
        self.counters = Counters()
        self.lost_until = 0.0
        self._address = address
        self._peer = peer
        self._dataset = dataset
        self._credentials = credentials
        self._failures = 0  # since the peer last answered
        self._numbers = count(1)  # of requests
        self._idle: list[PeerLink] = []  # connections without a request
        self._busy: set[PeerLink] = set()  # those that wait for an answer
        self._closed = False
        self._lock = threading.Lock()

    def close(self) -> None:
        """End all connections, also those in use. Later reads fail at once."""
        with self._lock:
            self._closed = True
            for link in self._busy:  # the thread that uses the link closes it
                link.shut()
        self._close_idle()

    def read_parts(self, ids: NDArray[np.integer], length: Ints, parts: Sequence[Part]) -> Read:
        """Fill each of `parts` with an object.

        Args:
            ids: (k,) objects.
            length: (k,) bytes of each.
            parts: (k,) buffers, together of these lengths.

        Returns:
            nbytes: size of each object at the peer. An object was read only if this equals
                `length`; -1: the peer lacks the object, or is lost.
        """
        read, wanted = Read.failed(len(ids)), length.tolist()

        def take(link: PeerLink, where: Index, part: Read) -> None:
            into: list[memoryview] = []
            for i, size in zip(where.tolist(), part.nbytes.tolist(), strict=True):
                if size == wanted[i]:
                    if size:
                        into += parts[i]
                elif size > 0:
                    link.fill(into)
                    into = []
                    link.drain(size)
            link.fill(into)
            read.enter(where, part)

        self._read(ids, length, take)
        return read

    def read_whole(self, ids: NDArray[np.integer]) -> list[WholeObject | None]:
        """Return each object, of unknown length; None for objects that failed."""
        whole: list[WholeObject | None] = [None] * len(ids)

        def take(link: PeerLink, where: Index, part: Read) -> None:
            columns = (column.tolist() for column in part)
            for i, size, version, asked in zip(where.tolist(), *columns, strict=True):
                if size >= 0:
                    whole[i] = WholeObject(link.whole(size), version, asked)

        self._read(ids, np.full(len(ids), _GUESS_NBYTES), take)
        return whole

    # --- connections --------------------------------------------------------------------------

    def _read(self, ids: NDArray[np.integer], length: Ints, take: _Take) -> None:
        """Request all objects; try once more if a kept connection proves dead."""
        left = _requests(length)
        for _ in range(2):
            if not left or self._closed or time.monotonic() < self.lost_until:
                return
            link, kept = None, False
            try:
                link, kept = self._open()
                self._exchange(link, ids, left, take)
            except (OSError, ProtocolError) as e:
                if not (kept and isinstance(e, ConnectionError)):
                    self._lose(e)
                    return
                self._close_idle()  # the peer has restarted: these connections are dead as well
            else:
                self._failures = 0
            finally:
                if link is not None:
                    self._put_back(link, keep=not left)

    def _exchange(
        self, link: PeerLink, ids: NDArray[np.integer], left: deque[Index], take: _Take
    ) -> None:
        """Send the requests in `left` and take the answers; unanswered requests stay in `left`."""
        asked: dict[int, tuple[Index, float]] = {}  # request -> positions, time of sending
        try:
            while left or asked:
                while left and len(asked) < _WINDOW:
                    number = next(self._numbers)
                    where = left.popleft()
                    asked[number] = where, time.monotonic()
                    link.ask(number, self._dataset, ids[where], WAIT_S)
                number, arrays = link.answer(time.monotonic() + WAIT_S + ANSWER_S)
                began = time.monotonic()
                if number not in asked:
                    raise MalformedError("an answer without a request")
                where, sent = asked[number]
                nbytes, version, age = wire.answered(arrays, len(where))
                now = nbytes != LATER
                # The peer computed the age after this request was sent: this time is the earliest.
                since = np.where(np.isfinite(age), sent - age * CLOCK_RATES, 0.0)
                take(link, where[now], Read(nbytes[now], version[now], since[now]))
                if not now.all():
                    left.append(where[~now])
                del asked[number]
                here = nbytes >= 0
                if here.any():
                    reads, got = int(np.count_nonzero(here)), int(nbytes[here].sum())
                    self.counters.count(reads, got, time.monotonic() - began, 0)
        finally:
            left.extend(where for where, _ in asked.values())

    def _open(self) -> tuple[PeerLink, bool]:
        """Return a connection, and whether it is one that was kept."""
        with self._lock:
            link = self._idle.pop() if self._idle else None
            if link is not None:
                self._busy.add(link)
                return link, True
        try:
            link = PeerLink(self._address, self._peer, self._credentials, self._connected)
        except BaseException:
            with self._lock:
                self._busy = {link for link in self._busy if link.socket.fileno() >= 0}
            raise
        return link, False

    def _connected(self, link: PeerLink) -> None:
        with self._lock:
            self._busy.add(link)
            if self._closed:
                link.shut()

    def _put_back(self, link: PeerLink, *, keep: bool) -> None:
        with self._lock:
            self._busy.discard(link)
            keep = keep and not self._closed
            if keep:
                self._idle.append(link)
        if not keep:
            link.socket.close()

    def _close_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for link in idle:
            link.socket.close()

    def _lose(self, error: Exception) -> None:
        """Mark the peer as lost, so that it is not asked for a while."""
        now = time.monotonic()
        with self._lock:
            if self._closed or now < self.lost_until:
                return  # closed on purpose, or already marked by another thread
            self.lost_until = now + min(_LOST_S * 2**self._failures, _LOST_MAX_S)
            self._failures = min(self._failures + 1, 16)
        level = logging.WARNING if self._failures == 1 else logging.DEBUG
        # The text alone: a kept record would keep what the error's frames refer to.
        log.log(level, "node %s is lost: %s", self._peer, str(error))
        number = getattr(error, "errno", None) or 0
        self.counters.count_error(SourceError(number, str(error), f"peer://{self._peer}"))
        self._close_idle()


def _requests(length: Ints) -> deque[Index]:
    """Cut objects, by position, into requests of about _REQUEST_NBYTES.

    >>> _requests(np.array([1 << 20, 1 << 20, 1 << 20]))
    deque([array([0, 1]), array([2])])
    """
    at = np.arange(len(length))
    if not len(at):
        return deque()
    where = (length.cumsum() - 1) // _REQUEST_NBYTES, at // wire.MAX_OBJECTS
    cuts = np.flatnonzero(np.diff(where[0]) | np.diff(where[1])) + 1
    return deque(np.split(at, cuts))
