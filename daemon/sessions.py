"""Who reads a dataset: the ranks of a job and their streams of steps. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from creel.policies.prefetch import Pace, Stream
from creel.policies.retain import Need
from creel.policies.uses import Uses

if TYPE_CHECKING:  # each knows the other
    from creel.daemon.holding import Holding

Index = NDArray[np.intp]

#: What a read found: a resident, a fetch under way for somebody else, nothing.
COUNTED = ("hits", "joined", "misses")
#: A rank that opens when its group is further on than this joins an old job: its steps are shifted.
_LATE_STEPS = 8


@dataclass(eq=False)
class Group:
    """The ranks on this node that go through one dataset in step: one `Uses` for all."""

    job: str
    world: int
    uses: Uses
    sessions: dict[int, Session] = field(default_factory=dict)  # by rank

    def clock(self) -> int:
        """Steps that all ranks have done."""
        return min((s.done + s.shift for s in self.sessions.values()), default=0)

    def known(self) -> int:
        """The latest epoch of which every rank has told its plan."""
        return min((s.last_epoch for s in self.sessions.values()), default=-1)

    def planned(self) -> bool:
        """Whether any rank still has something to read."""
        return any(s.stream.end > s.done for s in self.sessions.values())

    def step_s(self) -> float:
        """Seconds per step of the slowest rank; 0 when unknown."""
        return max((s.pace.step_s for s in self.sessions.values()), default=0.0)

    def replan(self) -> None:
        """Build the next uses anew from what the sessions still have to read."""
        self.uses.clear()
        for session in self.sessions.values():
            session.foretell(session.done)


class Session:
    """One rank's stream. Positions before `front` are pinned from step `done` on."""

    def __init__(
        self,
        number: int,
        holding: Holding,
        group: Group,
        rank: int,
        now: float,
        recheck: str = "never",
        generation: int = 0,
    ) -> None:
        """`recheck`: see `messages.Open`; `generation`: the moment at which the session opens."""
        self.id = number
        self.recheck = recheck
        #: What is held of a file must be known to be good in these generations (`Versions`).
        self.since = self.since_remote = 0 if recheck == "never" else generation
        self.begun = -1  # the latest epoch that has begun
        self.verified = 0  # positions before it: the versions of their files were asked for
        self.holding = holding
        self.group = group
        self.rank = rank
        self.stream = Stream()
        late = group.clock() > _LATE_STEPS
        self.shift = group.clock() if late else 0  # from own steps to the group's
        self.epoch_shift = max(group.known(), 0) if late else 0
        self.pace = Pace(now)
        self.done = 0  # steps
        self.ready = 0
        self.wanted = 0
        self.at = 0  # position of `done`
        self.checked = 0  # positions before it are settled
        self.front = 0
        self.reach = 0  # how far `front` may go for now
        self.told = 0  # `ready` as last announced
        self.epoch = 0  # of the last step done, on the group's count
        self.blocked = -1  # the object that `checked` waits for
        self.failed = 0
        self._due = 0.0  # when what was fetched last is needed
        self.blind = True  # nobody knows what comes after what was told
        self.hits = self.joined = self.misses = self.stalls = 0

    @property
    def last_epoch(self) -> int:
        """The latest epoch of the plan, on the group's count."""
        return self.stream.last_epoch + self.epoch_shift

    @property
    def stalling(self) -> bool:
        """Whether somebody waits for the step at `ready`."""
        return self.wanted > self.ready

    def due(self, step: int, now: float, *, in_turn: bool) -> float:
        """When the objects of `step`, fetched now, are needed; in turn: no earlier than others.

        A pace that was slow for want of data puts far steps off; once it is quick again, steps
        still further must not overtake them.
        """
        due = now + (step - self.done) * self.pace.step_s
        self._due = max(self._due, due) if in_turn else due
        return self._due

    def begin(self, epoch: int, generation: int) -> None:
        """An epoch begins; what was known of files before does not count any more."""
        self.begun = max(self.begun, epoch)
        if self.recheck in {"epoch", "step"}:
            self.since = generation
            self.verified = self.checked

    @property
    def limit(self) -> int:
        """The position up to which steps may become ready.

        Where files are looked at again in each epoch, no step of an epoch that has not begun may.
        """
        if self.recheck != "epoch":
            return self.front
        # Who was done before its `Begin` came in has passed steps of an epoch that has not begun.
        step = max(self.stream.until(self.begun), self.done)
        return min(self.front, self.stream.start(step))

    def current(self, ids: Index) -> NDArray[np.bool_]:
        """(k,) whether what is held of each object is known to be good for this session."""
        return self.holding.versions.current(ids, self.since, self.since_remote)

    def rewind(self, step: int) -> Index:
        """Give up all that was brought in from `step` on; (k,) objects that were pinned for it."""
        position = self.stream.start(step)
        loose = self.stream.objects(position, max(self.front, position)).astype(np.intp)
        self.holding.unpin(loose)
        self.front = min(self.front, position)
        self.checked = min(self.checked, position)
        self.verified = min(self.verified, position)
        self.ready = min(self.ready, step)
        self.blocked = -1
        return loose

    def truncate(self, step: int) -> None:
        """The plan is void from `step` on."""
        self.stream.truncate(step)
        self._due = 0.0

    def snapshot(self) -> dict[str, float | str]:
        """For `creel stats`."""
        own = ("rank", "done", "ready", "wanted", "epoch", "failed", *COUNTED, "stalls")
        return {name: getattr(self, name) for name in own} | {
            "dataset": self.holding.name,
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

    def need(self, step: int) -> Need:
        """Epoch and step on the keeper's clock, for room that is wanted for this step."""
        epoch = self.stream.epoch(step)[0] + self.epoch_shift
        step += self.shift
        keeper = self.holding.keeper
        return Need(epoch, step if keeper is None else keeper.at(self.group.uses, step))

    def foretell(self, step: int) -> None:
        """Tell the group's uses the plan from `step` on, if it is one.

        What was not foreseen is read at once: until then it is pinned, and then nothing is known.
        """
        while step < self.stream.end:
            epoch, stop = self.stream.epoch(step)
            if self.blind:
                self.group.uses.blur(epoch + self.epoch_shift)
            else:
                self._foretell(epoch + self.epoch_shift, step, stop)
            step = stop

    def _foretell(self, epoch: int, first: int, stop: int) -> None:
        a, b = self.stream.start(first), self.stream.start(stop)
        ids = self.stream.objects(a, b).astype(np.intp)
        self.group.uses.extend(epoch, self.clocked(a, b), ids, self.rank)

    def stretches(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """(epoch, first, last) positions: start..stop-1 cut where the epoch changes."""
        out = []
        while start < stop:
            epoch, until = self.stream.epoch(self.stream.step_at(start))
            last = min(self.stream.start(until), stop)
            out.append((epoch + self.epoch_shift, start, last))
            start = last
        return out
