"""Checks of file versions against the storage, ahead of use. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from creel.daemon.core.events import Action, CheckVersions
from creel.daemon.core.inflight import SCANNED_AT_ONCE, Inflight
from creel.daemon.core.readers.sessions import RankStream
from creel.daemon.core.residency import Residency
from creel.daemon.core.versions import Files
from creel.policies.arrays import Index
from creel.policies.eviction.policy import RESIDENT

#: Most files of one check.
_MAX_FILES = 512


@dataclass(frozen=True, slots=True, eq=False)
class InflightCheck:
    """One check in flight."""

    residency: Residency
    files: Files
    generation: int
    begun: float


class Checks:
    """All version checks in flight.

    A check asks the storage for the versions of files whose objects are resident and belong to a
    session's next steps. Other objects need no check, as a fetch reports the version it reads.

    Args:
        emit: takes each action.
    """

    def __init__(self, inflight: Inflight, emit: Callable[[Action], None]) -> None:
        self._inflight = inflight
        self._emit = emit
        self._checks: dict[int, InflightCheck] = {}
        self._last = 0

    def ask(self, s: RankStream, now: float) -> None:
        """Start the checks that a session needs for its steps up to `limit`."""
        if not s.since_remote:
            return
        verified, limit = s.cursors.verified, s.limit
        many_files = s.residency.versions.number > _MAX_FILES
        at_once = _MAX_FILES if many_files else SCANNED_AT_ONCE
        next_step = s.stream.start(min(s.cursors.ready + 1, s.stream.end))
        while verified < limit:
            stop = min(verified + at_once, limit)
            if verified < next_step:  # a reader may wait for this step: check it alone
                stop = min(stop, next_step)
            ids = s.stream.objects(verified, stop).astype(np.intp)
            deadline = s.needed_at(s.stream.step_at(verified), now)
            self._check_files(s, ids[s.residency.state[ids] == RESIDENT], now, deadline)
            verified = stop
        s.cursors.versions_asked(verified)

    def _check_files(self, s: RankStream, ids: Index, now: float, deadline: float) -> None:
        residency = s.residency
        files = residency.versions.unasked(ids, s.since, s.since_remote)
        if not len(files):
            return
        generation = self._inflight.generation
        residency.versions.asked[files] = generation
        self._last += 1
        self._checks[self._last] = InflightCheck(residency, files, generation, now)
        self._emit(CheckVersions(self._last, residency.name, files, deadline))

    def land(self, check: int) -> InflightCheck | None:
        """Remove a check that has ended and return it; None if it is unknown."""
        return self._checks.pop(check, None)

    def hung(self, residency: Residency, object_id: int, before: float) -> list[InflightCheck]:
        """Return the checks of an object's file that began before time `before`."""
        file = int(residency.versions.files(np.array([object_id]))[0])
        asked = (a for a in self._checks.values() if a.residency is residency and a.begun < before)
        return [a for a in asked if file in a.files]

    def remove(self, residency: Residency) -> None:
        """Forget the checks of a removed dataset; their answers will be ignored."""
        self._checks = {n: a for n, a in self._checks.items() if a.residency is not residency}
