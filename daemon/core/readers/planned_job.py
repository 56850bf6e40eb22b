"""Answers an eviction policy's questions about the job whose epochs it plans. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from creel.daemon.core.admission import Admission
from creel.daemon.core.disk.copies import most_writing, object_nbytes
from creel.daemon.core.readers.sessions import JobGroup
from creel.daemon.core.residency import Residency
from creel.policies.arrays import Ints
from creel.policies.cluster.placement import dataset_nbytes
from creel.policies.prefetch import Window

#: Steps in which a rounded mean length doubles: coarse, so that nodes rarely get different ones.
_PARTS = 16


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A job as an eviction policy sees it; implements `eviction.context.PlanningContext`."""

    residency: Residency
    group: JobGroup
    admission: Admission
    window: Window

    @property
    def known(self) -> int:
        return self.group.known()

    @property
    def clock(self) -> int:
        return self.group.clock()

    @property
    def capacity(self) -> int:
        """Bytes of this dataset's share of memory and disk."""
        residency = self.residency
        share = min(int(self.admission.share(residency)), residency.space.usable)
        if not residency.disk.refused:
            share += self.admission.disk.capacity(
                self.admission.fraction(residency), residency.mean
            )
        pool = self.residency.pool
        return share // pool.record * pool.record if pool.same_size else share

    def capacities(self, memory: Ints, disk: Ints) -> Ints:
        """Return (nodes,) bytes of this dataset that memory and disk of each node can hold."""
        size = self.agreed_size
        mean = dataset_nbytes(size, len(self.residency)) / max(len(self.residency), 1)
        disks = zip(memory.tolist(), disk.tolist(), strict=True)
        return np.array(
            [m + object_nbytes(d, unit, most_writing(m), mean) for m, (d, unit) in disks], np.int64
        )

    @property
    def nbytes(self) -> float:
        return self.residency.nbytes

    @property
    def size(self) -> Ints:
        pool = self.residency.pool
        return np.array([pool.record]) if pool.same_size else self.residency.length

    @property
    def agreed_size(self) -> Ints:
        residency = self.residency
        if residency.pool.same_size:
            return np.array([residency.pool.record])
        return (
            residency.length
            if residency.listed is None
            else np.array([_rounded_up(residency.mean)])
        )

    @property
    def page(self) -> int:
        return self.residency.pool.page

    @property
    def lead(self) -> tuple[int, int]:
        paces = [s.pace for s in self.group.sessions.values()]
        latency_s = self.residency.latency.seconds
        steps = max((p.horizon(latency_s, self.window) for p in paces), default=0)
        return max((p.min_ahead for p in paces), default=0), steps

    def orders(self, epoch: int) -> list[list[NDArray[np.int32]]]:
        return self.group.orders(epoch)


def _rounded_up(mean: float) -> int:
    """Round a mean length up so that all nodes get the same, though each has seen other objects.

    >>> _rounded_up(110_000.0) == _rounded_up(109_000.0)
    True
    """
    return math.ceil(2 ** (math.ceil(_PARTS * math.log2(max(mean, 1.0))) / _PARTS))


def clocks(groups: list[JobGroup]) -> list[tuple[float, float]]:
    """Return the (rate, offset) that map each group's steps to the clock of the first group."""
    lead = groups[0]
    out = []
    for group in groups:
        ours, theirs = lead.step_s(), group.step_s()
        rate = theirs / ours if ours and theirs else 1.0
        out.append((rate, lead.clock() - rate * group.clock()))
    return out
