"""Enters results of fetches and version checks: arrived and outdated objects. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from creel.cache.memory.pools.free_ranges import NOWHERE
from creel.cache.storage.version import UNKNOWN
from creel.daemon.core.admission import Admission, Urgency
from creel.daemon.core.checks import Checks
from creel.daemon.core.disk.spilling import Spilling
from creel.daemon.core.events import DISK, HELD, SOURCE, Checked, Fetched
from creel.daemon.core.inflight import Inflight, InflightFetch
from creel.daemon.core.prefetcher import Prefetcher
from creel.daemon.core.readers.sessions import RankStream
from creel.daemon.core.residency import NO_EPOCH, Residency
from creel.policies.arrays import Floats, Index, Ints, Mask, every, some
from creel.policies.eviction.policy import FAILED, FETCHING, OVERDUE, RESIDENT


@dataclass(frozen=True, eq=False)
class Landing:
    """Enters the results of fetches and checks.

    Args:
        sessions: all sessions, a live view.
        announce: publishes how far a session is ready.
    """

    admission: Admission
    inflight: Inflight
    prefetcher: Prefetcher
    checks: Checks
    spilling: Spilling
    sessions: Mapping[int, RankStream]
    announce: Callable[[RankStream], None]

    def fetched(self, e: Fetched, now: float) -> None:
        pending = self.inflight.land(e.fetch, len(e.nbytes))
        if pending is None:
            return  # the fetch was forgotten meanwhile
        residency, nbytes = pending.residency, e.nbytes
        version = np.full(len(nbytes), UNKNOWN, np.int64) if e.version is None else e.version
        asked = np.zeros(len(nbytes)) if e.asked is None else e.asked
        good = (nbytes >= 0) & ((nbytes == pending.length) | (pending.offset == NOWHERE))
        again, deadline = np.zeros(len(nbytes), np.bool_), now  # to be fetched from the source
        if pending.origin == SOURCE:
            if not pending.cancelled:  # a cancelled fetch does not measure the source
                residency.latency.saw(max(now - pending.begun, 0.0))
                residency.source_rate.saw(len(pending.ids), pending.begun, now)
            good[good] = self._current(pending, good, version, asked)
            residency.counts["reads"] += int(np.count_nonzero(good))
            residency.counts["read_nbytes"] += int(nbytes[good].sum())
            if pending.cancelled:  # objects that a plan needs again
                again = (nbytes < 0) & (residency.pins[pending.ids] > 0)
        elif pending.origin == HELD:
            # Generation 0: the bytes came from a peer.
            current = self._current if pending.generation else self._still_current
            good[good] = current(pending, good, version, asked)
        else:
            good[good] = self._still_current(pending, good, version, asked)
            self._count_answer(pending, good, nbytes)
            # What no reader wants any more was read ahead by one that has left.
            used = (residency.active or residency.warming >= 0) and not pending.cancelled
            again, deadline = ~good & (used | (residency.pins[pending.ids] > 0)), pending.deadline
        if some(again):
            self._fetch_again(pending.only(again), now, deadline)
            pending, nbytes, good = pending.only(~again), nbytes[~again], good[~again]
        known = pending.offset != NOWHERE
        if every(good) and every(known):
            if residency.landed(pending.ids, pending.offset):
                self.prefetcher.stuck.clear()
        else:
            self.prefetcher.stuck.clear()
            self._partly(pending, good, known, nbytes, now)

    def _count_answer(self, pending: InflightFetch, good: Mask, nbytes: Ints) -> None:
        """Count the objects that disk or peer had, and those that it lacked."""
        residency = pending.residency
        origin = "disk" if pending.origin == DISK else "peer"
        residency.counts[f"{origin}_reads"] += int(np.count_nonzero(good))
        residency.counts[f"{origin}_nbytes"] += int(nbytes[good].sum())
        if not pending.cancelled:
            residency.counts[f"{origin}_misses"] += int(np.count_nonzero(~good))
        if pending.origin == DISK:
            self.prefetcher.stuck.clear()  # the room on disk of these objects may be reused now
            residency.disk.changed(len(pending.ids))
            residency.disk.lost(pending.ids[~good])

    def _fetch_again(self, lacking: InflightFetch, now: float, deadline: float) -> None:
        """Fetch missing objects into the same rooms; from peers only if none was asked yet."""
        residency = lacking.residency
        origins: list[tuple[int, slice | Index]] = [(SOURCE, slice(None))]
        if lacking.cancelled and lacking.origin != SOURCE:
            origins = residency.origins(lacking.ids, NO_EPOCH)
        for origin, of in origins:
            self.inflight.start(
                residency,
                lacking.ids[of],
                lacking.offset[of],
                lacking.length[of],
                lacking.due,
                now,
                deadline,
                origin=origin,
            )

    def _current(self, pending: InflightFetch, good: Mask, version: Ints, asked: Floats) -> Mask:
        """Return (k,) whether each object read is current; may outdate others of its file."""
        residency, ids = pending.residency, pending.ids[good]
        late, changed = residency.versions.read(ids, version[good], pending.generation, asked[good])
        self._changed(residency, changed)
        newest = max((s.since for s in self._readers(residency)), default=0)
        if pending.generation < newest:  # steps are ready without these: leave them failed
            late |= residency.state[ids] == OVERDUE
        return ~late

    def _still_current(
        self, pending: InflightFetch, good: Mask, version: Ints, asked: Floats
    ) -> Mask:
        """Return (k,) whether objects from disk or a peer have the version known now."""
        residency, ids = pending.residency, pending.ids[good]
        opened = [(s.opened, s.since_remote) for s in self._readers(residency)]
        late = residency.versions.received(ids, version[good], asked[good], opened)
        late |= residency.state[ids] == OVERDUE  # steps may be ready without these
        return ~late

    def _readers(self, residency: Residency) -> list[RankStream]:
        return [s for s in self.sessions.values() if s.residency is residency]

    def checked(self, e: Checked) -> None:
        asked = self.checks.land(e.check)
        if asked is not None:
            versions = asked.residency.versions
            changed = versions.answered(asked.files, e.version, asked.generation, asked.begun)
            self._changed(asked.residency, changed)

    def _changed(self, residency: Residency, files: NDArray[np.int32]) -> None:
        """Remove all objects of changed files from disk and memory."""
        residency.disk.lost_files(files)
        self._outdate(residency, residency.residents_of(files))

    def _outdate(self, residency: Residency, ids: Index) -> None:
        """Evict residents of changed files; sessions that need them will fetch them again."""
        if not len(ids):
            return
        self.prefetcher.stuck.clear()
        removed = np.zeros(len(residency), np.bool_)
        removed[ids] = True
        for s in self._readers(residency):
            hit = removed[s.pinned()]
            if some(hit):
                unpinned = s.rewind(s.stream.step_at(s.cursors.at + int(hit.argmax())))
                self.announce(s)
                residency.release(unpinned[~removed[unpinned]])
        self.spilling.cancel(residency, ids)
        residency.outdate(ids)

    def _partly(
        self, pending: InflightFetch, good: Mask, known: Mask, nbytes: Ints, now: float
    ) -> None:
        """Handle a fetch with objects that failed or had an unknown length."""
        residency = pending.residency
        arrived = good & known
        residency.landed(pending.ids[arrived], pending.offset[arrived])
        residency.move(pending.ids[~arrived], FAILED)
        bad = known & ~good
        residency.give_back(pending.ids[bad], pending.offset[bad])
        wrong = bad & (nbytes >= 0)
        if residency.listed is not None:  # a length learned from a read may be wrong
            wrong |= bad & ~residency.listed[pending.ids]
        residency.clear_lengths(pending.ids[wrong])
        if not every(known):
            self._take_held(pending, good & ~known, nbytes, now)
        failed = residency.state[pending.ids] == FAILED
        residency.counts["failed"] += int((failed & (residency.pins[pending.ids] > 0)).sum())

    def _take_held(self, pending: InflightFetch, good: Mask, nbytes: Ints, now: float) -> None:
        """Make room for objects whose lengths are known since the read, and copy them there."""
        residency, ids, nbytes = pending.residency, pending.ids[good], nbytes[good]
        residency.set_lengths(ids, nbytes)
        stalled = any(s.cursors.stalling for s in self._readers(residency))
        urgency = Urgency.STALLED if stalled else Urgency.AHEAD
        place = self.admission.place(residency, nbytes, pending.due, urgency)
        placed = place != NOWHERE
        since = pending.generation if pending.origin == SOURCE else 0
        self.inflight.start(
            residency,
            ids[placed],
            place[placed],
            nbytes[placed],
            pending.due,
            now,
            pending.deadline,
            origin=HELD,
            generation=since,
        )

    def give_up(self, s: RankStream, blocked: int, before: float) -> None:
        """Stop waiting for the object `blocked`, if it was requested before time `before`."""
        residency = s.residency
        if residency.state[blocked] == FETCHING:
            pending = self.inflight.find(residency, blocked)
            if pending is not None and pending.begun < before:
                residency.move(pending.ids, OVERDUE)  # until the fetch lands
                s.cursors.failed += len(pending.ids)
        elif residency.state[blocked] == RESIDENT:
            for asked in self.checks.hung(residency, blocked, before):
                # The objects are fetched again; a fetch that hangs becomes overdue.
                self._changed(residency, asked.files)
