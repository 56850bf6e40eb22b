"""Replays: which rows of a rehearsal memory one rank replays in the steps of an epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from creel.loader.line.order.generators import Permutation, permutation, seeded
from creel.policies.arrays import Ints, unique
from creel.policies.rehearsal.growth import Growth
from creel.policies.rehearsal.memory_rows import Offered, mixed
from creel.policies.rehearsal.replay_passes import Passes

#: Returns the new samples of all ranks in steps [start, stop) of an epoch.
NewItems: TypeAlias = "Callable[[int, int], NDArray[np.integer]]"

#: Steps whose rows are computed at once: a call for one takes 34 us.
_AT_ONCE = 64
_NO_STEP = 1 << 62  # above the number of any step


class EpochStart(NamedTuple):
    """Where an epoch with a rehearsal begins.

    Attributes:
        step: the number, among all steps of the job, of the epoch's first.
        grows: whether the memory grows in it.
    """

    step: int
    grows: bool


class Content(NamedTuple):
    """What batches need to know of a memory.

    Attributes:
        kept: number of rows.
        per_batch: rows that a batch replays.
        seed: of the order in which they are replayed.
        digest: equal for equal rows in an equal order.
        growth: None: it stays as it is.
    """

    kept: int
    per_batch: int
    seed: int
    digest: str
    growth: Growth | None = None


class _Block(NamedTuple):
    """What is replayed in `every` steps of an epoch in which the memory grows.

    Attributes:
        number: of the block in the epoch.
        held: what the memory keeps.
        numbers: (m,) of `held`, in the rehearsed dataset.
        passes: how all ranks share them.
    """

    number: int
    held: Offered
    numbers: Ints
    passes: Passes


class Replays:
    """The rows that one rank replays in the steps of one epoch. Thread-safe.

    Attributes:
        passes: how all ranks share the rows.
        start: where the epoch begins.
        bare: earlier steps of the epoch replay nothing.
        growth: of the memory in this epoch.
        steps: of the epoch, once it has begun.
        new_items: if the memory grows: by what. Set by who knows the epoch's order.
    """

    new_items: NewItems

    def __init__(
        self,
        passes: Passes,
        rank: int,
        start: EpochStart,
        first_row: int,
        growth: Growth | None = None,
    ) -> None:
        """Make the rows of an epoch.

        Args:
            first_row: the number of the memory's first row in the rehearsed dataset.
            growth: of the memory in this epoch; None: it stays as it is.
        """
        self.passes, self._rank, self._first_row = passes, rank, first_row
        self.start, self.growth, self.steps = start, growth, _NO_STEP
        self.bare = 0 if passes.kept else _NO_STEP if growth is None else growth.every
        self.key = ("replays", passes, rank, start, first_row)  # equal for equal replays
        #: Of the latest pass: its number and permutation.
        self._drawn: dict[Passes, tuple[int, Permutation]] = {}
        self._last: _Block | None = None  # the block that was asked for last
        #: (first step, its rows).
        self._computed: tuple[int, Ints] = (0, np.empty((0, passes.each), np.int64))

    def rows(self, steps: Ints) -> Ints:
        """Return the (k, each) numbers of the rows in (k,) steps, none of them below `bare`."""
        if self.growth is None:
            rows = self.passes.to_rank(self._rank, self.start.step + steps, self._head(self.passes))
            return rows + self._first_row
        rows = np.empty((len(steps), self.passes.each), np.int64)
        blocks, inside = np.divmod(steps, self.growth.every)
        for block in unique(blocks):
            mine = blocks == block
            memory = self._block(int(block), self.growth)
            places = memory.passes.to_rank(self._rank, inside[mine], self._head(memory.passes))
            rows[mine] = np.sort(memory.numbers[places], axis=1)  # the memory's rows come last
        return rows

    def joined(self, batch: Any, step: int) -> Any:
        """Return a batch with the rows of its step: an array, if it is one, or else a list.

        Raises:
            IndexError: it has a sample beyond the new data, where the memory's rows are.
        """
        if step < self.bare:
            return batch
        rows = self._rows_of(step)
        if isinstance(batch, np.ndarray):
            self._check(int(batch.max(initial=-1)))
            return np.concatenate([batch, rows])
        self._check(max((i for i in batch if type(i) is int), default=-1))
        return [*batch, *rows.tolist()]

    def _check(self, largest: int) -> None:
        if self.passes.kept and largest >= self._first_row:
            raise IndexError(f"sample {largest}: the dataset has {self._first_row}")

    def _rows_of(self, step: int) -> Ints:
        """Return the (each,) rows of one step; computed for some steps at once."""
        first, rows = self._computed
        if not first <= step < first + len(rows):
            stop = max(min(step + _AT_ONCE, self.steps), step + 1)
            if self.growth is not None:  # what is new in this block is not known yet
                stop = min(stop, (step // self.growth.every + 1) * self.growth.every)
            first, rows = self._computed = step, self.rows(np.arange(step, stop))
        row: Ints = rows[step - first]
        return row

    def _block(self, number: int, growth: Growth) -> _Block:
        """Return what is replayed in a block of steps; from the block before it in little time."""
        last = self._last
        if last is not None and last.number == number:
            return last
        begun, held = 0, growth.kept
        if last is not None and last.number < number:
            begun, held = last.number, last.held
        held = growth.grown(held, self.new_items(begun * growth.every, number * growth.every))
        seed = int(mixed(np.array([number]), self.passes.seed)[0])
        passes = self.passes._replace(kept=len(held.uids), seed=seed)
        self._last = _Block(number, held, growth.numbers(held, self._first_row), passes)
        return self._last

    def _head(self, passes: Passes) -> Callable[[int, int], NDArray[np.integer]]:
        def head(number: int, k: int) -> NDArray[np.integer]:
            at, drawn = self._drawn.get(passes, (-1, None))
            if drawn is None or at != number:
                drawn = permutation(passes.kept, seeded(passes.seed_of(number)))
                self._drawn = {passes: (number, drawn)}
            return drawn.first(k)

        return head
