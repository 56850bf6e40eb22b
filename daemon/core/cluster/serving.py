"""Serving peers: residents are pinned from a peer's request until their bytes are sent. Pure.

Objects on this node's disk are first read into memory, a few requests at a time. Objects that this
node is to hold but lacks (`EvictionPolicy.brings`) are read from the source: once, for all peers.
The answer waits for these reads, and for others from source or disk that are under way, as long as
the peer can wait; then it refuses what is missing. It refuses at once what only a reader of this
node could make room for by advancing, or what comes from a peer: they may be waiting for the peer
that asks. A request that comes before this node has begun a task of a job that rehearses, or has
taken over what the task before it left, is looked at once that is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from creel.cache.memory.pools.free_ranges import NOWHERE
from creel.cache.storage.version import CHANGING, UNKNOWN
from creel.daemon.core.admission import Admission, Urgency
from creel.daemon.core.events import DISK, Action, PeerAsked, PeerServed, ServeObjects
from creel.daemon.core.inflight import Inflight
from creel.daemon.core.readers.dataset_readers import DatasetReaders
from creel.daemon.core.residency import NO_EPOCH, Residency
from creel.errors import IllegalEventError
from creel.policies.arrays import Index, Mask, every, some
from creel.policies.cluster.homes import FOR_PEERS
from creel.policies.eviction.policy import FETCHING, RESIDENT, SKIPPED, STORED
from creel.policies.prefetch import affordable

#: Requests examined in each event, 32 MiB at most; 255 peers may have a thousand waiting.
_LOOKED_AT = 16
#: Most unknown datasets that are remembered.
_EXPECTED = 256


@dataclass(eq=False, slots=True)
class _PeerWait:
    """A request of a peer. `Residency.served` has the objects that are pinned for it."""

    number: int
    residency: Residency
    ids: Index  # as requested; some may not exist in this dataset
    until: float  # time of the answer at the latest
    lacking: Index  # objects on disk that are not being read yet
    nbytes: int = 0  # bytes read from disk for this request
    awaited: int = 0  # one of the objects in flight, if there are any
    answered: bool = False


class Serving:
    """All peer requests that are being answered.

    Attributes:
        short: datasets with an object on disk that finds no room in memory, and its `due` as in
            `Admission.place`.
    """

    def __init__(
        self,
        admission: Admission,
        inflight: Inflight,
        readers: Mapping[str, DatasetReaders],
        emit: Callable[[Action], None],
    ) -> None:
        self.short: dict[Residency, int] = {}
        self._admission = admission
        self._inflight = inflight
        self._residencies: Mapping[str, Residency] = admission.residencies
        self._readers = readers
        self._emit = emit
        self._serving: dict[int, _PeerWait] = {}  # requests by number, until the peer has the bytes
        self._waiting: list[_PeerWait] = []  # not answered yet, oldest first
        self._nbytes = 0  # bytes read from disk and not sent yet
        #: Requests that are not looked at yet, and the times of their answers at the latest.
        self._early: list[tuple[PeerAsked, float]] = []
        self._expected: dict[str, float] = {}  # until when datasets without readers are waited for

    def asked(self, e: PeerAsked, now: float) -> None:
        """Pin the residents of a request; answer it once its objects on disk have been read.

        Raises:
            IllegalEventError: the request is being answered already.
        """
        if e.request in self._serving:
            raise IllegalEventError(f"request {e.request} is being answered")
        self._take(e, now + e.wait_s, now)

    def _take(self, e: PeerAsked, until: float, now: float) -> None:
        """Begin to answer a request; later, if this node is about to have its objects."""
        residency = self._residencies.get(e.dataset)
        if now < until and self._early_for(e, residency, now):
            self._early.append((e, until))
            return
        if residency is None:
            self._emit(_nothing(e.request, len(e.ids)))
            return
        ids = e.ids.astype(np.intp)
        known = ids[(ids >= 0) & (ids < len(residency))]
        known = known[residency.versions.held(known) != CHANGING]
        here = known[residency.state[known] == RESIDENT]
        stored = known[
            (residency.state[known] != RESIDENT) & (residency.disk.state[known] == STORED)
        ]
        residency.pin(here)
        residency.served[e.request] = here
        request = _PeerWait(e.request, residency, ids, until, np.unique(stored))
        self._serving[e.request] = request
        if self._bring(request, known, now) or len(stored):
            self._waiting.append(request)
        else:
            self._answer(request, now)

    def _early_for(self, e: PeerAsked, residency: Residency | None, now: float) -> bool:
        """Return whether the dataset is new here, or is about to take over objects of another one.

        Nodes of a job that rehearses begin a task somewhat earlier or later. A dataset that nobody
        reads here is waited for once.
        """
        if residency is not None:
            ids = e.ids[(e.ids >= 0) & (e.ids < len(residency))].astype(np.intp)
            arriving = residency.arriving(ids, now)
            if arriving is not None and some(arriving):
                return True
            if residency.first_readers is not None or residency.policy.all_uses:
                return False
        if not any(residency.first_readers is not None for residency in self._residencies.values()):
            return False
        if len(self._expected) >= _EXPECTED and e.dataset not in self._expected:
            self._expected.clear()
        return now < self._expected.setdefault(e.dataset, now + e.wait_s)

    def _bring(self, request: _PeerWait, ids: Index, now: float) -> bool:
        """Wait for objects in flight, and start those that this node reads for all peers.

        Objects that come from a peer are not awaited, as that peer may be waiting for this answer,
        unless this node relays them for a peer that does not know their holder, and so ranks below
        both. Returns whether the request waits for any object.
        """
        residency = request.residency
        policy = residency.policy
        if not policy.reads_for_peers:
            return False
        ids = np.unique(ids)
        absent = ids[(residency.state[ids] <= SKIPPED) & (residency.disk.state[ids] != STORED)]
        absent = absent[policy.brings(absent)]
        absent = absent[
            : self._inflight.may_start_for_peers(residency.expected(residency.length[absent]))
        ]
        if len(absent):
            length = residency.length[absent]
            place, lack = self._admission.room(residency, length, FOR_PEERS, Urgency.AHEAD)
            absent, place, length = absent[~lack], place[~lack], length[~lack]
            for origin, of in residency.origins(absent, NO_EPOCH):
                self._inflight.start(
                    residency, absent[of], place[of], length[of], FOR_PEERS, now, now, origin=origin
                )
        coming = ids[residency.state[ids] == FETCHING]
        if len(coming):
            from_peer = np.isin(coming, self._inflight.from_peers(residency))
            if policy.homes is not None:
                from_peer &= ~policy.homes.relayed(coming)
            coming = coming[~from_peer]
        self._pin(request, coming)
        request.awaited = int(coming[0]) if len(coming) else 0
        return len(coming) > 0

    def advance(self, now: float, *, every: bool = False) -> None:
        """Read objects from disk for the oldest requests; answer requests that need not wait.

        Younger requests are examined only if the object that they waited for has come.

        every: examine all requests.
        """
        self.short.clear()
        early, self._early = self._early, []
        for e, until in early:
            self._take(e, until, now)
        if not self._waiting:
            return
        reads = True
        for place, request in enumerate(self._waiting):
            if place >= _LOOKED_AT and not every and self._still_waits(request):
                continue
            self._pin_found(request)
            if reads:
                self._read(request, now)
            # One request at a time: two with half the room each would wait for each other.
            reads = reads and not len(request.lacking)
            self._end(request, now)
        self._waiting = [r for r in self._waiting if not r.answered]

    @staticmethod
    def _still_waits(request: _PeerWait) -> bool:
        """Return whether a request still waits for the same object; takes a microsecond."""
        state = request.residency.state[request.awaited]
        return len(request.lacking) > 0 or bool(state == FETCHING)

    def _end(self, request: _PeerWait, now: float) -> None:
        """Answer a request if it waits for no object any more, or its time is over."""
        residency = request.residency
        pinned = residency.served[request.number]
        coming = pinned[residency.state[pinned] == FETCHING]
        if now >= request.until or not (len(request.lacking) or len(coming)):
            self._answer(request, now)
        elif len(coming):
            request.awaited = int(coming[0])

    def _pin_found(self, request: _PeerWait) -> None:
        """Pin a request's objects that are resident or in flight, whoever started the fetch."""
        residency, ids = request.residency, request.lacking
        state = residency.state[ids]
        self._pin(request, ids[(state == RESIDENT) | (state == FETCHING)])
        request.lacking = ids[(state <= SKIPPED) & (residency.disk.state[ids] == STORED)]

    def _read(self, request: _PeerWait, now: float) -> None:
        """Start to read a request's objects from disk, as far as there is room."""
        residency, ids = request.residency, request.lacking
        length = residency.length[ids]
        others = self._nbytes - request.nbytes
        room = max(self._admission.disk.most_writing - others, 0)
        k = min(self._inflight.may_start(length, urgent=True), affordable(length, room))
        if not k and not others:
            k = min(len(ids), 1)
        if not k:
            return
        groups = self._readers[residency.name].groups
        due = groups[0].clock() if groups else 0
        ids, length, left = ids[:k], length[:k], ids[k:]
        # A refusal would cost a read as well, and the peer a second of waiting before it.
        place = self._admission.place(residency, length, due, Urgency.STALLED)
        good = place != NOWHERE
        if not every(good):
            self.short[residency] = due
        self._inflight.start(
            residency, ids[good], place[good], length[good], due, now, request.until, origin=DISK
        )
        self._pin(request, ids[good])
        request.nbytes += int(length[good].sum())
        self._nbytes += int(length[good].sum())
        request.lacking = np.append(ids[~good], left)
        if not every(good) and self._hopeless(residency):
            request.lacking = ids[:0]

    def _hopeless(self, residency: Residency) -> bool:
        """Return whether room can only come from a reader of this node that advances.

        That reader may be waiting for the peer that asks.
        """
        sending = any(r.answered and r.residency is residency for r in self._serving.values())
        return residency.disk.hopeless and not sending

    @staticmethod
    def _pin(request: _PeerWait, ids: Index) -> None:
        residency = request.residency
        residency.pin(ids, distinct=True)
        residency.served[request.number] = np.append(residency.served[request.number], ids)

    def _answer(self, request: _PeerWait, now: float) -> None:
        """Send the residents of a request and unpin its other objects."""
        residency, ids = request.residency, request.ids
        pinned = residency.served[request.number]
        here: Mask = residency.state[pinned] == RESIDENT
        residency.unpin(pinned[~here])
        served = residency.served[request.number] = pinned[here]
        answer = _nothing(request.number, len(ids))
        at = np.flatnonzero(np.isin(ids, served))
        answer.place[at], answer.nbytes[at] = residency.places(ids[at]), residency.length[ids[at]]
        answer.version[at] = residency.versions.held(ids[at])
        since = residency.versions.since(ids[at])
        answer.age[at] = np.where(since > 0, np.maximum(now - since, 0.0), np.inf)
        residency.counts["served"] += len(at)
        residency.counts["served_nbytes"] += int(residency.length[ids[at]].sum())
        residency.counts["refused"] += len(ids) - len(at)
        request.answered = True
        self._emit(answer)

    def served(self, e: PeerServed) -> None:
        """Unpin a request's objects, because its bytes have been sent."""
        request = self._serving.pop(e.request, None)
        if request is None:
            return
        residency = request.residency
        self._nbytes -= request.nbytes
        ids = residency.served.pop(e.request)
        residency.unpin(ids)
        residency.policy.sent(ids)
        residency.release(ids)
        residency.departed.answered(e.request)


def _nothing(request: int, objects: int) -> ServeObjects:
    place, nbytes = np.full(objects, NOWHERE, np.int64), np.full(objects, -1, np.int64)
    version, age = np.full(objects, UNKNOWN, np.int64), np.full(objects, np.inf)
    return ServeObjects(request, place, nbytes, version, age)
