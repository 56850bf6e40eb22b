"""Task: what is asked of whoever makes a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np

from creel.loader.client.claim import Claim

#: In place of the number of a part: the whole batch.
WHOLE = -1


class BatchSeeds(NamedTuple):
    """What the seeds of a batch's samples come from, beside their numbers.

    Attributes:
        epoch: seed of the epoch.
        batch: its number in the epoch.
        repeats: whether the epoch may read a sample twice, which then differs.
    """

    epoch: int
    batch: int
    repeats: bool


class Task(msgspec.Struct, frozen=True):
    """A batch to be made, or a part of one. Built in C: one is made for each batch.

    Attributes:
        tag: of the iterator's epoch.
        batch: its number among those that are not skipped.
        index: what the sampler yielded, for a part its samples alone.
        claim: how the whole batch is read.
        as_list: whether the index is an array that the dataset sees as a list of ints.
        seeds: of its samples; None: they have torch's.
        part: its number; WHOLE: all of the batch.
        first: the first row of the part in the batch.
    """

    tag: int
    batch: int
    index: Any
    claim: Claim
    as_list: bool = False
    seeds: BatchSeeds | None = None
    part: int = WHOLE
    first: int = 0

    def message(self, freed: Sequence[int] = ()) -> tuple[object, ...]:
        """Return what a worker is sent; `freed`: slots that it may use again."""
        index = self.index
        if self.as_list:  # bytes pickle in a fifth of the time of an array
            index = np.asarray(index, np.int64).tobytes()
        claim = self.claim.step, self.claim.ids.tobytes()
        others = self.as_list, self.seeds, self.part, self.first
        return ("task", list(freed), self.tag, self.batch, index, claim, *others)

    @classmethod
    def received(cls, message: tuple[object, ...]) -> Task:
        """Return the task of a `message`."""
        tag, batch, index, claim, *others = cast("tuple[Any, ...]", message[2:])
        index = np.frombuffer(index, np.int64) if others[0] else index
        return cls(tag, batch, index, Claim(claim[0], np.frombuffer(claim[1], np.int32)), *others)
