"""How far a session is along its plan: what was read, what is ready, what is fetched. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from creel.cache.memory.pools.free_ranges import must
from creel.policies.prefetch import SessionPlan


@dataclass(slots=True, eq=False)
class Cursors:
    """The cursors of one session along its plan.

    A cursor is a step, or a position: the number of an object in the plan, counted over all steps.
    These orders hold after every event (`check`):

        done <= ready <= end of the plan               steps
        wanted <= end of the plan
        at <= checked <= front <= end of the plan      positions
        at <= verified <= front

    Who moves them, by the methods below:

        the core         `done` with `at`, and `wanted`, forward, as the trainer's words say; also
                         the others where a reader has overtaken them (`consumed`)
        `Prefetcher`     `front` and `checked` forward, `ready` with `checked`, `early`
        `Checks`         `verified` forward
        `RankStream`     all but `done` and `at` back, where the plan or a file has changed

    Three are plain marks, each set by one part: `reach` (`Prefetcher.set_reach`), `starved` (a tick
    of the core), `failed` (also `Landing.give_up`).

    What never happens: `done` goes back. `ready` goes back, other than by `rewound`, before clients
    have been told. An object between `at` and `front` is without a pin. `checked` passes an object
    that is in flight, or whose version is not known to be current.
    """

    #: Step: a reader has finished all before it.
    done: int = 0
    #: Position at which step `done` begins.
    at: int = 0
    #: Step: all before it may be read, because `checked` has passed them or a reader has.
    ready: int = 0
    #: Step: a reader has asked for all before it.
    wanted: int = 0
    #: Steps beyond `ready`, ascending, that may be read before it; some may be behind `ready` now.
    early: tuple[int, ...] = ()
    #: Position: all before it is resident and current, or failed.
    checked: int = 0
    #: Position: the storage was asked for the versions of all before it, where that is needed.
    verified: int = 0
    #: Position: all before it is pinned, and was resident, in flight or given up when passed.
    front: int = 0
    #: Position up to which `front` may advance for now; may lie behind `front`.
    reach: int = 0
    #: The `front` at which the latest fetch found too little room; None if it found enough.
    lacked: int | None = None
    #: The object at `checked` that is in flight, or whose version is; None: `checked` may advance.
    blocked: int | None = None
    #: Whether a tick found a reader waiting and the session without room since the last `consumed`.
    starved: bool = False
    #: Number of objects that were passed without their bytes.
    failed: int = 0
    #: `ready` and `early` as clients know them.
    announced: tuple[int, tuple[int, ...]] = (0, ())

    @property
    def stalling(self) -> bool:
        """Whether a reader waits for the step at `ready`."""
        return self.wanted > self.ready

    @property
    def starving(self) -> bool:
        """Whether a reader waits for room that no step in progress will free.

        A reader may hold the bytes of one step while it waits for the next; the steps of other
        readers end by themselves. Also true if the wait has taken too long (`starved`).
        """
        return self.stalling and (self.ready <= self.done + 1 or self.starved)

    def consumed(self, done: int, at: int) -> None:
        """Advance to step `done` at position `at`; a reader may have overtaken the fetches."""
        self.done, self.at, self.starved = done, at, False
        self.front = max(self.front, at)
        self.verified = max(self.verified, at)
        if self.checked < at:  # fetches in flight for finished steps block nothing
            self.checked, self.blocked = at, None
        self.ready = max(self.ready, done)
        self.early = tuple(step for step in self.early if step >= done)

    def asked(self, wanted: int) -> None:
        """Note that a reader has asked for all steps before `wanted`."""
        self.wanted = wanted

    def pinned(self, front: int, *, lacks: bool = False) -> None:
        """Advance `front`; `lacks`: the next object finds no room."""
        self.front = front
        self.lacked = front if lacks else None

    def settled(self, checked: int, step: int, failed: int, blocked: int | None) -> None:
        """Advance `checked`, past `failed` objects without bytes, to the one that is `blocked`.

        step: the step at `checked`.
        """
        self.checked, self.blocked = checked, blocked
        self.failed += failed
        self.ready = max(self.ready, step)

    def versions_asked(self, position: int) -> None:
        """Note that no object before `position` needs to be asked for its version any more."""
        self.verified = position

    def ask_again(self) -> None:
        """Ask for the versions of all objects that are not checked yet."""
        self.verified = min(self.verified, self.checked)

    def found_early(self, steps: tuple[int, ...]) -> None:
        """Enter the steps beyond `ready` (ascending) whose objects are all there."""
        self.early = steps

    def rewound(self, step: int, position: int) -> None:
        """Go back to `step`, which begins at `position`: its objects must be fetched again."""
        self.front = min(self.front, position)
        self.checked = min(self.checked, position)
        self.verified = min(self.verified, position)
        self.ready = min(self.ready, step)
        self.early = tuple(k for k in self.early if k < step)
        self.blocked = None

    def truncated(self, end: int) -> None:
        """Note that the plan, already rewound, ends at step `end`."""
        self.wanted = min(self.wanted, end)

    def announce(self) -> bool:
        """Note that clients are told of `ready` and `early`; return whether this is news."""
        before, self.announced = self.announced, (self.ready, self.early)
        return self.announced != before

    def check(self, plan: SessionPlan, session: int) -> None:
        """Raise IllegalEventError unless the cursors are in order."""
        must(0 <= self.done <= self.ready <= plan.end, f"session {session}: steps out of order")
        must(self.wanted <= plan.end, f"session {session}: a step beyond the plan is wanted")
        must(self.at == plan.start(self.done), f"session {session}: not at its step")
        must(self.at <= self.checked <= self.front <= plan.stop, f"session {session}: front")
        must(self.at <= self.verified <= self.front, f"session {session}: verified")
        pinned = not self.early or plan.start(self.early[-1] + 1) <= self.front
        must(pinned, f"session {session}: an early step is not pinned")
