"""What to fetch next, how far ahead, and in fetches of what size. Pure.

A session's plan is a `SessionPlan`: one flat array of object ids, cut into steps. Positions in it
count from the session's start and never restart, like steps.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from creel.policies.arrays import NO_IDS, Ints
from creel.settings import FetchSettings, WindowSettings

Item = TypeVar("Item", bound=np.generic)


@dataclass(frozen=True)
class Window:
    """Limits on how far ahead the daemon works.

    Args:
        min_steps, max_steps: least (if memory allows) and most steps ahead of a session.
        nbytes: most bytes ahead of one session.
        inflight_nbytes, inflight_objects: most bytes and objects in flight at once; fetches for
            which no reader waits yet may use three quarters of them.
        fetch_nbytes, fetch_objects: most bytes and objects in one fetch.
    """

    min_steps: int
    max_steps: int
    nbytes: int
    inflight_nbytes: int
    inflight_objects: int
    fetch_nbytes: int
    fetch_objects: int

    @classmethod
    def of(cls, window: WindowSettings, fetch: FetchSettings) -> Window:
        """Return the limits that the user has set, with constants for the others."""
        return cls(
            min_steps=window.min_steps,
            max_steps=window.max_steps,
            nbytes=window.bytes,
            inflight_nbytes=fetch.inflight_bytes,
            inflight_objects=4096,
            fetch_nbytes=8 << 20,
            fetch_objects=512,
        )


#: Small pieces of a plan, published step by step, are joined up to this many objects.
_MAX_JOINED = 4096


class SessionPlan:
    """The plan of one session, from the oldest step still needed to the last known one.

    >>> plan = SessionPlan()
    >>> plan.extend(0, np.array([7, 8, 9], np.int32), np.array([2, 3]))
    >>> plan.end, plan.start(1), plan.objects(1, 3).tolist()
    (2, 2, [8, 9])
    """

    def __init__(self) -> None:
        # In pieces, as published: a single array would be copied each time it grows.
        self._pieces: list[NDArray[np.int32]] = []
        self._bounds: list[int] = []  # position of the first entry of each piece
        self._stop = 0
        self._starts: Ints = np.zeros(1, np.int64)  # position of each step, and the end of the last
        self._view = self._starts.data  # reads of single entries are 3 times faster
        self._step = 0  # number of the step at _starts[0]
        self._steps = 0
        self._firsts: list[int] = []  # first step of each epoch's stretch
        self._epochs: list[int] = []

    @property
    def end(self) -> int:
        """One past the last known step."""
        return self._step + self._steps

    @property
    def stop(self) -> int:
        """One past the last known position."""
        return self._stop

    @property
    def nbytes(self) -> int:
        """Memory of the plan, in bytes."""
        entries = self._stop - self._bounds[0] if self._bounds else 0
        return 4 * entries + self._starts.nbytes

    def extend(self, epoch: int, objects: NDArray[np.int32], ends: Ints) -> None:
        """Append b steps of `epoch`; (b,) `ends` as in `messages.Extend`."""
        if not len(ends):
            return
        b = len(ends)
        self._starts = _room(self._starts, self._steps + 1, b)  # may raise: nothing is changed yet
        self._view = self._starts.data
        if not self._epochs or self._epochs[-1] != epoch:
            self._firsts.append(self.end)
            self._epochs.append(epoch)
        self._starts[self._steps + 1 : self._steps + 1 + b] = ends + self._stop
        self._append(np.asarray(objects, np.int32))
        self._steps += b

    def _append(self, objects: NDArray[np.int32]) -> None:
        if self._pieces and len(self._pieces[-1]) + len(objects) <= _MAX_JOINED:
            self._pieces[-1] = np.concatenate([self._pieces[-1], objects])
        elif len(objects):
            self._pieces.append(objects)
            self._bounds.append(self._stop)
        self._stop += len(objects)

    def truncate(self, step: int) -> None:
        """Forget steps from `step` on."""
        self._steps = max(min(self._steps, step - self._step), 0)
        self._stop = self._view[self._steps]
        while self._bounds and self._bounds[-1] >= self._stop:
            del self._bounds[-1], self._pieces[-1]
        if self._pieces:
            self._pieces[-1] = self._pieces[-1][: self._stop - self._bounds[-1]]
        while self._firsts and self._firsts[-1] >= step:
            self._firsts.pop()
            self._epochs.pop()

    def drop_before(self, step: int) -> None:
        """Forget steps before `step`; memory is freed piece by piece."""
        steps = step - self._step
        position = self._view[steps]
        stale = bisect_right(self._bounds, position) - (position < self._stop)
        if stale > 0:
            del self._pieces[:stale], self._bounds[:stale]
        if 2 * steps <= self._steps + 4096 and step < self.end:
            return
        self._starts = self._starts[steps : self._steps + 1].copy()
        self._view = self._starts.data
        self._steps -= steps
        self._step = step
        keep = max(bisect_right(self._firsts, step) - 1, 0)
        del self._firsts[:keep], self._epochs[:keep]

    def start(self, step: int) -> int:
        """Return the position at which `step` begins (any step from the oldest kept to `end`)."""
        return self._view[step - self._step]

    def step_at(self, position: int) -> int:
        """Return the step that contains `position`, or `end`."""
        return self._step + bisect_right(self._view, position, 0, self._steps + 1) - 1

    def objects(self, start: int, stop: int) -> NDArray[np.int32]:
        """Return (k,) ids at positions start..stop-1; read only."""
        if start >= stop:
            return NO_IDS
        i = bisect_right(self._bounds, start) - 1
        begin = self._bounds[i]
        piece = self._pieces[i][start - begin : stop - begin]
        if len(piece) == stop - start:
            return piece
        parts = [piece]
        while (at := self._bounds[i] + len(self._pieces[i])) < stop:
            i += 1
            parts.append(self._pieces[i][: stop - at])
        return np.concatenate(parts)

    def pieces(self, start: int, stop: int) -> list[NDArray[np.int32]]:
        """Return the ids at positions start..stop-1, in pieces as stored; read only."""
        parts = zip(self._bounds, self._pieces, strict=True)
        cut = [piece[max(start - at, 0) : max(stop - at, 0)] for at, piece in parts]
        return [piece for piece in cut if len(piece)]

    def steps(self, start: int, stop: int) -> NDArray[np.int32]:
        """Return (k,) the step of each position from start to stop-1 (ascending)."""
        first, last = self.step_at(start), self.step_at(max(stop - 1, start))
        if first == last:
            return np.full(stop - start, first, np.int32)
        edges = self._starts[first - self._step : last - self._step + 2].clip(start, stop)
        return np.repeat(np.arange(first, last + 1, dtype=np.int32), np.diff(edges))

    def epoch(self, step: int) -> tuple[int, int]:
        """Return (epoch of `step`, end of its stretch); beyond the end, those of the last step."""
        if not self._firsts:
            return 0, self.end
        i = max(bisect_right(self._firsts, step) - 1, 0)
        return self._epochs[i], self._firsts[i + 1] if i + 1 < len(self._firsts) else self.end

    def until(self, epoch: int) -> int:
        """Return the first step of an epoch later than `epoch`, or `end`."""
        i = bisect_right(self._epochs, epoch)
        return self._firsts[i] if i < len(self._firsts) else self.end

    @property
    def last_epoch(self) -> int:
        """The latest known epoch; -1 without a plan."""
        return self._epochs[-1] if self._epochs else -1


def _room(array: NDArray[Item], used: int, more: int) -> NDArray[Item]:
    """Return `array` if `more` entries fit after `used`, else a copy with an eighth to spare."""
    if used + more <= len(array):
        return array
    grown = np.empty(used + more + (used >> 3), array.dtype)
    grown[:used] = array[:used]
    return grown


class Pace:
    """Pace of one session: seconds per step, and how far ahead its readers ask."""

    def __init__(self, now: float) -> None:
        self.step_s = 0.0  # smoothed over about 8 steps; 0 before the first
        self.depth = 0  # most steps beyond `done` that readers asked for
        self.boost = 1.0  # doubled by each stall, decays
        self.latest_s = 0.0  # per step, at the latest progress
        self._last = now

    def progressed(self, steps: int, now: float) -> None:
        each = max(now - self._last, 0.0) / steps
        self._last, self.latest_s = now, each
        weight = min(steps / 8, 1.0) if self.step_s else 1.0
        self.step_s += (each - self.step_s) * weight
        self.boost = max(self.boost * 0.99**steps, 1.0)

    def asked(self, depth: int, *, stalls: bool) -> None:
        """Note that a reader asked for a step `depth` after the last one done, or `stalls`."""
        self.depth = max(self.depth, depth)
        if stalls:
            self.boost = min(self.boost * 2, 64.0)

    def horizon(self, latency_s: float, window: Window) -> int:
        """Return how many steps to fetch ahead: twice the latency, or what the readers need."""
        steps = window.min_steps
        if self.step_s:
            steps += min(int(2 * latency_s / self.step_s), window.max_steps)
        return max(min(int(steps * self.boost), window.max_steps), self.min_ahead)

    @property
    def min_ahead(self) -> int:
        """Steps ahead that readers need: one more than they ask for, and the one being read."""
        return self.depth + 2


class Latency:
    """Upper bound of nearly all fetch times, from mean and deviation as in TCP."""

    def __init__(self) -> None:
        self._mean = 0.0
        self._spread = 0.0

    def saw(self, seconds: float) -> None:
        """Enter the time of one fetch (Jacobson 1988, section 2)."""
        if not self._mean:
            self._mean, self._spread = seconds, seconds / 2
            return
        error = seconds - self._mean
        self._mean += error / 8
        self._spread += (abs(error) - self._spread) / 4

    @property
    def seconds(self) -> float:
        """Mean plus four deviations."""
        return self._mean + 4 * self._spread


#: Factor on the lead. Fetches in flight for the skipped steps are wasted, so that longer and rarer
#: leads lose less work.
_LEAD_MARGIN = 3


def lead(pace: Pace, fetch_step_s: float, landed_s: float, window: Window) -> int:
    """Return how many steps to leave to a reader that overtakes the fetches, so later ones land.

    0 if the reader was faster than the source only once.

    Args:
        fetch_step_s: time in which the source delivers the objects of a step.
        landed_s: time until objects requested now have landed.
    """
    if not pace.step_s or pace.latest_s >= fetch_step_s:
        return 0
    return min(math.ceil(_LEAD_MARGIN * landed_s / pace.step_s), window.max_steps)


class SourceRate:
    """Time that a source takes per object while it has fetches in flight."""

    def __init__(self) -> None:
        self._busy_s = 0.0
        self._objects = 0.0
        self._last = 0.0

    def saw(self, objects: int, begun: float, now: float) -> None:
        """Enter a fetch of `objects` objects that ended at `now`."""
        busy_s = max(now - max(begun, self._last), 0.0)
        self._last = now
        self._busy_s += busy_s - self._busy_s / 16
        self._objects += objects - self._objects / 16

    def deliverable(self, seconds: float) -> float:
        """Return how many objects the source delivers in `seconds` at its recent rate."""
        return seconds * self._objects / self._busy_s if self._busy_s else math.inf

    def seconds(self, objects: int) -> float:
        """Return how long the source takes for `objects` at its recent rate; 0 before any fetch."""
        return objects * self._busy_s / self._objects if self._objects else 0.0


def affordable(nbytes: Ints, budget: int) -> int:
    """Return how many objects, from the first on, fit into `budget` bytes together.

    >>> affordable(np.array([4, 4, 4]), 9)
    2
    """
    total = nbytes.cumsum()
    if not len(total) or total[-1] <= budget:
        return len(total)
    return int(total.searchsorted(budget, side="right"))


def portions(nbytes: Ints, window: Window) -> list[slice]:
    """Cut objects of one urgency, sorted by id, into fetches; return slices of (k,) `nbytes`.

    >>> portions(np.full(3, 3 << 20), Window.of(WindowSettings(), FetchSettings()))
    [slice(0, 2, None), slice(2, 3, None)]
    """
    k = len(nbytes)
    total = int(nbytes.sum())
    step = window.fetch_objects
    if total > window.fetch_nbytes:  # by the mean size: a much larger object shares its fetch
        step = max(min(step, k * window.fetch_nbytes // total), 1)
    return [slice(i, min(i + step, k)) for i in range(0, k, step)]
