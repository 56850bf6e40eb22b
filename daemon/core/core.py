"""The core, the daemon's state machine: events in, actions out. Pure."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from creel.cache.memory.pools.allocator import Allocator
from creel.cache.memory.pools.free_ranges import NOWHERE, must
from creel.daemon.core import events
from creel.daemon.core.admission import Admission
from creel.daemon.core.checks import Checks
from creel.daemon.core.cluster.plans import ClusterPlans
from creel.daemon.core.cluster.serving import Serving
from creel.daemon.core.disk.spilling import Spilling
from creel.daemon.core.inflight import Inflight
from creel.daemon.core.landing import Landing
from creel.daemon.core.prefetcher import Prefetcher
from creel.daemon.core.readers.dataset_readers import DatasetReaders
from creel.daemon.core.readers.sessions import RankStream
from creel.daemon.core.residency import Residency
from creel.daemon.core.restart.objects import RestartObjects, Restored, restart_objects, restore
from creel.errors import IllegalEventError, MalformedError
from creel.messages import Begin, Close, Truncate
from creel.policies.arrays import Index
from creel.policies.next_use import NextUses
from creel.policies.prefetch import Window

#: Seconds, on top of the usual latency of fetches, after which a waiting reader reads an object
#: directly: one hung read must not hold up all later steps.
_OVERDUE_S = 5.0
_MAX_OVERDUE_S = 30.0
#: What another dataset leaves to one is awaited for so long, in seconds, while transfers of the
#: former end: a peer's answer may take 1 s.
_TAKEN_OVER_S = 2.0


class Core:
    """The state and decisions of a node's daemon.

    Args:
        space: the arena's bytes.
        window: how far ahead to work.

    Attributes:
        plans: the plans that this node shares with other nodes; read only.
        disk: the node's disk; read only.
    """

    def __init__(self, space: Allocator, window: Window) -> None:
        self._window = window
        self._admission = Admission(space)
        self.disk = self._admission.disk
        self._inflight = Inflight(self._admission, self._window, self._emit)
        self._prefetcher = Prefetcher(self._admission, self._inflight, self._window)
        self._checks = Checks(self._inflight, self._emit)
        self._residencies = self._admission.residencies
        self._readers: dict[str, DatasetReaders] = {}  # by dataset
        self._serving = Serving(self._admission, self._inflight, self._readers, self._emit)
        self._spilling = Spilling(self.disk, self._residencies, self._admission.fraction)
        self._sessions: dict[int, RankStream] = {}  # by number
        self._past: Counter[str] = Counter()  # counters of removed datasets
        self._out: list[events.Action] = []  # of the event at hand
        self.plans = ClusterPlans(self._residencies, self._readers, self._emit)
        self._landing = Landing(
            self._admission,
            self._inflight,
            self._prefetcher,
            self._checks,
            self._spilling,
            self._sessions,
            self._announce,
        )
        timed: dict[type, Callable[[Any, float], None]] = {
            events.SessionOpened: self._opened,
            events.DatasetGrew: self._grew,
            events.Progressed: self._progressed,
            events.Fetched: self._landing.fetched,
            events.PeerAsked: self._serving.asked,
            events.Tick: self._ticked,
        }
        of_session: dict[type, Callable[[RankStream, Any], None]] = {
            events.PlanExtended: self._extended,
            Begin: self._begun,
            events.EpochDealt: self._dealt,
            events.EpochFollowed: self._followed,
            events.SamplesTold: self._learn_samples,
            Truncate: self._truncated,
            Close: self._closed,
        }
        untimed: dict[type, Callable[[Any], None]] = {
            events.DatasetAdded: self._registered,
            events.Checked: self._landing.checked,
            events.RetentionPlanned: self._planned,
            events.Warm: self._warmed,
            events.Dropped: self._dropped,
            events.MemoryShort: self._withheld,
            events.MemoryFree: self._restored,
            events.Unregistered: self._unregistered,
            events.ClusterChanged: self.plans.changed,
            events.PlanShared: self.plans.shared,
            events.PlanDoubted: self.plans.doubted,
            events.PlanAsked: self.plans.asked,
            events.PeerServed: self._serving.served,
            events.DiskOpened: self._disk_opened,
            events.FoundOnDisk: self._enter_disk,
            Restored: self._restored_objects,
            events.Spilled: self._spilling.landed,
        }
        untimed |= {event: self._if_open(handle) for event, handle in of_session.items()}
        #: By type of event: its method, which takes the event and the time.
        self._handlers = timed | {event: _without_now(handle) for event, handle in untimed.items()}

    def handle(
        self, event: events.Event, now: float, *, settles: bool = True
    ) -> list[events.Action]:
        """Handle an event; return the actions to execute, in order. `now`: monotonic seconds.

        settles: whether to do as `settle` as well; False: the caller will, after further events.

        Raises:
            MalformedError: a plan does not continue where the last one ended. Nothing changed.
            IllegalEventError: the event cannot happen. Nothing changed.
            Exception: any other failure (no memory, a bug); the next call must be `recover`.
        """
        self._begin(now)
        if not isinstance(event, (events.Fetched, events.Tick)):
            # Room may have been freed, or a session may be more urgent now.
            self._prefetcher.stuck.clear()
        self._admission.changed()
        self._handlers[type(event)](event, now)
        if settles:
            self._settle(now, every=isinstance(event, events.Tick))
        self._clear_fresh()
        return self._out

    def settle(self, now: float) -> list[events.Action]:
        """Start and announce what the last events allow; return the actions as `handle`.

        This is most of the work of an event, and it is the same work for several.

        Raises:
            Exception: as `handle`.
        """
        self._begin(now)
        self._settle(now, every=False)
        self._clear_fresh()
        return self._out

    def _begin(self, now: float) -> None:
        self._out = []
        self._inflight.mark()
        self._spilling.begin_event(now)

    def _settle(self, now: float, *, every: bool) -> None:
        self._admission.changed()
        self._grow()
        self._serving.advance(now, every=every)
        for session in self._sessions.values():
            self._prefetcher.advance_ready(session)
        self._prefetcher.advance_all(self._sessions.values(), now)
        for session in self._sessions.values():
            self._checks.ask(session, now)
        for name, residency in self._residencies.items():
            if residency.warming >= 0:
                self._inflight.warm(residency, now)
            boundary = self._readers[name].planning_task(self._admission, self._window)
            if boundary is not None:
                self._out.append(events.PlanRetention(name, boundary))
            self.plans.ask(residency, now)
        lacking = [*self._prefetcher.lacking.values(), *self._serving.short.items()]
        if self._spilling.start(lacking, self._inflight.from_disk):
            self._prefetcher.stuck -= self._prefetcher.lacking.keys()
            self._serving.advance(now, every=True)
            self._prefetcher.advance_all(self._sessions.values(), now)
        self._prefetcher.lacking.clear()
        for session in self._sessions.values():
            self._announce(session)

    def _emit(self, action: events.Action) -> None:
        self._out.append(action)

    def _clear_fresh(self) -> None:
        """Forget the places published by this event; the shell will have written them."""
        for residency in self._residencies.values():
            residency.fresh.clear()

    def _announce(self, s: RankStream) -> None:
        cursors = s.cursors
        if cursors.announce():
            self._out.append(events.SetReady(s.id, cursors.ready, cursors.failed, cursors.early))

    def _readers_of(self, s: RankStream) -> DatasetReaders:
        return self._readers[s.residency.name]

    # --- events --------------------------------------------------------------------------------

    def _registered(self, e: events.DatasetAdded) -> None:
        if e.dataset in self._residencies:
            raise IllegalEventError(f"dataset {e.dataset!r} is registered already")
        old = self._residencies.get(e.begins_with)
        page = 0 if old is None or old.pool.same_size else old.pool.page
        space = self._admission.space
        residency = Residency(e, space, self._emit, self.disk, e.page or page)
        self._readers[e.dataset] = DatasetReaders(residency)
        self._residencies[e.dataset] = residency

    def _grew(self, e: events.DatasetGrew, now: float) -> None:
        if not {e.dataset, e.old} <= set(self._residencies) or self._residencies[e.old].active:
            raise IllegalEventError(f"dataset {e.old!r} is still in use")
        residency, old = self._residencies[e.dataset], self._residencies[e.old]
        residency.learn_readers(old)  # before it is told of an epoch, on all nodes
        residency.heads.setdefault(old, now + _TAKEN_OVER_S)
        self._grow()

    def _grow(self) -> None:
        """Let datasets take over those of which nothing is under way."""
        for residency in self._residencies.values():
            for old in [head for head in residency.heads if not self.busy(head.name)]:
                del residency.heads[old]
                residency.take_over(old)
                self._prefetcher.stuck.clear()

    def _keep_apart(self, dataset: str) -> None:
        """Let no other dataset take over this one."""
        for residency in self._residencies.values():
            residency.heads.pop(self._residencies[dataset], None)

    def _opened(self, e: events.SessionOpened, now: float) -> None:
        dataset = e.asked.dataset
        if dataset not in self._residencies or e.session in self._sessions:
            raise IllegalEventError(f"session {e.session} of {dataset!r} cannot open")
        self._keep_apart(dataset)
        joined = self._readers[dataset].join(e.session, e.asked, now, self._generation())
        joined.twin = e.twin
        self._sessions[e.session] = joined
        self._set_reaches()

    def _generation(self) -> int:
        """Start a generation: known file versions may now be out of date for some session."""
        self._inflight.generation += 1
        return self._inflight.generation

    def _if_open(self, handle: Callable[[RankStream, Any], None]) -> Callable[[Any], None]:
        """Return a handler that ignores events of sessions that have been closed."""

        def handle_if_open(e: Any) -> None:
            session = self._sessions.get(e.session)
            if session is not None:
                handle(session, e)

        return handle_if_open

    def _begun(self, s: RankStream, e: Begin) -> None:
        s.begin(e.epoch, self._generation())

    def _dealt(self, s: RankStream, e: events.EpochDealt) -> None:
        s.group.deals.view, s.group.deals.dataset = e.view, s.residency.name
        s.group.deals.followed = False
        s.group.deals.add(e.epoch + s.epoch_shift, e.order)
        self._readers_of(s).dealt(s, e.epoch + s.epoch_shift, e.order, e.view)

    def _followed(self, s: RankStream, e: events.EpochFollowed) -> None:
        s.group.deals.view, s.group.deals.followed = e.view, True
        self._readers_of(s).followed(s)

    def _learn_samples(self, s: RankStream, e: events.SamplesTold) -> None:
        s.rehearsed = e.samples
        self._readers_of(s).choose_policy()

    def _extended(self, s: RankStream, e: events.PlanExtended) -> None:
        if e.step != s.stream.end:
            raise MalformedError(f"the plan continues at step {s.stream.end}, not {e.step}")
        s.stream.extend(e.epoch, e.objects, e.ends)
        s.unplanned = e.unplanned
        if s.recheck == "step":
            s.begin(e.epoch, self._generation())
        s.announce(e.step)
        self._readers_of(s).choose_policy()
        s.residency.policy.plan_extended(e.objects.astype(np.intp), e.epoch + s.epoch_shift)
        self._set_reaches()

    def _truncated(self, s: RankStream, e: Truncate) -> None:
        if e.step >= s.stream.end:
            return
        step = max(e.step, s.cursors.done)
        unpinned = s.rewind(step)
        s.truncate(step)
        s.group.replan()
        self._unplanned(s.residency, unpinned)

    def _progressed(self, e: events.Progressed, now: float) -> None:
        s = self._sessions.get(e.session)
        if s is None:
            return
        cursors = s.cursors
        done, wanted = s.possible(e.done, e.wanted)
        if done > cursors.done:
            overtaken = done > cursors.ready
            s.pace.progressed(done - cursors.done, now)
            self._consume(s, done)
            if overtaken:
                self._prefetcher.overtaken(s)
        if wanted > cursors.wanted:
            cursors.asked(wanted)
            s.pace.asked(wanted - cursors.done, stalls=cursors.stalling)
            s.stalls += cursors.stalling
        self._prefetcher.set_reach(s, len(self._sessions))

    def _closed(self, s: RankStream, e: Close) -> None:
        del self._sessions[e.session]
        unpinned = s.pinned().astype(np.intp)
        s.residency.unpin(unpinned)
        self._readers_of(s).leave(s)
        s.group.replan()
        self._unplanned(s.residency, unpinned)

    def _planned(self, e: events.RetentionPlanned) -> None:
        residency = self._residencies.get(e.dataset)
        if residency is not None:
            self._readers[e.dataset].planned(e.boundary, e.kept)
            residency.disk.changed(len(residency))

    def _disk_opened(self, e: events.DiskOpened) -> None:
        self._spilling.opened(e.nbytes, e.unit)
        for readers in self._readers.values():
            readers.choose_policy()
        self._set_reaches()

    def _enter_disk(self, e: events.FoundOnDisk) -> None:
        self._residencies[e.dataset].found_on_disk(e.ids.astype(np.intp), e.nbytes)

    def _restored_objects(self, e: Restored) -> None:
        residency = self._residencies.get(e.dataset)
        if residency is not None and e.kept is not None:
            with contextlib.suppress(IllegalEventError):  # costs what was kept, and no more
                restore(residency, e.kept)
        self._admission.space.abandon(e.dataset)  # whatever was not restored
        self._set_reaches()

    def _warmed(self, e: events.Warm) -> None:
        if e.dataset in self._residencies:
            self._residencies[e.dataset].warming = -1 if e.stop else 0

    def _dropped(self, e: events.Dropped) -> None:
        residency = self._residencies.get(e.dataset)
        if residency is not None:
            residency.warming = -1
            residency.disk.lost_all()
            residency.evict(residency.unpinned(), "dropped")

    def _withheld(self, e: events.MemoryShort) -> None:
        ranges = self._admission.withhold(e.nbytes)
        if ranges:
            self._emit(events.ReleaseMemory(ranges))
        self._set_reaches()

    def _restored(self, e: events.MemoryFree) -> None:
        self._admission.space.restore(e.nbytes)
        self._set_reaches()

    def _unregistered(self, e: events.Unregistered) -> None:
        if e.dataset not in self._residencies or self.busy(e.dataset):
            raise IllegalEventError(f"dataset {e.dataset!r} is still in use")
        residency = self._residencies[e.dataset]
        self._keep_apart(e.dataset)
        residency.disk.closed()
        residency.evict_all()
        self._admission.space.discard(residency.pool)
        self._past.update(residency.counted())
        self._checks.remove(residency)
        self.plans.remove(e.dataset)
        del self._residencies[e.dataset], self._readers[e.dataset]

    def _ticked(self, e: events.Tick, now: float) -> None:
        """Give up objects for which a reader has waited too long, so that later steps become ready.

        Sessions that wait for room or for their turn are handled after every event.
        """
        del e
        for s in self._sessions.values():
            cursors = s.cursors
            if cursors.stalling and s.id in self._prefetcher.stuck and not cursors.starved:
                cursors.starved = True
                self._prefetcher.stuck.discard(s.id)
            if cursors.stalling and cursors.blocked is not None:
                residency = s.residency
                retry_s = _OVERDUE_S + residency.latency.seconds
                self._landing.give_up(s, cursors.blocked, now - min(retry_s, _MAX_OVERDUE_S))
                self._prefetcher.find_early(s)

    # --- plans and cursors ---------------------------------------------------------------------

    def _unplanned(self, residency: Residency, unpinned: Index) -> None:
        """Handle the end of a plan or session; `unpinned`: the objects that it had pinned."""
        self._readers[residency.name].choose_policy()
        residency.policy.replanned()
        residency.release(unpinned)
        if orphans := self._inflight.cancel_orphans(residency):
            self._out.append(events.CancelFetches(residency.name, orphans))
        self._set_reaches()

    def _consume(self, s: RankStream, done: int) -> None:
        """Release the objects of all steps before `done`."""
        residency, stream = s.residency, s.stream
        start, front, stop = s.cursors.at, s.cursors.front, stream.start(done)
        s.cursors.consumed(done, stop)
        for epoch, a, b in s.stretches(start, stop):
            ids = stream.objects(a, b).astype(np.intp)
            uses = s.group.uses
            repeated = uses.repeated(epoch)
            pinned = ids if b <= front else ids[: max(front - a, 0)]
            residency.unpin(pinned, distinct=uses.distinct(epoch))
            uses.consume(epoch, ids, s.clocked(a, b) if repeated else None)
            if epoch != s.epoch:
                s.epoch = epoch
                first = min(x.epoch for x in s.group.sessions.values())
                uses.drop_before(first)
                s.group.deals.drop_before(first)
                residency.policy.epoch_began(uses, epoch)
            # Where all files fit they stay: another job may come for them.
            if s.twin is not None and self._admission.missing(residency):
                self._readers_of(s).give_up_decoded(ids)
            residency.release(ids)
        stream.drop_before(done)

    def _set_reaches(self) -> None:
        """Recompute how far each session may read ahead, after a change of sessions or plans."""
        self._admission.changed()
        for session in self._sessions.values():
            self._prefetcher.set_reach(session, len(self._sessions))
        for residency in self._residencies.values():
            residency.policy.resized()

    def recover(self, session: int) -> list[events.Action]:
        """Make all tables consistent again after an exception in `handle`.

        Removes the session of the event, if any, and the fetches that the shell never received.
        Rebuilds pins, eviction policies and next uses from the plans.

        Returns:
            The actions decided before the failure, except for fetches.
        """
        self._clear_fresh()
        stream = self._sessions.pop(session, None)
        if stream is not None:
            self._readers_of(stream).leave(stream)
        self._inflight.abort()
        for name, residency in self._residencies.items():
            residency.rebuild(
                self._inflight.ids(residency),
                self._spilling.ids(residency),
                self._readers[name].pins(),
            )
            self._readers[name].rebuild()
        self._set_reaches()
        decided, self._out = self._out, []
        return [action for action in decided if not isinstance(action, events.FetchObjects)]

    def end(self) -> list[events.Action]:
        """Return the last writes to disk before the daemon ends; no event may follow.

        Objects pinned for readers and peers are written as well, as nothing moves in memory now.
        """
        self._out = []
        self._spilling.write_rest()
        return self._out

    # --- reports -------------------------------------------------------------------------------

    def kept(self) -> dict[str, RestartObjects]:
        """Return the residents of all datasets, for the daemon after this one."""
        held = {
            name: residency for name, residency in self._residencies.items() if residency.resident
        }
        return {name: restart_objects(residency) for name, residency in held.items()}

    def resident(self, dataset: str) -> int:
        """Return the number of a dataset's objects in memory."""
        return self._residencies[dataset].resident

    def planned(self, session: int) -> tuple[int, int]:
        """Return the steps that an open session has done, and those of its plan."""
        s = self._sessions[session]
        return s.cursors.done, s.stream.end

    def uses(self, session: int) -> NextUses:
        """Return when the job of an open session reads each object, as far as that is known."""
        return self._sessions[session].group.uses

    def would_move(self, session: int, done: int, wanted: int) -> bool:
        """Return whether `Progressed` with a client's words, whatever they say, would move any."""
        s = self._sessions.get(session)
        return s is not None and s.possible(done, wanted) != (s.cursors.done, s.cursors.wanted)

    def lead_s(self) -> float:
        """Return how long the session with the least to read is busy with it; 0 if unknown."""
        return min((s.lead_s for s in self._sessions.values()), default=0.0)

    def busy(self, dataset: str) -> bool:
        """Return whether a dataset has readers, is being warmed, or has transfers in flight."""
        residency = self._residencies[dataset]
        in_flight = (
            len(self._inflight.ids(residency)) > 0
            or len(residency.served) > 0
            or residency.disk.storing > 0
        )
        return residency.active or residency.warming >= 0 or in_flight

    @property
    def withheld_nbytes(self) -> int:
        """Bytes of memory that were given back to the system and are not used again yet."""
        return self._admission.space.withheld

    def plans_nbytes(self) -> int:
        """Return the bytes of memory of all plans and of the next uses derived from them."""
        streams = sum(s.stream.nbytes for s in self._sessions.values())
        groups = (g for readers in self._readers.values() for g in readers.groups)
        return streams + sum(g.uses.nbytes for g in groups)

    def snapshot(self) -> dict[str, dict[str, dict[str, float | str]]]:
        """Return the counters of all datasets and sessions, for `creel stats`."""
        space = self._admission.space
        node: dict[str, float | str] = {
            "nbytes": space.nbytes,
            "free_nbytes": space.free_bytes,
            "withheld_nbytes": space.withheld,
            "inflight_objects": self._inflight.objects,
            "inflight_nbytes": self._inflight.nbytes,
        }
        on_disk: dict[str, float | str] = {
            "nbytes": self.disk.nbytes,
            "used_nbytes": self.disk.used,
        }
        return {
            "memory": {"node": node},
            "disk": {"node": on_disk},
            # Without those that have no objects, of loaders that only count.
            "datasets": {n: held.snapshot() for n, held in self._residencies.items() if len(held)},
            "sessions": {str(n): s.snapshot() for n, s in self._sessions.items()},
            "past": {"datasets": dict(self._past)},
        }

    def check(self) -> None:
        """Raise IllegalEventError unless all tables are consistent; called after `recover`."""
        space = self._admission.space
        space.check()
        self._inflight.check()
        self._spilling.check()
        in_flight = sum(
            len(self._inflight.ids(residency)) for residency in self._residencies.values()
        )
        must(in_flight == self._inflight.objects, "an object is in flight for no dataset")
        must(space.pools == len(self._residencies), "a pool without a dataset")
        at, end = [], []
        for name, residency in self._residencies.items():
            self._readers[name].check()
            residency.check(
                self._inflight.ids(residency),
                self._spilling.ids(residency),
                self._readers[name].pins(),
            )
            resident = np.flatnonzero(residency.offset[:] != NOWHERE)
            coming, going = self._inflight.offsets(residency), residency.departed.rooms()
            place = np.concatenate([residency.offset[resident], coming[0], going[0]])
            length = np.concatenate([residency.length[resident], coming[1], going[1]])
            start, size = residency.pool.rooms(place, length)
            must(int(size.sum()) == residency.pool.used or residency.pool.same_size, "lost room")
            at.append(start)
            end.append(start + size)
        if at:
            start, stop = np.concatenate(at), np.concatenate(end)
            order = start.argsort()
            must((stop[order][:-1] <= start[order][1:]).all(), "objects overlap")
            must(stop.max(initial=0) <= space.nbytes, "an object ends beyond the space")


def _without_now(handle: Callable[[Any], None]) -> Callable[[Any, float], None]:
    """Return a handler that drops its argument `now`."""
    return lambda event, now: handle(event)  # noqa: ARG005
