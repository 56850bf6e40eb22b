"""EpochPlan: the samples an epoch will read, computed on request (by `epoch_order.predict`)."""

from __future__ import annotations

import contextlib
import logging
import math
import operator
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from creel.loader.line.order.streams import FromArray, SamplerStream, Sequential, indices_of
from creel.policies.cluster.job_order import JobOrder
from creel.policies.order.division import Division

_log = logging.getLogger("creel.loader")

#: Most indices of a sampler that is run to its end (int32: 512 MiB).
LIMIT = 1 << 27
#: Steps that are compared if two plans have no keys that decide whether they are equal.
_COMPARED = 16


class PredictedEpoch(NamedTuple):
    """A predicted epoch: its items, and how they are divided into steps."""

    division: Division
    stream: SamplerStream


def run_to_end(items: Iterable[object], deadline: float = math.inf) -> PredictedEpoch | None:
    """Pull all items of a sampler; None past the deadline (monotonic seconds) or `LIMIT`.

    Raises:
        TypeError, ValueError: an item is neither an index nor a flat group of them.
    """
    indices: list[int] = []
    starts = [0]
    for count, pulled in enumerate(items):
        if type(pulled) is int:
            indices.append(pulled)
        elif isinstance(pulled, (list, tuple)) or getattr(pulled, "ndim", 0) == 1:
            indices.extend(map(operator.index, pulled))  # type: ignore[call-overload]  # iterable
        else:
            indices.append(operator.index(pulled))  # type: ignore[arg-type]  # TypeError if it is not an index
        starts.append(len(indices))
        if count % 256 == 0 and (time.monotonic() > deadline or len(indices) > LIMIT):
            return None
    array = indices_of(np.array(indices, dtype=np.int64))
    return PredictedEpoch(Division(starts=np.array(starts, dtype=np.int64)), FromArray(array))


class EpochPlan:
    """The samples of one epoch, step by step.

    Construction is cheap. The first use of a plan opens it, which may take long for a later epoch;
    `opened` says whether that is done. `cut` computes some steps in the calling thread (14 M
    shuffled samples: 0.4 s). All methods are thread-safe. A plan that cannot be opened has no
    steps: that costs speed, never a batch.
    """

    def __init__(self, work: Callable[[], PredictedEpoch]) -> None:
        self._work = work
        self._lock = threading.RLock()
        self._predicted: PredictedEpoch | None = None

    def changed(self, change: Callable[[PredictedEpoch], PredictedEpoch]) -> EpochPlan:
        """Return the plan of the same epoch after a change, which is made when it is opened."""
        return EpochPlan(lambda: change(self._opened()))

    @property
    def opened(self) -> bool:
        return self._predicted is not None

    @property
    def stream(self) -> SamplerStream:
        """The samples of all steps, and perhaps more. Only the plan may draw from it."""
        return self._opened().stream

    @property
    def steps(self) -> int:
        predicted = self._opened()
        return predicted.division.steps(predicted.stream.total)

    def reach(self, first: int, samples: int) -> int:
        """Return `last` so that steps [first, last) have about `samples` samples.

        At least one step, and at most up to `steps`.
        """
        division = self._opened().division
        return min(max(division.within(division.start(first) + samples), first + 1), self.steps)

    @property
    def deal(self) -> JobOrder | None:
        """How this epoch is dealt to all ranks of the job; None if the sampler does not tell."""
        division, stream = self._opened()
        return stream.dealt(division)

    def ready(self, step: int) -> bool:
        """Whether steps [0, step) are drawn already, so that computing them is cheap."""
        division, stream = self._opened()
        return stream.ready >= min(division.start(step), stream.total)

    def draw(self) -> None:
        """Draw the whole plan in the cheapest way, so that all steps are ready; may be slow."""
        stream = self.stream
        with contextlib.suppress(Exception):  # `cut` raises it again
            with self._lock:
                stream.need(stream.total - 1)
            if stream.ready < stream.total:
                stream.items(stream.total - 1, stream.total)  # the last one takes all draws

    def cut(self, first: int, last: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return (indices, ends) of steps [first, last), with ends counted from the first of them.

        Step first+i reads `indices[ends[i-1]:ends[i]]`. Do not modify the arrays.

        Raises:
            Exception: the computation fails; a sampler that raises does so again when pulled.
        """
        division, stream = self._opened()
        start, stop = division.start(first), min(division.start(last), stream.total)
        with self._lock:
            stream.need(stop - 1)
        indices = indices_of(stream.items(start, stop))
        return indices, division.ends(first, last, len(indices))

    def same(self, other: EpochPlan) -> bool:
        """Whether both plans have the same batches, by the keys of their streams if both have one.

        Otherwise only the first steps are compared: a difference in a later step is found when that
        step is pulled.
        """
        (division, stream), (division2, stream2) = self._opened(), other._opened()
        if not division.same(division2) or self.steps != other.steps:
            return False
        if stream.key is not None and stream2.key is not None:
            return stream.key == stream2.key
        some = min(self.steps, _COMPARED)
        try:
            (indices, ends), (others, stops) = self.cut(0, some), other.cut(0, some)
            return np.array_equal(indices, others) and np.array_equal(ends, stops)
        except Exception:  # noqa: BLE001  as below
            return False

    def _opened(self) -> PredictedEpoch:
        if self._predicted is not None:
            return self._predicted
        with self._lock:
            if self._predicted is None:
                try:
                    self._predicted = self._work()
                except Exception:  # noqa: BLE001  a sampler that raises does so again when pulled
                    _log.debug("an epoch cannot be predicted", exc_info=True)
                    self._predicted = PredictedEpoch(Division(), Sequential(0))
            return self._predicted


def same_batch(planned: NDArray[np.integer], batch: object) -> bool:
    """Whether the `planned` samples are exactly `batch`, as an order yields it."""
    if isinstance(batch, np.ndarray) and planned.dtype == batch.dtype:
        # Bytes: a seventh of the time of comparing arrays.
        return planned.shape == batch.shape and planned.tobytes() == batch.tobytes()
    try:
        return np.array_equal(planned, np.atleast_1d(np.asarray(batch)))
    except Exception:  # noqa: BLE001  numpy raises anything if it cannot convert it
        return False
