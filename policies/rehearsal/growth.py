"""How a memory grows within an epoch, while data is seen for the first time. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from creel.policies.arrays import Ints, unique
from creel.policies.rehearsal.memory_rows import UNLABELLED, Offered, kept, merged, mixed


class Growth(NamedTuple):
    """What a memory keeps in each block of steps: also the new samples of all blocks before.

    Attributes:
        every: steps of a block.
        kept: what the memory keeps when the epoch begins.
        offered: the uid of the first new sample.
        budget, seed: of the memory.
    """

    every: int
    kept: Offered
    offered: int
    budget: int | None
    seed: int

    def grown(self, held: Offered, items: NDArray[np.integer]) -> Offered:
        """Return what is kept, by ascending uid, once new samples were offered to `held`.

        items: (n,) their numbers, some perhaps offered before.
        """
        uids = self.offered + unique(items.astype(np.int64))
        uids = uids[~np.isin(uids, held.uids, assume_unique=True)]
        classes = np.full(len(uids), UNLABELLED)
        both = merged(held, Offered(uids, classes, mixed(uids, self.seed)))
        return both.take(kept(both, self.budget, self.seed + 1))

    def numbers(self, held: Offered, first_row: int) -> Ints:
        """Return the (m,) numbers of what is kept; those of the memory's rows begin at a number."""
        new = held.uids - self.offered
        rows = first_row + np.searchsorted(self.kept.uids, held.uids)
        return np.where(new >= 0, new, rows)
