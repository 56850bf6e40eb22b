"""Plans: what an epoch will read, computed when asked for."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from creel.loader.drain import Drained
from creel.loader.streams import Stream, indices_of
from creel.policies import plan

_log = logging.getLogger("creel.loader")

#: An epoch without steps.
NOTHING = Drained(None, np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int64))


#: Steps that are compared where nothing else tells whether two plans are the same.
_COMPARED = 16


class Shape(NamedTuple):
    """How a stream is cut into steps; size None: each item is a step."""

    size: int | None
    drop_last: bool

    def ends(self, total: int) -> NDArray[np.int64]:
        """Where each step of `total` items ends: (b,) int64."""
        return plan.batches(total, self.size or 1, drop_last=self.drop_last)

    def steps(self, total: int) -> int:
        """How many steps `total` items are."""
        size = self.size or 1
        return total // size if self.drop_last else -(-total // size)


class Foreseen(NamedTuple):
    """An epoch about to be computed; exactly one of `stream` and `drained` is there."""

    base_seed: int
    shape: Shape
    stream: Stream | None = None
    drained: Drained | None = None


class Plan:
    """What one epoch reads: step i reads `indices[ends[i-1]:ends[i]]`.

    Made in a moment; `base_seed`, `steps` and `same` are cheap too. `cut` computes some steps, the
    arrays hold all; both in whatever thread asks (14 M shuffled samples: 0.4 s). All methods are
    thread-safe. A plan that cannot be computed after all has no steps: that costs speed, never a
    batch.
    """

    def __init__(self, work: Callable[[], Foreseen]) -> None:
        self._work = work
        self._lock = threading.RLock()
        self._foreseen: Foreseen | None = None
        self._arrays: tuple[NDArray[np.int32], NDArray[np.int64]] | None = None

    @property
    def base_seed(self) -> int:
        """The workers' base seed of that epoch; -1 where it cannot be foreseen."""
        return self._opened().base_seed

    @property
    def indices(self) -> NDArray[np.int32]:
        """(ends[-1],) sample indices in order of reading, int32. Do not write into it."""
        return self._computed()[0]

    @property
    def ends(self) -> NDArray[np.int64]:
        """(steps,) where each step ends in `indices`, int64."""
        return self._computed()[1]

    @property
    def steps(self) -> int:
        """How many steps there are, if all can be computed."""
        foreseen = self._opened()
        if foreseen.stream is None:
            return len((foreseen.drained or NOTHING)[2])
        return foreseen.shape.steps(foreseen.stream.total)

    @property
    def samples(self) -> int:
        """How many samples the steps have together, if all can be computed; a few more at most."""
        foreseen = self._opened()
        if foreseen.stream is None:
            return len((foreseen.drained or NOTHING)[1])
        return foreseen.stream.total

    def reach(self, first: int, samples: int) -> int:
        """The step up to which steps from `first` on have about so many samples; one at least."""
        foreseen = self._opened()
        if foreseen.stream is None:
            ends = (foreseen.drained or NOTHING)[2]
            start = int(ends[first - 1]) if first else 0
            last = int(np.searchsorted(ends, start + samples, side="right"))
        else:
            last = first + samples // (foreseen.shape.size or 1)
        return min(max(last, first + 1), self.steps)

    @property
    def opened(self) -> bool:
        """Whether it is known how it is computed; until then every question may take its time."""
        return self._foreseen is not None

    @property
    def apart(self) -> bool:
        """Whether another thread may compute it: none of the person's code runs."""
        stream = self._opened().stream
        return stream is None or stream.apart

    @property
    def at_once(self) -> bool:
        """Whether the first step costs as much as all."""
        stream = self._opened().stream
        return stream is not None and stream.at_once

    @property
    def spread(self) -> int:
        """What a sample costs that is not ready, in entries of a permutation."""
        stream = self._opened().stream
        return 1 if stream is None else stream.spread

    def ready(self, step: int) -> bool:
        """Whether steps [0, step) cost next to nothing any more."""
        foreseen = self._opened()
        if foreseen.stream is None:
            return True
        return foreseen.stream.ready >= min(
            step * (foreseen.shape.size or 1), foreseen.stream.total
        )

    def draw(self) -> None:
        """Have all steps cost next to nothing, at the least cost; it may take its time."""
        stream = self._opened().stream
        if stream is not None:
            with contextlib.suppress(Exception):  # who wants the steps meets it again
                with self._lock:
                    stream.need(stream.total - 1)
                stream.draw()

    def cut(self, first: int, last: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """(indices, ends) of steps [first, last), as if they were all.

        Raises:
            Exception: it cannot be computed after all; a sampler that raises does so when pulled.
        """
        foreseen = self._opened()
        if foreseen.stream is None:
            _, indices, ends = foreseen.drained or NOTHING
            start = int(ends[first - 1]) if first else 0
            return indices[start : ends[last - 1]], ends[first:last] - start
        stream, size = foreseen.stream, foreseen.shape.size or 1
        start, stop = first * size, min(last * size, stream.total)
        with self._lock:
            stream.need(stop - 1)
        indices = indices_of(stream.items(start, stop))
        return indices, Shape(size, False).ends(stop - start)

    def same(self, other: Plan) -> bool:
        """Whether both foresee the same batches and base seed; by seeds where these decide."""
        a, b = self._opened(), other._opened()
        if (a.base_seed, a.shape) != (b.base_seed, b.shape):
            return False
        if a.stream is not None and b.stream is not None:
            keys = a.stream.key, b.stream.key
            if None not in keys:
                return keys[0] == keys[1]
            return self._begins_as(other)
        return np.array_equal(self.ends, other.ends) and np.array_equal(self.indices, other.indices)

    def matches(self, step: int, batch: object) -> bool:
        """Whether step `step` is foreseen to read exactly `batch`, as an order yields it."""
        indices, ends = self._computed()
        if not 0 <= step < len(ends):
            return False
        return same_batch(indices[ends[step - 1] if step else 0 : ends[step]], batch)

    def _begins_as(self, other: Plan) -> bool:
        """Whether steps and samples are as many, and the first ones the same.

        All would take long; a step further on that is another is noticed when it is pulled.
        """
        if self.steps != other.steps:
            return False
        some = min(self.steps, _COMPARED)
        try:
            (indices, ends), (others, stops) = self.cut(0, some), other.cut(0, some)
            return np.array_equal(indices, others) and np.array_equal(ends, stops)
        except Exception:  # noqa: BLE001  (as below)
            return False

    def _opened(self) -> Foreseen:
        if self._foreseen is not None:
            return self._foreseen
        with self._lock:
            if self._foreseen is None:
                try:
                    self._foreseen = self._work()
                except Exception:  # noqa: BLE001  (a sampler that raises does so when it is pulled)
                    _log.debug("cannot foresee an epoch", exc_info=True)
                    self._foreseen = Foreseen(-1, Shape(None, False), drained=NOTHING)
            return self._foreseen

    def _computed(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        with self._lock:
            if self._arrays is None:
                self._arrays = self._compute()
            return self._arrays

    def _compute(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        foreseen = self._opened()
        drained = foreseen.drained
        if foreseen.stream is not None:
            try:
                indices = foreseen.stream.everything()
            except Exception:  # noqa: BLE001  (as above)
                _log.debug("cannot compute a plan", exc_info=True)
            else:
                ends = foreseen.shape.ends(len(indices))
                return indices[: ends[-1] if len(ends) else 0], ends
        return (drained or NOTHING)[1:]


def same_batch(planned: NDArray[np.integer], batch: object) -> bool:
    """Whether these samples are exactly `batch`, as an order yields it."""
    if isinstance(batch, np.ndarray):
        return planned.shape == batch.shape and bool((planned == batch).all())
    try:
        return np.array_equal(planned, np.atleast_1d(np.asarray(batch)))
    except Exception:  # noqa: BLE001  nothing that numpy makes an array of, in whatever words
        return False
