"""Plans: what an epoch will read, computed when asked for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from creel.loader.drain import Drained
from creel.loader.streams import Stream
from creel.policies import plan

_log = logging.getLogger("creel.loader")

#: An epoch without steps.
NOTHING = Drained(None, np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int64))


class Shape(NamedTuple):
    """How a stream is cut into steps; size None: each item is a step."""

    size: int | None
    drop_last: bool

    def ends(self, total: int) -> NDArray[np.int64]:
        """Where each step of `total` items ends: (b,) int64."""
        return plan.batches(total, self.size or 1, drop_last=self.drop_last)


class Foreseen(NamedTuple):
    """An epoch about to be computed; exactly one of `stream` and `drained` is there."""

    base_seed: int
    shape: Shape
    stream: Stream | None = None
    drained: Drained | None = None


class Plan:
    """What one epoch reads: step i reads `indices[ends[i-1]:ends[i]]`.

    Made in a moment; `base_seed` and `same` are cheap too. The arrays are computed when first asked
    for, in whatever thread asks (0.4 s for 14 M shuffled samples). All methods are thread-safe. A
    plan that cannot be computed after all has no steps: that costs speed, never a batch.
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

    def same(self, other: Plan) -> bool:
        """Whether both foresee the same batches and base seed; by seeds where these decide."""
        a, b = self._opened(), other._opened()
        if (a.base_seed, a.shape) != (b.base_seed, b.shape):
            return False
        if a.stream is not None and b.stream is not None:
            keys = a.stream.key, b.stream.key
            if None not in keys:
                return keys[0] == keys[1]
        return np.array_equal(self.ends, other.ends) and np.array_equal(self.indices, other.indices)

    def matches(self, step: int, batch: object) -> bool:
        """Whether step `step` is foreseen to read exactly `batch`, as an order yields it."""
        indices, ends = self._computed()
        if not 0 <= step < len(ends):
            return False
        planned = indices[ends[step - 1] if step else 0 : ends[step]]
        try:
            return np.array_equal(planned, np.atleast_1d(np.asarray(batch)))
        except Exception:  # noqa: BLE001  nothing that numpy makes an array of, in whatever words
            return False

    def _opened(self) -> Foreseen:
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
