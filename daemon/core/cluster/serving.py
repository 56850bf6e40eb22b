"""Serving peers: residents are pinned from a peer's request until their bytes have left. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from creel.cache.memory.free_ranges import ABSENT as NOWHERE
from creel.cache.storage.version import CHANGING, UNKNOWN
from creel.daemon.core.events import Action, PeerAsked, PeerServed, ServeObjects
from creel.daemon.core.residency import Residency
from creel.errors import IllegalEventError
from creel.policies.eviction.policy import RESIDENT


class Serving:
    """All requests of peers that are being answered."""

    def __init__(
        self, residencies: Mapping[str, Residency], emit: Callable[[Action], None]
    ) -> None:
        self._residencies = residencies
        self._emit = emit
        self._serving: dict[int, Residency] = {}

    def asked(self, e: PeerAsked) -> None:
        """Pin what is here of a request, and answer it.

        Raises:
            IllegalEventError: the request is being answered already.
        """
        if e.request in self._serving:
            raise IllegalEventError(f"request {e.request} is being answered")
        k = len(e.ids)
        answer = ServeObjects(
            *(e.request, np.full(k, NOWHERE, np.int64), np.full(k, -1, np.int64)),
            np.full(k, UNKNOWN, np.int64),
        )
        h = self._residencies.get(e.dataset)
        if h is not None:
            self._pin(h, e, answer)
        self._emit(answer)

    def _pin(self, h: Residency, e: PeerAsked, answer: ServeObjects) -> None:
        """Fill in an answer, and keep what it says until its bytes have left."""
        ids = e.ids.astype(np.intp)
        known = (ids >= 0) & (ids < len(h))
        here = np.flatnonzero(known)
        version = h.versions.version[h.versions.files(ids[here])]
        good = (h.life[ids[here]] == RESIDENT) & (version != CHANGING)
        here, version = here[good], version[good]
        found = ids[here]
        answer.place[here], answer.nbytes[here] = h.places(found), h.length[found]
        answer.version[here] = version
        h.pin(found)
        h.served[e.request] = found
        h.counts["served"] += len(found)
        h.counts["served_nbytes"] += int(h.length[found].sum())
        h.counts["refused"] += len(ids) - len(found)
        self._serving[e.request] = h

    def served(self, e: PeerServed) -> None:
        """The bytes of a request have left: its objects may leave, too."""
        h = self._serving.pop(e.request, None)
        if h is None:
            return
        ids = h.served.pop(e.request)
        h.unpin(ids)
        if h.policy is not None:
            h.policy.sent(ids)
        h.release(ids)
        h.departed.answered(e.request)
