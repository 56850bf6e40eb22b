"""Asking the storage for versions of files, ahead of use. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from creel.daemon.events import Check
from creel.daemon.flights import Flights
from creel.daemon.holding import Holding, Index
from creel.daemon.sessions import Session
from creel.daemon.versions import Files
from creel.policies.retain import RESIDENT

#: Positions looked at in one go.
_CHUNK = 512


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """One check that is under way."""

    holding: Holding
    files: Files
    generation: int
    begun: float


class Checks:
    """All checks that were started and have not ended.

    A check asks about the files of the next steps of a session whose objects are held already; what
    has yet to be fetched tells its version when it is read.
    """

    def __init__(self, flights: Flights) -> None:
        self._flights = flights
        self._under_way: dict[int, _Asked] = {}
        self._last = 0

    def ask(self, s: Session, now: float) -> list[Check]:
        """The checks that a session needs as far as it was brought in."""
        if not s.since_remote:
            return []
        out: list[Check] = []
        limit = s.limit
        while s.verified < limit:
            stop = min(s.verified + _CHUNK, limit)
            ids = s.stream.objects(s.verified, stop).astype(np.intp)
            due = s.due(s.stream.step_at(s.verified), now, in_turn=False)
            out += self._about(s, ids[s.holding.life[ids] == RESIDENT], now, due)
            s.verified = stop
        return out

    def _about(self, s: Session, ids: Index, now: float, due: float) -> list[Check]:
        h = s.holding
        files = h.versions.unasked(ids, s.since, s.since_remote)
        if not len(files):
            return []
        generation = self._flights.generation
        h.versions.asked[files] = generation
        self._last += 1
        self._under_way[self._last] = _Asked(h, files, generation, now)
        return [Check(self._last, h.name, files, due)]

    def land(self, check: int) -> _Asked | None:
        """Take a check off the books; None when it is not on them."""
        return self._under_way.pop(check, None)

    def hung(self, h: Holding, object_id: int, before: float) -> list[_Asked]:
        """Checks of an object's file that began before a time."""
        file = int(h.versions.files(np.array([object_id]))[0])
        asked = (a for a in self._under_way.values() if a.holding is h and a.begun < before)
        return [a for a in asked if file in a.files]

    def forget(self, h: Holding) -> None:
        """A dataset goes; what is answered about it now is of no use."""
        self._under_way = {n: a for n, a in self._under_way.items() if a.holding is not h}
