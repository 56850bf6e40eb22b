"""The prefetcher: pins and fetches the next objects, and finds the steps that are ready. Pure.

What moves: the cursors of each session (`readers/cursors.py`), which says their order.

`_advance` moves `front` over one stretch of one urgency: it pins the objects, asks `Admission` for
room for the absent ones, and `Inflight` to fetch them. `advance_all` always takes the most urgent
session. A stretch without room for some objects ends `front` at the first of these, but fetches
those behind it for which there is room.

What may never happen.
* An object between `at` and `front` is evicted: pins forbid it. So a step that is ready stays so
  until it is done, or until the plan or the file's version changes, which lowers READY first.
* READY passes an object that a fetch is to bring, or whose version is not known to be current. (It
  passes one that is overdue: a reader has waited too long, and reads it directly.)
* Two fetches of one object are in flight: sessions share it (state FETCHING).
* A fetch far ahead takes the room of an object that is due sooner: `Admission` knows by `due` and
  `Urgency`. Only a reader that waits, with nothing else to read, may take it.
* A session stays in `stuck` although its wait is over. Each event clears `stuck`, except `Fetched`
  and `Tick`, which are frequent; a landing clears it where that leaves an unpinned object or an
  answer that lacks some, and a tick where a reader waits.
* A reader waits for a room that only its own progress would free: then the objects without room
  fail, and it reads them directly (`_with_room`).

Of the states of objects this module sets SKIPPED (`overtaken`, `_without_decoded`), OVERDUE
(`overtaken`), and FAILED where there is no room (`_with_room`). `Inflight.start` sets FETCHING,
`Landing` what becomes of that, `Residency.evict` ABSENT.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from creel.cache.memory.pools.free_ranges import NOWHERE
from creel.cache.memory.shared_words import EARLY_STEPS
from creel.daemon.core.admission import Admission, Urgency
from creel.daemon.core.events import SOURCE
from creel.daemon.core.inflight import FETCHED_AT_ONCE, SCANNED_AT_ONCE, Inflight
from creel.daemon.core.readers.sessions import RankStream
from creel.daemon.core.residency import Residency
from creel.policies.arrays import Index, Ints, Mask, some
from creel.policies.eviction.policy import FAILED, FETCHING, OVERDUE, RESIDENT, SKIPPED
from creel.policies.prefetch import Window, lead

#: Most objects whose fetches one event starts; the next fetch that lands starts more. In new tables
#: each object costs about 10 us, while other clients wait.
_MAX_STARTED = 1024
#: A fetch may take as long as a step, and at least this long, in seconds.
_GRAIN_S = 0.01
#: Most of the memory that is pinned for coming steps, over all sessions.
_PINNED_SHARE = 0.5
#: Share of an epoch's objects that is fetched before the epoch begins, or ahead of use in streams
#: with repeats. Each costs a read, as it takes the room of an object that would be kept.
_AHEAD_SHARE = 0.005


class Prefetcher:
    """Advances each session's `front`, a position, and `ready`, a step.

    All objects before `front` are pinned, and are being fetched if they were absent.
    """

    def __init__(self, admission: Admission, inflight: Inflight, window: Window) -> None:
        self._admission = admission
        self._inflight = inflight
        self._window = window
        #: Sessions that wait for room, for other ranks, or for objects that a peer does not have
        #: yet. Cleared when the wait may be over.
        self.stuck: set[int] = set()
        #: By session that waits for room: its dataset, and the `due` of the objects without room.
        self.lacking: dict[int, tuple[Residency, int]] = {}

    def set_reach(self, s: RankStream, sessions: int) -> None:
        """Set how far a session may read ahead, in positions; `sessions` share the memory."""
        stream, residency, window = s.stream, s.residency, self._window
        cursors, end = s.cursors, stream.end
        done, at = cursors.done, cursors.at
        steps = s.pace.horizon(residency.latency.seconds, window)
        share = min(_PINNED_SHARE * self._admission.space.usable / sessions, window.nbytes)
        reach = min(stream.start(min(done + steps, end)), at + int(share / residency.mean))
        least = done + 1
        fits, policy = self._admission.missing(residency) == 0, residency.policy
        if not fits and policy.short_prefetch:
            ahead = max(
                _AHEAD_SHARE * len(residency),
                policy.read_ahead_room(self._admission.share(residency) / residency.mean),
            )
            reach = min(reach, at + int(ahead / residency.sessions))
            least = done + 2
        elif not fits and residency.disk.completes(residency.resident):
            # The disk is quick, and objects read ahead take the room of objects to be read again.
            steps = min(done + s.pace.min_ahead, end)
            ahead_at = at + int(_AHEAD_SHARE * len(residency) / residency.sessions)
            reach = min(reach, max(ahead_at, stream.start(steps)))
        if cursors.stalling:
            least = max(least, cursors.ready + 1)
        cursors.reach = max(reach, stream.start(min(least, end)))

    def overtaken(self, s: RankStream) -> None:
        """Handle a reader that has read steps directly, before they were ready.

        If the reader is faster than the source, it would read the next steps before their fetches
        land, so these steps are not fetched. The reader reads them itself (absent objects become
        SKIPPED, those in flight OVERDUE) and finds the steps after them in memory. Steps with
        objects on disk or at peers are fetched anyway, as the reader would ask the source.
        """
        residency, stream, rate = s.residency, s.stream, s.residency.source_rate
        done, at, front = s.cursors.done, s.cursors.at, s.cursors.front
        step_s = rate.seconds(stream.start(min(done + 1, stream.end)) - at)
        landed_s = rate.seconds(len(self._inflight.ids(residency)) + FETCHED_AT_ONCE)
        steps = lead(s.pace, step_s, landed_s, self._window)
        stop = stream.start(min(done + steps, stream.epoch(done)[1]))
        ids = stream.objects(s.cursors.checked, stop).astype(np.intp)
        epoch = stream.epoch(done)[0] + s.epoch_shift
        left = ids[residency.state[ids] <= FETCHING]
        if any(origin != SOURCE for origin, _ in residency.origins(left, epoch)):
            return
        residency.move(left[residency.state[left] == FETCHING], OVERDUE)
        if front < stop:
            ids = stream.objects(front, stop).astype(np.intp)
            state = residency.state[ids]
            residency.pin(ids, distinct=s.group.uses.distinct(epoch))
            residency.move(ids[state < FETCHING], SKIPPED)
            s.count(state, int(np.count_nonzero(state < FETCHING)))
            s.cursors.pinned(stop)

    def advance_ready(self, s: RankStream) -> None:
        """Move `ready` over all steps whose objects are resident and current, or failed."""
        cursors, limit = s.cursors, s.limit
        checked, blocked = cursors.checked, cursors.blocked
        if checked < limit and blocked is not None and self._still_blocked(s, blocked):
            return
        blocked, failed = None, 0
        positions = FETCHED_AT_ONCE
        while checked < limit and blocked is None:
            ids = s.stream.objects(checked, min(checked + positions, limit))
            positions = min(2 * positions, SCANNED_AT_ONCE)
            states = s.residency.state[ids]
            coming = self._awaited(s, ids.astype(np.intp), states)
            first = int(coming.argmax())
            if coming[first]:
                blocked = int(ids[first])
                states = states[:first]
            failed += int(np.count_nonzero(states == FAILED))
            checked += len(states)
        cursors.settled(checked, s.stream.step_at(checked), failed, blocked)
        if blocked is not None:
            self._still_blocked(s, blocked)  # may request a check of the object's version

    def _still_blocked(self, s: RankStream, blocked: int) -> bool:
        """Return whether the object that blocks the session is still awaited."""
        ids = np.array([blocked])
        state = s.residency.state[ids]
        if not some(self._awaited(s, ids, state)):
            return False
        versions = s.residency.versions
        if state[0] == RESIDENT and len(versions.unasked(ids, s.since, s.since_remote)):
            s.cursors.ask_again()  # the object landed after this position's check
        return True

    def find_early(self, s: RankStream) -> None:
        """Set `early`: the steps after `ready` whose objects are all resident.

        One hung object must not delay workers that make other batches.
        """
        first, last = s.cursors.ready + 1, s.stream.step_at(s.limit)
        last = min(last, first + EARLY_STEPS)
        if first >= last or s.cursors.wanted <= first:
            return  # the early steps found before are still complete
        starts = np.array([s.stream.start(step) for step in range(first, last + 1)])
        ids = s.stream.objects(int(starts[0]), int(starts[-1])).astype(np.intp)
        awaited = np.zeros(len(ids) + 1, np.intp)
        self._awaited(s, ids, s.residency.state[ids]).cumsum(out=awaited[1:])
        complete = np.diff(awaited[starts - starts[0]]) == 0
        s.cursors.found_early(tuple((first + complete.nonzero()[0]).tolist()))

    @staticmethod
    def _awaited(s: RankStream, ids: Index, state: NDArray[np.uint8]) -> Mask:
        """Return (k,) whether each object, or its file's version, is in flight."""
        coming: Mask = state == FETCHING
        if s.since_remote:
            coming |= (state == RESIDENT) & ~s.current(ids)
        return coming

    def advance_all(self, sessions: Iterable[RankStream], now: float) -> None:
        """Advance the most urgent session until none can advance or enough fetches started."""
        before = self._inflight.objects
        todo = [s for s in sessions if _within_reach(s) and s.id not in self.stuck]
        while todo and self._inflight.objects - before < _MAX_STARTED:
            s = todo[0] if len(todo) == 1 else min(todo, key=_order)
            if not self._advance(s, now) or not _within_reach(s):
                todo.remove(s)

    def _advance(self, s: RankStream, now: float) -> bool:
        """Pin and fetch a session's next objects; return False if room or limits forbid it."""
        residency, start = s.residency, s.cursors.front
        urgent, stop = self._stretch(s)
        ids = s.stream.objects(start, stop).astype(np.intp)
        # All of these positions belong to one epoch.
        epoch = s.stream.epoch(s.stream.step_at(start))[0] + s.epoch_shift
        distinct = s.group.uses.distinct(epoch)
        state = residency.state[ids]
        absent = (state <= FAILED).nonzero()[0]
        decoded = absent[:0]
        if len(absent):
            absent = self._to_fetch(residency, ids, state, absent, distinct=distinct)
            absent, decoded = self._without_decoded(s, ids, absent)
            taken = self._first_portion(s, absent, stop)
            ids, state, absent = ids[:taken], state[:taken], absent[absent < taken]
        residency.pin(ids, distinct=distinct)
        taken = len(ids)
        if len(absent):
            k = self._fetch(s, ids[absent], now, urgent=urgent)
            if k < len(absent):
                taken = int(absent[k])
                absent = absent[:k]
                residency.unpin(ids[taken:], distinct=distinct)
                residency.release(ids[taken:])
        s.cursors.pinned(start + taken, lacks=taken < len(ids) and s.id in self.stuck)
        if len(decoded):  # these are no reads of files
            state = np.delete(state, decoded[decoded < taken])
            taken -= int(np.count_nonzero(decoded < taken))
        s.count(state[:taken], len(absent))
        self.advance_ready(s)
        return taken > 0

    def _stretch(self, s: RankStream) -> tuple[bool, int]:
        """Return whether a reader stalls for the next positions, and the position to stop at."""
        stream, cursors = s.stream, s.cursors
        front = cursors.front
        if cursors.stalling:
            stop = stream.start(cursors.ready + 1)
            if front < stop:
                return True, min(stop, front + FETCHED_AT_ONCE)
        # One urgency class: a single step close to the reader, more steps further ahead.
        step = stream.step_at(front)
        last = min(step + max((step - cursors.done) // 2, 1), stream.epoch(step)[1])
        return False, min(cursors.reach, front + FETCHED_AT_ONCE, stream.start(last))

    def _first_portion(self, s: RankStream, absent: Index, stop: int) -> int:
        """Return how many positions to fetch together: a step, or more from a quick source.

        All objects of a fetch land together, so a slow source is asked for one step at a time.
        """
        stream, front = s.stream, s.cursors.front
        most = s.residency.source_rate.deliverable(max(s.pace.step_s, _GRAIN_S))
        if len(absent) > most:
            beyond = stream.step_at(front + int(absent[int(most)]))
            stop = min(stop, stream.start(max(beyond, stream.step_at(front) + 1)))
        return stop - front

    def _to_fetch(
        self,
        residency: Residency,
        ids: Index,
        state: NDArray[np.uint8],
        absent: Index,
        *,
        distinct: bool,
    ) -> Index:
        """Return the part of `absent` to fetch: each object once, failed ones only if unpinned."""
        if state[absent].any():
            absent = absent[(state[absent] <= SKIPPED) | (residency.pins[ids[absent]] == 0)]
        if distinct:
            return absent
        wanted = np.sort(ids[absent])
        if some(wanted[1:] == wanted[:-1]):
            absent = absent[np.sort(np.unique(ids[absent], return_index=True)[1])]
        return absent

    @staticmethod
    def _without_decoded(s: RankStream, ids: Index, absent: Index) -> tuple[Index, Index]:
        """Leave to the reader what it keeps decoded; return the positions of others, and of these.

        In a cluster other nodes may ask this one for the object, whatever its own readers keep.
        """
        if s.twin is None or s.group.deals.view is not None:
            return absent, absent[:0]
        has = s.twin.has(ids[absent])
        s.residency.move(ids[absent[has]], SKIPPED)
        return absent[~has], absent[has]

    def _fetch(self, s: RankStream, ids: Index, now: float, *, urgent: bool) -> int:
        """Fetch objects as far as possible; return how many of the first ones are settled.

        Objects after one without room are fetched as well, as their turn comes soon, but only once:
        they are not pinned, so another session could evict them again and again.
        """
        residency = s.residency
        starving = urgent and s.cursors.starving
        if residency.policy.by_epoch and s.ahead_of_others and not starving:
            self.stuck.add(s.id)
            return 0
        k = self._inflight.may_start(residency.expected(residency.length[ids]), urgent=urgent)
        if not k:
            return 0  # the limits are reached; there may be room
        ids = ids[:k]
        step = s.stream.step_at(s.cursors.front)
        epoch = s.stream.epoch(step)[0] + s.epoch_shift
        ids, k = self._not_awaited(s, ids, epoch, now, urgent=urgent)
        if not len(ids):
            return 0
        due = s.policy_step(step)
        soon = urgent or residency.disk.hopeless or step - s.cursors.done <= s.pace.min_ahead
        urgency = Urgency.STALLED if starving else Urgency.SOON if soon else Urgency.AHEAD
        ids, offset, settled = self._with_room(s, ids, due, urgency)
        # The queue of a quick source is short and stays in order: sorted by deadline, it would wake
        # the reader for every step, which slows down small records from the page cache.
        deadline = s.deadline(
            step, now, in_turn=residency.source_rate.deliverable(_GRAIN_S) < FETCHED_AT_ONCE
        )
        length = residency.length[ids]
        for origin, which in residency.origins(ids, epoch):
            self._inflight.start(
                residency,
                ids[which],
                offset[which],
                length[which],
                due,
                now,
                deadline,
                origin=origin,
            )
        return min(k, settled)

    def _not_awaited(
        self, s: RankStream, ids: Index, epoch: int, now: float, *, urgent: bool
    ) -> tuple[Index, int]:
        """Return the ids that are not awaited, and how many precede one that is.

        Awaited are objects that a peer will have only later, unless a reader waits for them, and
        those that another dataset of this node leaves to this one, until a tick.
        """
        residency = s.residency
        awaited = None if urgent else residency.awaited(ids, epoch, s.group.clock())
        arriving = None if s.cursors.starved else residency.arriving(ids, now)
        if arriving is not None:
            awaited = arriving if awaited is None else awaited | arriving
        if awaited is None or not some(awaited):
            return ids, len(ids)
        self.stuck.add(s.id)
        k = int(awaited.argmax())
        return ids[~awaited] if k or s.cursors.front != s.cursors.lacked else ids[:0], k

    def _with_room(
        self, s: RankStream, ids: Index, due: int, urgency: Urgency
    ) -> tuple[Index, Ints, int]:
        """Make room; return the ids with room, their places, and how many ids are settled.

        The ids before the first one without room are settled. If a reader has nothing else to read,
        all ids are settled: those without room fail, and the reader reads them directly.
        """
        residency, length = s.residency, s.residency.length[ids]
        gives_up = urgency is Urgency.STALLED and not self._admission.waits(residency)
        again = s.cursors.front == s.cursors.lacked and not gives_up
        room = self._room_again if again else self._admission.room
        offset, lack = room(residency, length, due, urgency)
        ids = ids[: len(lack)]
        if not some(lack):
            return ids, offset, len(ids)
        settled = len(ids)
        if gives_up:
            residency.fail(ids[lack])
        else:
            settled = int(lack.argmax())
            self.stuck.add(s.id)
            if self._admission.disk:
                self.lacking[s.id] = residency, due
        return ids[~lack], offset[~lack], settled

    def _room_again(
        self, residency: Residency, length: Ints, due: int, urgency: Urgency
    ) -> tuple[Ints, Mask]:
        """Do as `Admission.room` after the first object found no room: try that object alone first.

        The others are skipped if the first finds no room, or has an unknown length: room for the
        latter is a guess that is not allocated yet.
        """
        offset, lack = self._admission.room(residency, length[:1], due, urgency)
        if lack[0] or offset[0] == NOWHERE or len(length) == 1:
            return offset, lack
        others = self._admission.room(residency, length[1:], due, urgency)
        return np.append(offset, others[0]), np.append(lack, others[1])


def _within_reach(s: RankStream) -> bool:
    return s.cursors.front < s.cursors.reach


def _order(s: RankStream) -> tuple[bool, float]:
    """Sort key: stalled sessions come first, then those whose next objects are needed soonest."""
    ahead = s.stream.step_at(s.cursors.front) - s.cursors.done
    return not s.cursors.stalling, ahead * (s.pace.step_s or 1.0)
