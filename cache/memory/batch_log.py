"""The flight recorder: the last batches of a session, in its shared words.

The trainer writes a row when it returns a batch (`EpochRun.deliver`); anyone who maps the words may
read the rows at any time, without asking it. A row has eight words of 8 bytes, in the order of the
fields of `BatchRow`. Row k of the ring holds the batches whose number is k modulo ROWS. The word
RECORDED says how many batches were recorded so far: it is written after their rows.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

#: The words of a session that come before the ring, and its rows.
HEAD_NBYTES = 4096
ROWS = 960
#: Batches recorded so far. Of the words that the trainer writes; see `shared_words`.
RECORDED = 66
_ROW = struct.Struct("=8q")
NBYTES = HEAD_NBYTES + ROWS * _ROW.size


class BatchRow(NamedTuple):
    """One batch. All times are ns of the monotonic clock, which the processes of a node share.

    Attributes:
        step: number of the batch among those of its session that were recorded, from 0 on.
        began: when whoever made the batch began with it; 0, like the next three, if that is not
            known.
        ready: when its objects were there, and reading and decoding began.
        collating: when its samples were there, and collation began.
        packed: when it was made. It then waited for the trainer.
        wait_began: when the trainer began to wait for it. All that the trainer waited since the
            last batch counts, the sampler's draws included: the sum of the rows is that of the
            counters of `stall`.
        taken: when the trainer got it.
        worker: who made it: the number of a worker, or of a torch worker that a thread of the
            trainer stands for; -1: the trainer itself.
    """

    step: int
    began: int
    ready: int
    collating: int
    packed: int
    wait_began: int
    taken: int
    worker: int


#: Columns of `BatchLog.table`.
PACKED, WAIT_BEGAN, TAKEN = map(BatchRow._fields.index, ("packed", "wait_began", "taken"))


def columns(rows: Sequence[Sequence[int]]) -> dict[str, NDArray[np.int64]]:
    """Return recorded batches as (k,) arrays by the names of the fields of `BatchRow`."""
    table = np.array(rows, np.int64).reshape(-1, len(BatchRow._fields))
    return dict(zip(BatchRow._fields, table.T, strict=True))


class BatchLog:
    """The rows of one session."""

    def __init__(self, words: memoryview) -> None:
        """`words`: all of the session's, as int64."""
        self._words = words
        self._bytes = words.cast("B")

    def add(
        self,
        began: int,
        ready: int,
        collating: int,
        packed: int,
        wait_began: int,
        taken: int,
        worker: int,
    ) -> None:
        """Record a batch: the fields of `BatchRow` without its step. The trainer alone calls it."""
        step = self._words[RECORDED]
        at = HEAD_NBYTES + step % ROWS * _ROW.size
        _ROW.pack_into(
            self._bytes, at, step, began, ready, collating, packed, wait_began, taken, worker
        )
        self._words[RECORDED] = step + 1

    def table(self, since: int = 0) -> NDArray[np.int64]:
        """Return the recorded batches from step `since` on, as far as they are there, in order.

        (k, 8), columns in the order of the fields of `BatchRow`. The row that the trainer may be
        writing at the moment is left out: ROWS - 1 at most. Clients may write anything, so a row
        may have any values but a wrong step.
        """
        end = self._words[RECORDED]
        first = max(since, end - ROWS, 0)
        steps = np.arange(first, max(min(end, first + ROWS), first), dtype=np.int64)
        copy = np.frombuffer(bytes(self._bytes[HEAD_NBYTES:]), np.int64).reshape(ROWS, -1)
        rows: NDArray[np.int64] = copy[steps % ROWS]
        least = max(self._words[RECORDED] - ROWS + 1, 0)
        whole: NDArray[np.bool_] = (rows[:, 0] == steps) & (steps >= least)
        return np.asarray(rows[whole])

    def rows(self, since: int = 0) -> list[BatchRow]:
        """Return the same as `table`, row by row."""
        return [BatchRow._make(row) for row in self.table(since).tolist()]

    def close(self) -> None:
        """Let go of the words."""
        self._bytes.release()
