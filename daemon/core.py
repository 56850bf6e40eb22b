"""The node's mind: events in, actions out. No socket, no file, no clock, no thread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from creel.cache.extents import ABSENT as NOWHERE
from creel.cache.extents import must
from creel.cache.space import FixedPool, Space
from creel.daemon.ahead import Ahead
from creel.daemon.checks import Checks
from creel.daemon.events import (
    Action,
    Begun,
    Checked,
    Closed,
    Discard,
    Dropped,
    Event,
    Extended,
    Fetched,
    Lost,
    Opened,
    Progressed,
    Registered,
    SetReady,
    Sizes,
    Store,
    Tick,
    Truncated,
    Unregistered,
    Warm,
)
from creel.daemon.flights import Flight, Flights
from creel.daemon.holding import Holding, Index
from creel.daemon.sessions import Session
from creel.daemon.shares import Shares
from creel.errors import IllegalEventError, MalformedError
from creel.policies.masks import every, some
from creel.policies.prefetch import Window
from creel.policies.retain import (
    FAILED,
    FETCHING,
    OVERDUE,
    RESIDENT,
    EpochKeeper,
    RecentKeeper,
)

#: Who waits for an object, or for its version, longer than this goes to the source, as one read
#: that hangs must not hold up all later steps: seconds, and four times what a fetch takes at worst.
_OVERDUE_S = 5.0
_OVERDUE_LATENCIES = 4
_OVERDUE_MOST_S = 30.0
#: A relisting of all residents is due when this part of the dataset was planned anew.
_NEWS = 16


class Core:
    """What a node's daemon knows and decides.

    Args:
        space: the arena's bytes.
        config: how far ahead to work.
    """

    def __init__(self, space: Space, *, config: Window | None = None) -> None:
        self._window = config or Window()
        self._shares = Shares(space)
        self._flights = Flights(self._shares, self._window)
        self._ahead = Ahead(self._shares, self._flights, self._window)
        self._checks = Checks(self._flights)
        self._holdings = self._shares.holdings
        self._sessions: dict[int, Session] = {}
        self._past: Counter[str] = Counter()  # what datasets counted that are known no more
        self._out: list[Action] = []

    def handle(self, event: Event, now: float) -> list[Action]:
        """What to do about an event, in this order; `now` in monotonic seconds.

        Raises:
            MalformedError: a plan that does not go on where the last one ended. Nothing changed.
            IllegalEventError: an event that cannot happen. Nothing changed.
            Exception: whatever else (no memory, a bug): call `mend` before anything else.
        """
        self._out = []
        self._flights.mark()
        if not isinstance(event, Fetched | Tick):
            self._ahead.stuck.clear()  # something may have been given up, or is more urgent now
        self._shares.mover.begin(now)
        _HANDLERS[type(event)](self, event, now)
        for session in self._sessions.values():
            self._ahead.settle(session)
        fetches = self._ahead.pump(self._sessions.values(), now)
        self._out += self._shares.mover.take()  # before what is fetched to where they were
        self._out += fetches
        for session in self._sessions.values():
            self._out += self._checks.ask(session, now)
        for holding in self._holdings.values():
            if holding.warming >= 0:
                self._out += self._flights.warm(holding, now)
        for session in self._sessions.values():
            self._announce(session)
        self._shares.mover.done()
        return self._out

    def _announce(self, s: Session) -> None:
        if s.ready != s.told:
            s.told = s.ready
            self._out.append(SetReady(s.id, s.ready, s.failed))

    # --- events --------------------------------------------------------------------------------

    def _registered(self, e: Registered, now: float) -> None:
        del now
        if e.dataset in self._holdings:
            raise IllegalEventError(f"dataset {e.dataset!r} is registered already")
        told = e.offset, e.length, e.lengths, self._shares.space, e.versions
        self._holdings[e.dataset] = Holding(e.dataset, *told)

    def _opened(self, e: Opened, now: float) -> None:
        if e.dataset not in self._holdings or e.session in self._sessions:
            raise IllegalEventError(f"session {e.session} of {e.dataset!r} cannot open")
        holding = self._holdings[e.dataset]
        who = (e.session, e.job, e.rank, e.world)
        self._sessions[e.session] = holding.join(*who, now, e.recheck, self._generation())
        self._survey()

    def _generation(self) -> int:
        """From now on what was known of files before may be out of date, for somebody."""
        self._flights.generation += 1
        return self._flights.generation

    def _begun(self, e: Begun, now: float) -> None:
        del now
        s = self._sessions.get(e.session)
        if s is not None:
            s.begin(e.epoch, self._generation())

    def _extended(self, e: Extended, now: float) -> None:
        del now
        s = self._sessions.get(e.session)
        if s is None:
            return  # closed meanwhile
        if e.step != s.stream.end:
            raise MalformedError(f"the plan goes on at step {s.stream.end}, not {e.step}")
        s.stream.extend(e.epoch, e.objects, e.ends)
        s.blind = e.blind
        if s.recheck == "step":
            s.begin(e.epoch, self._generation())
        s.foretell(e.step)
        self._replanned(s, e.objects.astype(np.intp), e.epoch + s.epoch_shift)
        self._survey()

    def _truncated(self, e: Truncated, now: float) -> None:
        del now
        s = self._sessions.get(e.session)
        if s is None or e.step >= s.stream.end:
            return
        step = max(e.step, s.done)
        loose = s.rewind(step)
        s.wanted = min(s.wanted, step)
        s.truncate(step)
        s.group.replan()
        self._unplanned(s.holding, loose)

    def _progressed(self, e: Progressed, now: float) -> None:
        s = self._sessions.get(e.session)
        if s is None:
            return
        done = min(max(e.done, s.done), s.stream.end)
        if done > s.done:
            s.pace.progressed(done - s.done, now)
            self._consume(s, done)
        wanted = min(max(e.wanted, s.wanted), s.stream.end)
        if wanted > s.wanted:
            s.wanted = wanted
            s.pace.asked(wanted - s.done, stalls=s.stalling)
            s.stalls += s.stalling
        self._ahead.look(s, len(self._sessions))

    def _closed(self, e: Closed, now: float) -> None:
        del now
        s = self._sessions.pop(e.session, None)
        if s is None:
            return
        loose = s.stream.objects(s.at, s.front).astype(np.intp)
        s.holding.unpin(loose)
        s.holding.leave(s)
        s.group.replan()
        self._unplanned(s.holding, loose)

    def _fetched(self, e: Fetched, now: float) -> None:
        flight = self._flights.land(e.fetch, len(e.nbytes))
        if flight is None:
            return  # no longer current
        h = flight.holding
        h.latency.saw(max(now - flight.begun, 0.0))
        h.service.saw(len(flight.ids), flight.begun, now)
        known = flight.offset != NOWHERE
        good = (e.nbytes >= 0) & ((e.nbytes == flight.length) | ~known)
        good[good] = self._current(flight, good, e.version)
        if every(good) and every(known):
            if h.landed(flight.ids, flight.offset):
                self._ahead.stuck.clear()
        else:
            self._ahead.stuck.clear()
            self._partly(e, flight, good, known)
        h.counts["reads"] += int(np.count_nonzero(good))
        h.counts["read_nbytes"] += int(e.nbytes[good].sum())

    def _current(
        self, flight: Flight, good: NDArray[np.bool_], version: Sizes | None
    ) -> NDArray[np.bool_]:
        """(k,) whether each object that was read is still of use; others of its file may not be."""
        h = flight.holding
        found = None if version is None else version[good]
        late, changed = h.versions.read(flight.ids[good], found, flight.generation)
        self._outdate(h, h.residents_of(changed))
        newest = max((s.since for s in self._sessions.values() if s.holding is h), default=0)
        if flight.generation < newest:  # steps are ready without these: they stay as they are
            late |= h.life[flight.ids[good]] == OVERDUE
        return ~late

    def _checked(self, e: Checked, now: float) -> None:
        del now
        asked = self._checks.land(e.check)
        if asked is not None:
            h = asked.holding
            changed = h.versions.answered(asked.files, e.version, asked.generation)
            self._outdate(h, h.residents_of(changed))

    def _outdate(self, h: Holding, ids: Index) -> None:
        """These residents are of files that have changed: whoever needs them gets them anew."""
        if not len(ids):
            return
        self._ahead.stuck.clear()
        gone = np.zeros(len(h), np.bool_)
        gone[ids] = True
        for s in (s for s in self._sessions.values() if s.holding is h):
            hit = gone[s.stream.objects(s.at, s.front)]
            if some(hit):
                loose = s.rewind(s.stream.step_at(s.at + int(hit.argmax())))
                self._announce(s)
                h.release(loose[~gone[loose]])
        h.outdate(ids)

    def _partly(
        self, e: Fetched, flight: Flight, good: NDArray[np.bool_], known: NDArray[np.bool_]
    ) -> None:
        """Some could not be read, or nobody knew how long they are."""
        h = flight.holding
        h.life[flight.ids] = FAILED
        h.landed(flight.ids[good & known], flight.offset[good & known])
        bad = known & ~good
        h.give_back(flight.ids[bad], flight.offset[bad])
        wrong = bad & (e.nbytes >= 0)
        if h.listed is not None:  # a length that was only read may be the reason
            wrong |= bad & ~h.listed[flight.ids]
        h.unlearn(flight.ids[wrong])
        if not every(known):
            self._store(e.fetch, flight, good & ~known, e.nbytes)
            if some(~known & ~good & (e.nbytes >= 0)):  # of an older version
                self._out.append(Discard(e.fetch))
        h.counts["failed"] += int((h.life[flight.ids] == FAILED).sum())

    def _store(self, fetch: int, flight: Flight, good: NDArray[np.bool_], nbytes: Sizes) -> None:
        """Find room for objects whose lengths are known only now."""
        h, ids, nbytes = flight.holding, flight.ids[good], nbytes[good]
        h.learn(ids, nbytes)
        stalled = any(s.stalling for s in self._sessions.values() if s.holding is h)
        offset = self._shares.place(h, ids, nbytes, flight.need, stalled=stalled)
        self._out += self._shares.mover.take()
        placed = offset != NOWHERE
        if some(placed):
            stored = ids[placed]
            self._out.append(Store(fetch, h.name, stored.astype(np.int32), offset[placed]))
            h.landed(stored, offset[placed], seen=False)
            self._shares.mover.copied(h, stored, offset[placed])
        if not every(placed):
            self._out.append(Discard(fetch))

    def _lost(self, e: Lost, now: float) -> None:
        del now
        self._holdings[e.dataset].lose(e.ids.astype(np.intp), e.offset)

    def _warmed(self, e: Warm, now: float) -> None:
        del now
        if e.dataset in self._holdings:
            self._holdings[e.dataset].warming = 0

    def _dropped(self, e: Dropped, now: float) -> None:
        del now
        holding = self._holdings.get(e.dataset)
        if holding is not None:
            holding.warming = -1
            holding.evict(holding.loose(), "dropped")

    def _unregistered(self, e: Unregistered, now: float) -> None:
        del now
        if e.dataset not in self._holdings or self.busy(e.dataset):
            raise IllegalEventError(f"dataset {e.dataset!r} cannot go")
        holding = self._holdings[e.dataset]
        holding.evict_all()
        self._shares.space.discard(holding.pool)
        self._past.update(holding.counted())
        self._checks.forget(holding)
        del self._holdings[e.dataset]

    def _ticked(self, e: Tick, now: float) -> None:
        """Give up what somebody has waited for too long.

        Whatever waits for room or for its turn is looked at after every event.
        """
        del e
        for s in self._sessions.values():
            if s.stalling and s.blocked >= 0:
                h = s.holding
                patience_s = _OVERDUE_S + _OVERDUE_LATENCIES * h.latency.seconds
                self._give_up(h, s.blocked, now - min(patience_s, _OVERDUE_MOST_S))

    def _give_up(self, h: Holding, blocked: int, before: float) -> None:
        """Let nobody wait for an object any more that was asked for before a time."""
        if h.life[blocked] == FETCHING:
            flight = self._flights.of(h, blocked)
            if flight is not None and flight.begun < before:
                h.life[flight.ids] = OVERDUE  # until it lands after all
        elif h.life[blocked] == RESIDENT:
            for asked in self._checks.hung(h, blocked, before):
                self._outdate(h, h.residents_of(asked.files))  # they are read anew, or that hangs

    # --- plans and cursors ---------------------------------------------------------------------

    def _replanned(self, s: Session, ids: Index, epoch: int) -> None:
        """Tell the keeper that a session's plan goes on with these reads of `epoch`."""
        h = s.holding
        h.choose_keeper(self._window)
        keeper = h.keeper
        if isinstance(keeper, RecentKeeper):
            return  # it goes by the past alone
        h.news += len(ids)
        if isinstance(keeper, EpochKeeper):
            keeper.known = s.group.known()
            self._set_loans(s)
            if epoch <= keeper.epoch:
                keeper.protect(ids)
                return
        else:
            h.release(ids)
        if keeper is not None and h.news * _NEWS >= len(h):
            keeper.stale = True
            h.news = 0

    def _unplanned(self, h: Holding, loose: Index) -> None:
        """A session's plan, or the session, is gone; these had been pinned for it."""
        h.choose_keeper(self._window)
        if h.keeper is not None:
            h.keeper.stale = True
            if isinstance(h.keeper, EpochKeeper):
                h.keeper.known = max((g.known() for g in h.groups), default=0)
        h.release(loose)
        self._survey()

    def _consume(self, s: Session, done: int) -> None:
        """The steps before `done` gave their bytes back."""
        h, stream = s.holding, s.stream
        start, stop = s.at, stream.start(done)
        s.done, s.at = done, stop
        for epoch, a, b in s.stretches(start, stop):
            ids = stream.objects(a, b).astype(np.intp)
            uses = s.group.uses
            repeated = uses.repeated(epoch)
            pinned = ids if b <= s.front else ids[: max(s.front - a, 0)]
            h.unpin(pinned, distinct=uses.distinct(epoch))
            uses.consume(epoch, ids, s.clocked(a, b) if repeated else None)
            self._turn(s, epoch)
            h.release(ids)
        if s.front < stop:  # read directly, before they could be fetched
            s.front = stop
        s.verified = max(s.verified, stop)
        if s.checked < stop:  # what still comes of the steps that are done holds up nobody
            s.checked, s.blocked = stop, -1
        s.ready = max(s.ready, done)
        stream.forget(done)

    def _turn(self, s: Session, epoch: int) -> None:
        """A session reads in `epoch` now."""
        if epoch == s.epoch:
            return
        s.epoch = epoch
        s.group.uses.forget(min(x.epoch for x in s.group.sessions.values()))
        keeper = s.holding.keeper
        if isinstance(keeper, EpochKeeper) and keeper.uses is s.group.uses:
            if epoch > keeper.epoch:
                keeper.turn(epoch)
            self._set_loans(s)

    def _set_loans(self, s: Session) -> None:
        h = s.holding
        ahead = (x.pace.horizon(h.latency.seconds, self._window) for x in s.group.sessions.values())
        self._shares.set_loans(h, self._window.lend_share, max(ahead, default=0))

    def _survey(self) -> None:
        """Sessions came, went or were told more: all windows change."""
        for session in self._sessions.values():
            self._ahead.look(session, len(self._sessions))

    def mend(self, session: int) -> None:
        """After an exception in `handle`: make all tables agree again.

        The session that the event was about, if there is one, is gone; fetches of which the shell
        was not told were never begun. Pins, keepers and next uses are built anew from the plans.
        """
        gone = self._sessions.pop(session, None)
        if gone is not None:
            gone.holding.leave(gone)
        self._flights.abort()
        for h in self._holdings.values():
            h.rebuild(self._flights.ids(h), self._window)
        self._survey()

    # --- what others may see -------------------------------------------------------------------

    def busy(self, dataset: str) -> bool:
        """Whether anybody reads this dataset, or something is being read for it."""
        h = self._holdings[dataset]
        return h.active or h.warming >= 0 or len(self._flights.ids(h)) > 0

    def plans_nbytes(self) -> int:
        """Memory of all plans and of the next uses made of them, in bytes."""
        streams = sum(s.stream.nbytes for s in self._sessions.values())
        return streams + sum(g.uses.nbytes for h in self._holdings.values() for g in h.groups)

    def snapshot(self) -> dict[str, dict[str, dict[str, float | str]]]:
        """Counters of all datasets and sessions, by name and number; what `creel stats` shows."""
        space = self._shares.space
        node: dict[str, float | str] = {
            "nbytes": space.nbytes,
            "free_nbytes": space.free_bytes,
            "inflight_objects": self._flights.objects,
            "inflight_nbytes": self._flights.nbytes,
        }
        return {
            "memory": {"node": node},
            "datasets": {n: h.snapshot() for n, h in self._holdings.items()},
            "sessions": {str(n): s.snapshot() for n, s in self._sessions.items()},
            "past": {"datasets": dict(self._past)},
        }

    def check(self) -> None:
        """Raise IllegalEventError unless all tables agree with each other; for tests."""
        space = self._shares.space
        space.check()
        self._flights.check()
        under_way = sum(len(self._flights.ids(h)) for h in self._holdings.values())
        must(under_way == self._flights.objects, "something is under way for nobody")
        must(space.pools == len(self._holdings), "a pool without a dataset")
        offset, length = [], []
        for h in self._holdings.values():
            h.check(self._flights.ids(h))
            resident = h.offset != NOWHERE
            held = np.append(np.flatnonzero(resident), self._flights.placed(h))
            must(isinstance(h.pool, FixedPool) or h.pool.used == h.room[held].sum(), "lost room")
            offset += [h.offset[resident], self._flights.offsets(h)[0]]
            length += [h.length[resident], self._flights.offsets(h)[1]]
        if offset:
            at, n = np.concatenate(offset), np.concatenate(length)
            order = at.argsort()
            end = (at + n)[order]
            must((end[:-1] <= at[order][1:]).all(), "objects overlap")
            must(end.max(initial=0) <= space.nbytes, "an object ends beyond the space")


# The table of the class above.
# ruff: noqa: SLF001
_HANDLERS: dict[type, Callable[[Core, Any, float], None]] = {
    Registered: Core._registered,
    Opened: Core._opened,
    Extended: Core._extended,
    Begun: Core._begun,
    Truncated: Core._truncated,
    Progressed: Core._progressed,
    Closed: Core._closed,
    Fetched: Core._fetched,
    Checked: Core._checked,
    Lost: Core._lost,
    Warm: Core._warmed,
    Dropped: Core._dropped,
    Unregistered: Core._unregistered,
    Tick: Core._ticked,
}
