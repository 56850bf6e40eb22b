"""Which rows of a rehearsal memory each step replays. Pure.

A *pass* is a permutation of all rows, as `torch.randperm` draws it. Consecutive steps of the job
take consecutive rows of it, so that no row is repeated before all have been replayed, except for
the few that are left over at the end of a pass. A step's rows depend on its number alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from creel.policies.arrays import Ints, unique
from creel.policies.order.torch_random import Shuffle, TorchRandom
from creel.policies.rehearsal.memory_rows import mixed

#: Returns at least the first k entries of a pass: `head(number, k)`.
Head = Callable[[int, int], NDArray[np.integer]]


class Passes(NamedTuple):
    """How the rows of a memory are dealt to the steps of a job, and to its ranks.

    Row i of a step goes to rank i % world. So jobs of other numbers of ranks replay the same rows
    in each step, if each step replays as many.

    Attributes:
        kept: rows of the memory, at least 1.
        each: rows that a rank replays in a step.
        world: number of ranks.
        seed: of the permutations.
    """

    kept: int
    each: int
    world: int
    seed: int

    @property
    def step_rows(self) -> int:
        """Rows that all ranks replay in a step."""
        return self.each * self.world

    @property
    def steps(self) -> int:
        """Steps of a pass. The rows that do not fill another step are left over."""
        return max(self.kept // self.step_rows, 1)

    def seed_of(self, number: int) -> int:
        """Return the seed of torch's generator for a pass, which is `torch.randperm(kept)`."""
        return int(mixed(np.array([number]), self.seed)[0]) & 0xFFFFFFFF

    def head(self, number: int, k: int) -> NDArray[np.integer]:  # noqa: ARG002  all of them
        """Return the (kept,) rows of a pass, in order, where there is no torch: in a daemon."""
        return Shuffle(self.kept, TorchRandom.seeded(self.seed_of(number))).all()

    def to_all(self, steps: Ints, head: Head) -> Ints:
        """Return the (k, each * world) rows that each of (k,) steps of the job replays.

        Rows of one step are distinct, unless the memory has fewer: all are then repeated equally
        often, give or take one.
        """
        many, rows = self.step_rows, np.empty((len(steps), self.step_rows), np.int64)
        numbers, slots = np.divmod(steps, self.steps)
        for number in unique(numbers):
            mine = numbers == number
            slot = slots[mine]
            entries = min((int(slot.max()) + 1) * many, self.kept)
            numbered = head(int(number), entries)[:entries]
            if entries < many:
                numbered = np.resize(numbered, many)
            rows[mine] = numbered[: len(numbered) // many * many].reshape(-1, many)[slot]
        return rows

    def to_rank(self, rank: int, steps: Ints, head: Head) -> Ints:
        """Return the (k, each) rows that a rank replays in each of (k,) steps of the job.

        Those of a step are ascending, so that samples of one dataset follow one another.
        """
        return np.sort(self.to_all(steps, head)[:, rank :: self.world], axis=1)
