"""EpochPlan: what an epoch will read, computed on request."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from creel.loader.order.drain import DrainedSampler
from creel.loader.order.streams import (
    Distributed,
    FromArray,
    SamplerStream,
    Sequential,
    indices_of,
)
from creel.policies.job_order import JobOrder

_log = logging.getLogger("creel.loader")

#: Steps that are compared if two plans have no keys that decide whether they are equal.
_COMPARED = 16


class Shape(NamedTuple):
    """Division of a stream into steps of one size; size None: each item is a step."""

    size: int | None
    drop_last: bool

    def steps(self, total: int) -> int:
        """Return the number of steps of `total` items."""
        size = self.size or 1
        return total // size if self.drop_last else -(-total // size)

    def steps_within(self, items: int) -> int:
        """Return the number of full steps in the first `items` items."""
        return items // (self.size or 1)

    def start(self, step: int) -> int:
        """Return the first item of `step`; beyond the last item after an incomplete last step."""
        return step * (self.size or 1)

    def ends(self, first: int, last: int, items: int) -> NDArray[np.int64]:
        """Return the ends of steps [first, last), of `items` items, counted from `first`."""
        ends = np.arange(1, last - first + 1, dtype=np.int64) * (self.size or 1)
        return ends.clip(max=items)


class GivenSteps:
    """Division of a stream into steps that end at `ends`, (b,) int64."""

    def __init__(self, ends: NDArray[np.int64]) -> None:
        self._ends = ends

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GivenSteps) and np.array_equal(self._ends, other._ends)

    __hash__ = None  # type: ignore[assignment]  # equal by its array

    def steps(self, total: int) -> int:  # noqa: ARG002  (as `Shape.steps`)
        """As `Shape.steps`."""
        return len(self._ends)

    def steps_within(self, items: int) -> int:
        """As `Shape.steps_within`."""
        return int(np.searchsorted(self._ends, items, side="right"))

    def start(self, step: int) -> int:
        """As `Shape.start`."""
        return int(self._ends[step - 1]) if step else 0

    def ends(self, first: int, last: int, items: int) -> NDArray[np.int64]:  # noqa: ARG002
        """As `Shape.ends`."""
        return self._ends[first:last] - self.start(first)


class PredictedEpoch(NamedTuple):
    """A predicted epoch: its items, and how they are divided into steps."""

    base_seed: int
    shape: Shape | GivenSteps
    stream: SamplerStream

    @classmethod
    def of_drained(cls, base_seed: int, drained: DrainedSampler) -> PredictedEpoch:
        """Return the epoch of a sampler that was run to its end."""
        return cls(base_seed, GivenSteps(drained.ends), FromArray(drained.indices))


class EpochPlan:
    """What one epoch reads, step by step.

    Construction, `base_seed`, `steps` and `same` are cheap; `cut` computes some steps in the
    calling thread (14 M shuffled samples: 0.4 s). All methods are thread-safe. A plan that cannot
    be opened has no steps: that costs speed, never a batch.
    """

    def __init__(self, work: Callable[[], PredictedEpoch]) -> None:
        self._work = work
        self._lock = threading.RLock()
        self._predicted: PredictedEpoch | None = None

    @property
    def base_seed(self) -> int:
        """The workers' base seed of that epoch; -1 if it cannot be predicted."""
        return self._opened().base_seed

    @property
    def steps(self) -> int:
        """The number of steps, if all can be computed."""
        predicted = self._opened()
        return predicted.shape.steps(predicted.stream.total)

    @property
    def samples(self) -> int:
        """The number of samples of all steps, if all can be computed; may be slightly too high."""
        return self._opened().stream.total

    def reach(self, first: int, samples: int) -> int:
        """Return `last` such that steps [first, last) have about `samples` samples; at least one.

        At most `steps`.
        """
        shape = self._opened().shape
        return min(max(shape.steps_within(shape.start(first) + samples), first + 1), self.steps)

    @property
    def opened(self) -> bool:
        """Whether the plan is opened; until then any method or property may be slow."""
        return self._predicted is not None

    @property
    def thread_safe(self) -> bool:
        """Whether another thread may compute it: no user code runs."""
        return self._opened().stream.thread_safe

    @property
    def at_once(self) -> bool:
        """Whether the first step costs as much as the whole plan."""
        return self._opened().stream.at_once

    @property
    def deal(self) -> JobOrder | None:
        """How this epoch is dealt to all ranks of the job; None where the sampler does not say."""
        predicted = self._opened()
        stream, shape = predicted.stream, predicted.shape
        if isinstance(stream, Distributed) and isinstance(shape, Shape):
            return stream.deal(
                min(shape.start(shape.steps(stream.total)), stream.total), shape.size or 1
            )
        return None

    @property
    def spread(self) -> int:
        """The cost of a sample that is not ready, in entries of a permutation."""
        return self._opened().stream.spread

    def ready(self, step: int) -> bool:
        """Whether steps [0, step) are drawn already, so that computing them is cheap."""
        predicted = self._opened()
        return predicted.stream.ready >= min(predicted.shape.start(step), predicted.stream.total)

    def draw(self) -> None:
        """Draw the whole plan in the cheapest way, so that all steps are ready; may be slow."""
        stream = self._opened().stream
        with contextlib.suppress(Exception):  # `cut` raises it again
            with self._lock:
                stream.need(stream.total - 1)
            stream.draw()

    def cut(self, first: int, last: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return (indices, ends) of steps [first, last), with ends counted from the first of them.

        Step first+i reads `indices[ends[i-1]:ends[i]]`. Do not modify the arrays.

        Raises:
            Exception: the computation fails; a sampler that raises does so again when pulled.
        """
        predicted = self._opened()
        stream, shape = predicted.stream, predicted.shape
        start, stop = shape.start(first), min(shape.start(last), stream.total)
        with self._lock:
            stream.need(stop - 1)
        indices = indices_of(stream.items(start, stop))
        return indices, shape.ends(first, last, len(indices))

    def same(self, other: EpochPlan) -> bool:
        """Whether both plans have the same batches and base seed; compares seeds if they decide."""
        a, b = self._opened(), other._opened()
        if a.base_seed != b.base_seed or a.shape != b.shape:
            return False
        keys = a.stream.key, b.stream.key
        return keys[0] == keys[1] if None not in keys else self._begins_as(other)

    def _begins_as(self, other: EpochPlan) -> bool:
        """Whether both plans have equally many steps and the same first ones.

        Comparing all would be slow; a later step that differs is noticed when it is pulled.
        """
        if self.steps != other.steps:
            return False
        some = min(self.steps, _COMPARED)
        try:
            (indices, ends), (others, stops) = self.cut(0, some), other.cut(0, some)
            return np.array_equal(indices, others) and np.array_equal(ends, stops)
        except Exception:  # noqa: BLE001  (as below)
            return False

    def _opened(self) -> PredictedEpoch:
        if self._predicted is not None:
            return self._predicted
        with self._lock:
            if self._predicted is None:
                try:
                    self._predicted = self._work()
                except Exception:  # noqa: BLE001  (a sampler that raises does so again when pulled)
                    _log.debug("an epoch cannot be predicted", exc_info=True)
                    self._predicted = PredictedEpoch(-1, Shape(None, False), Sequential(0))
            return self._predicted


def same_batch(planned: NDArray[np.integer], batch: object) -> bool:
    """Whether the `planned` samples are exactly `batch`, as an order yields it."""
    if isinstance(batch, np.ndarray):
        alike = planned.shape == batch.shape
        return alike and bool(np.count_nonzero(planned == batch) == planned.size)
    try:
        return np.array_equal(planned, np.atleast_1d(np.asarray(batch)))
    except Exception:  # noqa: BLE001  numpy cannot convert it, whatever it raises
        return False
