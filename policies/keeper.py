"""What all keepers share: the objects' state, and the last resort. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from creel.policies.pools import Index
from creel.policies.uses import NEVER, Uses

# An object's life. All below FETCHING are not on their way; an OVERDUE one is, but nobody waits for
# it any more.
ABSENT, FAILED, FETCHING, RESIDENT, OVERDUE = range(5)

NOBODY = np.empty(0, np.intp)


@dataclass(frozen=True)
class Need:
    """Who wants room: epoch and step (on the keeper's clock) of the first object to be fetched."""

    epoch: int
    step: int


def joined(parts: list[Index]) -> Index:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else NOBODY


class Keeper:
    """What all keepers share: the objects' state, and the last resort.

    Args:
        life: (n,) ABSENT, FAILED, FETCHING or RESIDENT; pins: (n,); both live views, read only.
        uses: the next uses by each job that reads the dataset.
    """

    #: Set when residents may be in no list though they could leave; cleared by `relist`.
    stale = True

    def __init__(self, life: NDArray[np.uint8], pins: NDArray[np.int32], uses: list[Uses]) -> None:
        self._life = life
        self._pins = pins
        self.all_uses = uses

    def released(self, ids: Index) -> None:
        """Nobody has pinned these residents any more (an object may come twice)."""
        raise NotImplementedError

    def victims(self, k: int, need: Need) -> Index:
        """Up to k distinct objects to evict for `need`; they are in no list after this."""
        raise NotImplementedError

    def relist(self) -> None:
        """Sort all residents anew: plans have changed."""
        raise NotImplementedError

    def last(self, k: int, need: Need) -> Index:
        """Up to k objects nobody has pinned, farthest use first: for those who stall, L1 or not."""
        ids = self._unpinned()
        due = np.full(len(ids), NEVER, np.int32)
        for uses in self.all_uses:
            due = np.minimum(due, uses.due[ids])
        if len(ids) > k:
            best = np.argpartition(due, len(ids) - k)[len(ids) - k :]
            ids, due = ids[best], due[best]
        return ids[due > need.step] if len(self.all_uses) == 1 else ids

    def dispensable(self, ids: Index, need: Need) -> NDArray[np.bool_]:  # noqa: ARG002
        """(k,) which of these may leave for `need` as well as any other that may."""
        return np.zeros(len(ids), np.bool_)

    #: Whether `fitting` finds victims by their room.
    fits = False

    def fitting(self, wants: NDArray[np.int64], need: Need) -> Index:
        """(k,) distinct objects to evict, each with as much room as is wanted, or -1.

        wants: (k,) bytes, the most urgent first.
        """
        raise NotImplementedError

    def at(self, uses: Uses, step: int) -> int:  # noqa: ARG002  (one job: its own clock)
        """A job's step on the clock of `Need.step`."""
        return step

    def _unpinned(self) -> Index:
        return np.flatnonzero((self._life == RESIDENT) & (self._pins == 0))

    def _leaving(self, ids: Index) -> NDArray[np.bool_]:
        may: NDArray[np.bool_] = (self._life[ids] == RESIDENT) & (self._pins[ids] == 0)
        return may
