"""Results of fetches and of version checks: what arrived, and what is out of date. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from creel.cache.memory.free_ranges import ABSENT as NOWHERE
from creel.daemon.core.admission import Admission, Urgency
from creel.daemon.core.checks import Checks
from creel.daemon.core.disk.spilling import Spilling
from creel.daemon.core.events import DISK, HELD, SOURCE, Action, Checked, Fetched, Sizes
from creel.daemon.core.inflight import Inflight, InflightFetch
from creel.daemon.core.prefetcher import Prefetcher
from creel.daemon.core.residency import Index, Residency
from creel.daemon.core.sessions import RankStream
from creel.policies.eviction.policy import FAILED, FETCHING, OVERDUE, RESIDENT
from creel.policies.masks import every, some


class Landing:
    """Enters what fetches and checks bring.

    Args:
        admission, inflight, prefetcher, checks, spilling: the core's.
        sessions: all sessions, a live view.
        emit: takes the next action; announce: says how far a session is ready.
    """

    def __init__(
        self,
        admission: Admission,
        inflight: Inflight,
        prefetcher: Prefetcher,
        checks: Checks,
        spilling: Spilling,
        sessions: Mapping[int, RankStream],
        emit: Callable[[Action], None],
        announce: Callable[[RankStream], None],
    ) -> None:
        self._admission = admission
        self._inflight = inflight
        self._prefetcher = prefetcher
        self._checks = checks
        self._spilling = spilling
        self._sessions = sessions
        self._emit = emit
        self._announce = announce

    def fetched(self, e: Fetched, now: float) -> None:
        """Enter what a fetch has brought."""
        pending = self._inflight.land(e.fetch, len(e.nbytes))
        if pending is None:
            return  # forgotten meanwhile
        residency = pending.residency
        known = pending.offset != NOWHERE
        good = (e.nbytes >= 0) & ((e.nbytes == pending.length) | ~known)
        if pending.origin == SOURCE:
            if not pending.cancelled:  # what was not read says nothing of the source
                residency.latency.saw(max(now - pending.begun, 0.0))
                residency.source_rate.saw(len(pending.ids), pending.begun, now)
            good[good] = self._current(pending, good, e.version, e.asked)
            residency.counts["reads"] += int(np.count_nonzero(good))
            residency.counts["read_nbytes"] += int(e.nbytes[good].sum())
        elif pending.origin == HELD:
            of_peer = not pending.generation
            current = self._still_current if of_peer else self._current
            good[good] = current(pending, good, e.version)
        else:
            if pending.origin == DISK:  # its room there may be another's now
                self._prefetcher.stuck.clear()
                residency.disk.changed(len(pending.ids))
            e, pending = self._received(e, pending, good, now)
            good, known = np.ones(len(pending.ids), np.bool_), pending.offset != NOWHERE
        if pending.cancelled and not every(good):
            e, pending, good = self._wanted_again(e, pending, good, now)
            known = pending.offset != NOWHERE
        if every(good) and every(known):
            if residency.landed(pending.ids, pending.offset):
                self._prefetcher.stuck.clear()
        else:
            self._prefetcher.stuck.clear()
            self._partly(e, pending, good, known, now)

    def _wanted_again(
        self, e: Fetched, pending: InflightFetch, good: NDArray[np.bool_], now: float
    ) -> tuple[Fetched, InflightFetch, NDArray[np.bool_]]:
        """Fetch what was cancelled, and is in a plan once more; return the rest."""
        again = (e.nbytes < 0) & (pending.residency.pins[pending.ids] > 0)
        wanted, rest = pending.only(again), ~again
        room = wanted.ids, wanted.offset, wanted.length
        for action in self._inflight.start(pending.residency, *room, wanted.due, now, now):
            self._emit(action)
        version = None if e.version is None else e.version[rest]
        return Fetched(e.fetch, e.nbytes[rest], version), pending.only(rest), good[rest]

    def _received(
        self, e: Fetched, pending: InflightFetch, good: NDArray[np.bool_], now: float
    ) -> tuple[Fetched, InflightFetch]:
        """Handle an answer of disk or peer: what it did not have is fetched from the source.

        Returns the event and the fetch, of what it had alone.
        """
        residency = pending.residency
        version = np.zeros(len(good), np.int64) if e.version is None else e.version
        good[good] = self._still_current(pending, good, version, e.asked)
        who = "disk" if pending.origin == DISK else "peer"
        residency.counts[f"{who}_reads"] += int(np.count_nonzero(good))
        residency.counts[f"{who}_nbytes"] += int(e.nbytes[good].sum())
        if every(good):
            return e, pending
        residency.counts[f"{who}_misses"] += int(np.count_nonzero(~good))
        rest = pending.only(~good)
        if pending.origin == DISK:
            residency.disk.lost(rest.ids)
        again = rest.ids, rest.offset, rest.length
        for action in self._inflight.start(residency, *again, rest.due, now, rest.deadline):
            self._emit(action)
        return Fetched(e.fetch, e.nbytes[good], version[good]), pending.only(good)

    def _current(
        self,
        pending: InflightFetch,
        good: NDArray[np.bool_],
        version: Sizes | None,
        asked: NDArray[np.float64] | None = None,
    ) -> NDArray[np.bool_]:
        """(k,) whether each object read is still of use; may outdate other objects of its file."""
        residency = pending.residency
        found = None if version is None else version[good]
        when = pending.generation, None if asked is None else asked[good]
        late, changed = residency.versions.read(pending.ids[good], found, *when)
        self._changed(residency, changed)
        newest = max(
            (s.since for s in self._sessions.values() if s.residency is residency), default=0
        )
        if pending.generation < newest:  # steps are ready without these: leave them failed
            late |= residency.state[pending.ids[good]] == OVERDUE
        return ~late

    def _still_current(
        self,
        pending: InflightFetch,
        good: NDArray[np.bool_],
        version: Sizes | None,
        asked: NDArray[np.float64] | None = None,
    ) -> NDArray[np.bool_]:
        """(k,) whether each object, read by somebody some time ago, is of the version known now.

        asked: (k,) when the storage was asked for that version, at the earliest.
        """
        residency, ids = pending.residency, pending.ids[good]
        found = np.zeros(len(good), np.int64) if version is None else version
        own = (s for s in self._sessions.values() if s.residency is residency)
        opened = [(s.opened, s.since_remote) for s in own]
        when = None if asked is None else asked[good]
        late = residency.versions.received(ids, found[good], when, opened)
        late |= residency.state[ids] == OVERDUE  # whose steps may be ready without it
        return ~late

    def checked(self, e: Checked) -> None:
        """Enter the versions that a check has found."""
        asked = self._checks.land(e.check)
        if asked is not None:
            residency = asked.residency
            self._changed(
                residency,
                residency.versions.answered(asked.files, e.version, asked.generation, asked.begun),
            )

    def _changed(self, residency: Residency, files: NDArray[np.int32]) -> None:
        """Forget all objects of changed files."""
        residency.disk.lost_files(files)
        self._outdate(residency, residency.residents_of(files))

    def _outdate(self, residency: Residency, ids: Index) -> None:
        """Evict residents of changed files; sessions that need them fetch them again."""
        if not len(ids):
            return
        self._prefetcher.stuck.clear()
        removed = np.zeros(len(residency), np.bool_)
        removed[ids] = True
        for s in (s for s in self._sessions.values() if s.residency is residency):
            hit = removed[s.stream.objects(s.at, s.front)]
            if some(hit):
                unpinned = s.rewind(s.stream.step_at(s.at + int(hit.argmax())))
                self._announce(s)
                residency.release(unpinned[~removed[unpinned]])
        self._spilling.cancel(residency, ids)
        residency.outdate(ids)

    def _partly(
        self,
        e: Fetched,
        pending: InflightFetch,
        good: NDArray[np.bool_],
        known: NDArray[np.bool_],
        now: float,
    ) -> None:
        """Handle a fetch in which objects failed or had an unknown length."""
        residency = pending.residency
        residency.state[pending.ids] = FAILED
        residency.landed(pending.ids[good & known], pending.offset[good & known])
        bad = known & ~good
        residency.give_back(pending.ids[bad], pending.offset[bad])
        wrong = bad & (e.nbytes >= 0)
        if residency.listed is not None:  # a length learned from a read may be the cause
            wrong |= bad & ~residency.listed[pending.ids]
        residency.clear_lengths(pending.ids[wrong])
        if not every(known):
            self._take_held(pending, good & ~known, e.nbytes, now)
        failed = residency.state[pending.ids] == FAILED
        residency.counts["failed"] += int((failed & (residency.pins[pending.ids] > 0)).sum())

    def _take_held(
        self, pending: InflightFetch, good: NDArray[np.bool_], nbytes: Sizes, now: float
    ) -> None:
        """Make room for objects whose lengths are known only after reading, and copy them there."""
        residency, ids, nbytes = pending.residency, pending.ids[good], nbytes[good]
        residency.set_lengths(ids, nbytes)
        stalled = any(s.stalling for s in self._sessions.values() if s.residency is residency)
        urgency = Urgency.STALLED if stalled else Urgency.AHEAD
        place = self._admission.place(residency, nbytes, pending.due, urgency)
        placed = place != NOWHERE
        room = ids[placed], place[placed], nbytes[placed]
        since = pending.generation if pending.origin == SOURCE else 0
        due, deadline = pending.due, pending.deadline
        for action in self._inflight.start(residency, *room, due, now, deadline, HELD, since):
            self._emit(action)

    def give_up(self, s: RankStream, before: float) -> None:
        """Stop waiting for what blocks a session, if it was requested before the time `before`."""
        residency, blocked = s.residency, s.blocked
        if residency.state[blocked] == FETCHING:
            pending = self._inflight.of(residency, blocked)
            if pending is not None and pending.begun < before:
                residency.state[pending.ids] = OVERDUE  # until it lands
                s.failed += len(pending.ids)
        elif residency.state[blocked] == RESIDENT:
            for asked in self._checks.hung(residency, blocked, before):
                # Their objects are fetched again; a fetch that hangs becomes overdue.
                self._changed(residency, asked.files)
