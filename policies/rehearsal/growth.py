"""How a memory grows within an epoch, while data is seen for the first time. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from creel.policies.arrays import Ints, unique
from creel.policies.rehearsal.content import UNLABELLED, Offered, kept, merged, mixed


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

    def after(self, items: NDArray[np.integer], first_row: int) -> Ints:
        """Return the (m,) numbers of what is kept after these new samples were offered.

        Those of the memory's rows are `first_row` and up.
        """
        new = unique(items.astype(np.int64))
        uids = self.offered + new
        classes = np.full(len(new), UNLABELLED)
        both = merged(self.kept, Offered(uids, classes, mixed(uids, self.seed)))
        numbers = np.concatenate([first_row + np.arange(len(self.kept.uids)), new])
        return numbers[kept(both, self.budget, self.seed + 1)]
