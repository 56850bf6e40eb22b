"""Readers of a dataset: the ranks of a job and their streams of steps. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from creel.policies.arrays import Index, Mask
from creel.policies.cluster.boundary import Deals
from creel.policies.next_use import NextUses
from creel.policies.prefetch import Pace, SessionPlan

if TYPE_CHECKING:  # circular import
    from creel.daemon.core.residency import Residency


#: What a read found: a resident, a fetch in flight for another session, nothing.
COUNTED = ("hits", "joined", "misses")
#: A rank that opens when its group is further than this joins late: its steps are shifted.
_LATE_STEPS = 8
#: Repeats up to this share of an epoch's reads count as padding (DistributedSampler).
_PADDING = 0.01


@dataclass(eq=False)
class JobGroup:
    """The ranks on this node that read one dataset in step, with one `NextUses` for all."""

    job: str
    world: int
    uses: NextUses
    sessions: dict[int, RankStream] = field(default_factory=dict)  # by rank
    deals: Deals = field(default_factory=Deals)

    def clock(self) -> int:
        """Steps that all ranks have done."""
        return min((s.done + s.shift for s in self.sessions.values()), default=0)

    def known(self) -> int:
        """The latest epoch for which every rank has published its plan."""
        return min((s.last_epoch for s in self.sessions.values()), default=-1)

    def planned(self) -> bool:
        """Whether any rank still has something to read."""
        return any(s.stream.end > s.done for s in self.sessions.values())

    def step_s(self) -> float:
        """Seconds per step of the slowest rank; 0 when unknown."""
        return max((s.pace.step_s for s in self.sessions.values()), default=0.0)

    def once(self) -> bool:
        """Whether every epoch reads each object at most once, except for padding."""
        repeats, reads = self.uses.repeats()
        return repeats <= max(_PADDING * reads, self.world)

    def orders(self, epoch: int) -> list[list[NDArray[np.int32]]]:
        """For each rank, its order in `epoch`, in pieces."""
        return [s.order(epoch) for s in self.sessions.values()]

    def replan(self) -> None:
        """Rebuild the next uses from what the sessions still have to read."""
        self.uses.clear()
        for session in self.sessions.values():
            session.announce(session.done)


class RankStream:
    """One rank's stream. Positions before `front` are pinned from step `done` on."""

    def __init__(
        self,
        number: int,
        residency: Residency,
        group: JobGroup,
        rank: int,
        now: float,
        recheck: str,
        generation: int,
    ) -> None:
        """`recheck`: see `messages.Open`; `generation`: that in which the session opens."""
        self.id = number
        self.recheck = recheck
        #: Versions must have been seen in these generations or later (`Versions`).
        self.since = self.since_remote = 0 if recheck == "never" else generation
        self.opened = now
        self.begun = -1  # the latest epoch that has begun
        self.verified = 0  # positions before it: their files' versions were asked for
        self.residency = residency
        self.group = group
        self.rank = rank
        self.stream = SessionPlan()
        late = group.clock() > _LATE_STEPS
        self.shift = group.clock() if late else 0  # from the rank's steps to the group's
        self.epoch_shift = max(group.known(), 0) if late else 0
        self.pace = Pace(now)
        self.done = 0  # steps
        self.ready = 0
        self.wanted = 0
        self.checked = 0  # positions before it are resident, current or failed
        self.front = 0
        self.lacked = -1  # the `front` from which not all could be fetched
        self.reach = 0  # how far `front` may go for now
        self.early: tuple[int, ...] = ()  # steps after `ready` that a reader may take before it
        self.published: tuple[int, tuple[int, ...]] = (0, ())  # `ready`, `early` as last announced
        self.epoch = 0  # of the last step done, on the group's count
        self.starved = False  # whether a reader has waited since the tick before the last
        self.blocked = -1  # the object that `checked` waits for
        self.failed = 0
        self._deadline = 0.0  # of what was fetched last
        self.unplanned = True  # nothing is known beyond the published plan
        self.hits = self.joined = self.misses = self.stalls = 0

    @property
    def at(self) -> int:
        """Position of the step `done`."""
        return self.stream.start(self.done)

    @property
    def last_epoch(self) -> int:
        """The latest epoch of the plan, in the group's numbering."""
        return self.stream.last_epoch + self.epoch_shift

    @property
    def stalling(self) -> bool:
        """Whether a reader waits for the step at `ready`."""
        return self.wanted > self.ready

    @property
    def front_epoch(self) -> int:
        """The epoch of the next step to bring in, in the group's numbering."""
        return self.stream.epoch(self.stream.step_at(self.front))[0] + self.epoch_shift

    @property
    def ahead_of_others(self) -> bool:
        """Whether another rank has yet to bring in objects of an earlier epoch."""
        others = (s for s in self.group.sessions.values() if s is not self)
        mine = self.front_epoch
        return any(s.front < s.stream.stop and s.front_epoch < mine for s in others)

    @property
    def starving(self) -> bool:
        """Whether a reader waits and no step being read will free its room.

        A reader may hold one step's bytes while it waits for the next; other readers' steps end by
        themselves. Also true where `starved`: the wait has taken too long.
        """
        return self.stalling and (self.ready <= self.done + 1 or self.starved)

    def needed_at(self, step: int, now: float) -> float:
        """Time when `step` is needed, at the present pace."""
        return now + (step - self.done) * self.pace.step_s

    def deadline(self, step: int, now: float, *, in_turn: bool) -> float:
        """Time when objects of `step` are to be fetched; `in_turn`: never before earlier fetches.

        A pace measured while data was slow puts far steps late; once it is quick again, steps
        further ahead must not overtake them.
        """
        needed = self.needed_at(step, now)
        self._deadline = max(self._deadline, needed) if in_turn else needed
        return self._deadline

    def begin(self, epoch: int, generation: int) -> None:
        """Begin an epoch: earlier knowledge of file versions no longer counts."""
        self.begun = max(self.begun, epoch)
        if self.recheck in {"epoch", "step"}:
            self.since = generation
            self.verified = self.checked

    @property
    def limit(self) -> int:
        """The position up to which steps may become ready.

        With `recheck` "epoch", no step of an epoch that has not begun may become ready.
        """
        if self.recheck != "epoch":
            return self.front
        # A session done before its `Begin` arrived has passed steps of an epoch that has not begun.
        step = max(self.stream.until(self.begun), self.done)
        return min(self.front, self.stream.start(step))

    def current(self, ids: Index) -> Mask:
        """(k,) whether the version held of each object is known to be good for this session."""
        return self.residency.versions.current(ids, self.since, self.since_remote)

    def rewind(self, step: int) -> Index:
        """Give up what was brought in from `step` on; (k,) objects that were pinned for it."""
        position = self.stream.start(step)
        unpinned = self.stream.objects(position, max(self.front, position)).astype(np.intp)
        self.residency.unpin(unpinned)
        self.front = min(self.front, position)
        self.checked = min(self.checked, position)
        self.verified = min(self.verified, position)
        self.ready = min(self.ready, step)
        self.early = tuple(k for k in self.early if k < step)
        self.blocked = -1
        return unpinned

    def truncate(self, step: int) -> None:
        self.stream.truncate(step)
        self._deadline = 0.0

    def snapshot(self) -> dict[str, float | str]:
        """Return counters and positions for `creel stats`."""
        own = ("rank", "done", "ready", "wanted", "epoch", "failed", *COUNTED, "stalls")
        return {name: getattr(self, name) for name in own} | {
            "dataset": self.residency.name,
            "job": self.group.job,
            "known": self.stream.end,
            "fetched": self.stream.step_at(self.front),
            "window": self.stream.step_at(self.reach) - self.done,
            "step_s": self.pace.step_s,
        }

    def clocked(self, start: int, stop: int) -> NDArray[np.int32]:
        """(k,) the step of each of the positions start..stop-1, on the group's clock."""
        steps = self.stream.steps(start, stop)
        steps += self.shift
        return steps

    def policy_step(self, step: int) -> int:
        """Convert a step to the eviction policy's clock."""
        return self.residency.policy.at(self.group.uses, step + self.shift)

    def order(self, epoch: int) -> list[NDArray[np.int32]]:
        """The unread part of `epoch`'s order, in pieces."""
        first = max(self.stream.until(epoch - self.epoch_shift - 1), self.done)
        stop = self.stream.until(epoch - self.epoch_shift)
        if first >= stop:
            return []
        return self.stream.pieces(self.stream.start(first), self.stream.start(stop))

    def announce(self, step: int) -> None:
        """Add the plan from `step` on to the group's next uses, unless the session is unplanned.

        What was not predicted is read at once: it is pinned until then, and unknown afterwards.
        """
        while step < self.stream.end:
            epoch, stop = self.stream.epoch(step)
            if self.unplanned:
                self.group.uses.mark_incomplete(epoch + self.epoch_shift)
            else:
                a, b = self.stream.start(step), self.stream.start(stop)
                ids = self.stream.objects(a, b).astype(np.intp)
                self.group.uses.extend(epoch + self.epoch_shift, self.clocked(a, b), ids)
            step = stop

    def stretches(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Split positions start..stop-1 where the epoch changes: (epoch, first, last) each."""
        out = []
        while start < stop:
            epoch, until = self.stream.epoch(self.stream.step_at(start))
            last = min(self.stream.start(until), stop)
            out.append((epoch + self.epoch_shift, start, last))
            start = last
        return out
