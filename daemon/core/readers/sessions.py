"""Readers of a dataset: the ranks of each job and their streams of steps. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from creel.daemon.core.readers.cursors import Cursors
from creel.daemon.core.readers.twin import Twin
from creel.daemon.core.residency import COUNTED, Residency
from creel.messages import Open
from creel.policies.arrays import Ids, Index, Mask
from creel.policies.cluster.boundary import Deals
from creel.policies.cluster.job_order import SampleObjects
from creel.policies.eviction.policy import RESIDENT
from creel.policies.next_use import NextUses
from creel.policies.prefetch import Pace, SessionPlan

#: A rank that opens after its group has done more steps joins late: its steps are shifted.
_LATE_STEPS = 8
#: Repeats up to this share of an epoch's reads count as padding (DistributedSampler).
_PADDING = 0.01


@dataclass(eq=False)
class JobGroup:
    """The local ranks that read one dataset in step, with one `NextUses` for all."""

    job: str
    world: int
    uses: NextUses
    sessions: dict[int, RankStream] = field(default_factory=dict)  # by rank
    deals: Deals = field(default_factory=Deals)
    left: set[int] = field(default_factory=set)  # ranks that rehearsed, and have left

    def clock(self) -> int:
        """Return the number of steps that all ranks have done."""
        return min((s.cursors.done + s.shift for s in self.sessions.values()), default=0)

    def known(self) -> int:
        """Return the latest epoch for which every rank has published its plan."""
        return min((s.last_epoch for s in self.sessions.values()), default=-1)

    def planned(self) -> bool:
        """Return whether any rank has planned steps left to read."""
        return any(s.stream.end > s.cursors.done for s in self.sessions.values())

    def step_s(self) -> float:
        """Return the seconds per step of the slowest rank; 0 if unknown."""
        return max((s.pace.step_s for s in self.sessions.values()), default=0.0)

    def once(self) -> bool:
        """Return whether every epoch reads each object at most once, except for padding."""
        repeats, reads = self.uses.repeats()
        return repeats <= max(_PADDING * reads, self.world)

    def orders(self, epoch: int) -> list[list[NDArray[np.int32]]]:
        """Return the order of each rank in `epoch`, in pieces."""
        return [s.order(epoch) for s in self.sessions.values()]

    def replan(self) -> None:
        """Rebuild the next uses from the steps that the sessions have not done yet."""
        self.uses.clear()
        for session in self.sessions.values():
            session.announce(session.cursors.done)


class RankStream:
    """The stream of steps of one rank: its plan, and how far it is (`Cursors`)."""

    def __init__(
        self,
        number: int,
        residency: Residency,
        group: JobGroup,
        asked: Open,
        now: float,
        generation: int,
    ) -> None:
        """`generation`: the one in which the session opens."""
        #: `id`: of its session; `rank`: in its job.
        self.id, self.rank = number, asked.rank
        self.recheck = recheck = asked.recheck
        #: Versions must have been seen in these generations or later (`Versions`).
        self.since = self.since_remote = 0 if recheck == "never" else generation
        self.opened = now  # monotonic seconds
        self.begun = -1  # the latest epoch that has begun
        self.residency = residency
        self.group = group
        self.stream = SessionPlan()
        self.cursors = Cursors()
        late = group.clock() > _LATE_STEPS
        self.shift = group.clock() if late else 0  # from the rank's steps to the group's
        #: From the rank's epochs to the group's.
        self.epoch_shift = max(group.known(), 0) if late else 0
        self.pace = Pace(now)
        self.epoch = 0  # of the last step done, on the group's count
        self._deadline = 0.0  # of the latest fetch
        self.unplanned = True  # whether nothing is known beyond the published plan
        self.rehearsed: SampleObjects | None = None  # all it will read, if its job rehearses
        self.twin: Twin | None = None  # what it keeps decoded
        self.stalls = 0  # how often its reader waited for data
        self.reads = dict.fromkeys(COUNTED, 0)  # of objects, as `COUNTED` names them

    @property
    def last_epoch(self) -> int:
        """Latest epoch of the plan, in the group's numbering."""
        return self.stream.last_epoch + self.epoch_shift

    @property
    def front_epoch(self) -> int:
        """Epoch of the next step to fetch, in the group's numbering."""
        return self.stream.epoch(self.stream.step_at(self.cursors.front))[0] + self.epoch_shift

    @property
    def ahead_of_others(self) -> bool:
        """Whether another rank has yet to fetch objects of an earlier epoch."""
        others = (s for s in self.group.sessions.values() if s is not self)
        mine = self.front_epoch
        return any(s.cursors.front < s.stream.stop and s.front_epoch < mine for s in others)

    def possible(self, done: int, wanted: int) -> tuple[int, int]:
        """Return what a client's words `done` and `wanted` stand for, whatever they say.

        No step is done or wanted beyond the plan, and neither goes back.
        """
        cursors, end = self.cursors, self.stream.end
        return min(max(done, cursors.done), end), min(max(wanted, cursors.wanted), end)

    def pinned(self) -> Ids:
        """Return (k,) the objects that this session has pinned; ids may repeat."""
        return self.stream.objects(self.cursors.at, self.cursors.front)

    @property
    def lead_s(self) -> float:
        """Seconds, at the present pace, until its reader has done all steps that are ready."""
        return (self.cursors.ready - self.cursors.done) * self.pace.step_s

    def needed_at(self, step: int, now: float) -> float:
        """Return the time at which `step` is needed, at the present pace."""
        return now + (step - self.cursors.done) * self.pace.step_s

    def deadline(self, step: int, now: float, *, in_turn: bool) -> float:
        """Return the deadline of fetches for `step`; `in_turn`: not before that of earlier fetches.

        A pace measured while data was slow gives far steps late deadlines. When the pace is quick
        again, steps further ahead must not overtake these.
        """
        needed = self.needed_at(step, now)
        self._deadline = max(self._deadline, needed) if in_turn else needed
        return self._deadline

    def begin(self, epoch: int, generation: int) -> None:
        """Begin an epoch: versions seen before `generation` no longer count."""
        self.begun = max(self.begun, epoch)
        if self.recheck in {"epoch", "step"}:
            self.since = generation
            self.cursors.ask_again()

    @property
    def limit(self) -> int:
        """Position up to which steps may become ready.

        With `recheck` "epoch", no step of an epoch that has not begun may become ready.
        """
        cursors = self.cursors
        if self.recheck != "epoch":
            return cursors.front
        # A session may have done steps of an epoch whose `Begin` has not arrived.
        step = max(self.stream.until(self.begun), cursors.done)
        return min(cursors.front, self.stream.start(step))

    def current(self, ids: Index) -> Mask:
        """Return (k,) whether the version of each object is recent enough for this session."""
        return self.residency.versions.current(ids, self.since, self.since_remote)

    def rewind(self, step: int) -> Index:
        """Unpin all steps from `step` on; return (k,) the objects that were pinned for them."""
        position = self.stream.start(step)
        unpinned = self.stream.objects(position, max(self.cursors.front, position)).astype(np.intp)
        self.residency.unpin(unpinned)
        self.cursors.rewound(step, position)
        return unpinned

    def truncate(self, step: int) -> None:
        """End the plan at `step`, to which the session was rewound."""
        self.stream.truncate(step)
        self.cursors.truncated(step)
        self._deadline = 0.0

    def count(self, state: NDArray[np.uint8], misses: int) -> None:
        """Count reads of objects in these states: hits, fetches joined in flight, and `misses`."""
        hits = int(np.count_nonzero(state == RESIDENT))
        for name, n in zip(COUNTED, (hits, len(state) - hits - misses, misses), strict=True):
            self.reads[name] += n
            self.residency.counts[name] += n

    def snapshot(self) -> dict[str, float | str]:
        """Return counters and positions for `creel stats`."""
        cursors = self.cursors
        return {
            "rank": self.rank,
            "done": cursors.done,
            "ready": cursors.ready,
            "wanted": cursors.wanted,
            "epoch": self.epoch,
            "failed": cursors.failed,
            **self.reads,
            "stalls": self.stalls,
            "dataset": self.residency.name,
            "job": self.group.job,
            "known": self.stream.end,
            "fetched": self.stream.step_at(cursors.front),
            "window": self.stream.step_at(cursors.reach) - cursors.done,
            "step_s": self.pace.step_s,
        }

    def clocked(self, start: int, stop: int) -> NDArray[np.int32]:
        """Return (k,) the step of each position start..stop-1, on the group's clock."""
        steps = self.stream.steps(start, stop)
        steps += self.shift
        return steps

    def policy_step(self, step: int) -> int:
        """Convert a step to the eviction policy's clock."""
        return self.residency.policy.at(self.group.uses, step + self.shift)

    def order(self, epoch: int) -> list[NDArray[np.int32]]:
        """Return the unread part of the order of `epoch`, in pieces."""
        first = max(self.stream.until(epoch - self.epoch_shift - 1), self.cursors.done)
        stop = self.stream.until(epoch - self.epoch_shift)
        if first >= stop:
            return []
        return self.stream.pieces(self.stream.start(first), self.stream.start(stop))

    def announce(self, step: int) -> None:
        """Add the plan from `step` on to the group's next uses, unless the session is unplanned.

        Steps of an unplanned session are read at once: their objects are pinned until then, and no
        later use of them is known.
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
        """Split positions start..stop-1 at epochs; return (epoch, first, last + 1) of each part."""
        out = []
        while start < stop:
            epoch, until = self.stream.epoch(self.stream.step_at(start))
            last = min(self.stream.start(until), stop)
            out.append((epoch + self.epoch_shift, start, last))
            start = last
        return out
