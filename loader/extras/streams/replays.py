"""StreamReplays: what the batches of one rank replay of its stream, and what must stay for that.

The memory takes in all records that the ranks were dealt in each block of `every` steps, as it does
with any data that is seen once (`policies/rehearsal/growth.py`). It is a function of the steps'
records, so of the log alone. What has left it never returns: a log needs to keep what it holds, and
for the time that `keep` bytes take, in which a job may resume at an earlier place, what it held.
"""

from __future__ import annotations

import base64
import logging
import zlib
from typing import TypedDict

import numpy as np

from creel.errors import ConfigError, SourceNotFoundError
from creel.loader.line.order.rehearsing import Content, EpochStart, Replays
from creel.policies.arrays import Ints, unique
from creel.policies.rehearsal.growth import Growth
from creel.policies.rehearsal.replay_passes import Passes
from creel.streams.log import ABSENT, Log
from creel.streams.memories import Needed

_log = logging.getLogger("creel.stream")

#: Batches whose places are remembered, for a caller that runs ahead of what it saves.
PLACES = 4096
#: Blocks whose memories are remembered for that at most, 8 bytes for each record of them.
_BLOCKS = 256
#: Above the number of any record: a stream's memory has no rows of other datasets.
_NO_RECORD = 1 << 62


class SavedMemory(TypedDict):
    """A memory in a saved place: 2 bytes for each record that it holds, or less."""

    memory: str  # `Content.digest`
    step: int
    held: str  # when the step's block began
    seen: str  # what it would take in of this block's records up to the step


class StreamReplays:
    """The replays of one epoch.

    Attributes:
        step: the next one.
    """

    def __init__(
        self, content: Content, rank: int, world: int, chunk: int, saved: SavedMemory | None
    ) -> None:
        """Begin at a step.

        Args:
            content: of the memory.
            rank, world: of this process.
            chunk: the first one that is not dealt completely.
            saved: the memory at this place; None: at the beginning.
        """
        self._growth, self._digest = growth_of(content), content.digest
        self._rows_each = content.per_batch * world
        self.step = saved["step"] if saved else 0
        held, seen = (_decoded(saved[key] if saved else "") for key in ("held", "seen"))
        block = self._block(self.step)
        self._held = {block: held}  # records, when the block began
        self._new = {block: [(self.step, seen)]}  # the step behind them, and records
        self._chunks = {block: chunk}
        self._left: list[tuple[int, Ints]] = [(block, seen)]  # block, and what left before it
        self._needed_block = -1
        passes = Passes(0, content.per_batch, world, content.seed)
        self._rows = Replays(passes, rank, EpochStart(0, True), _NO_RECORD, self._growth)
        self._rows.new_items = lambda _, stop: self._held[self._block(stop)]

    def _block(self, step: int) -> int:
        return step // self._growth.every

    def joined(self, batch: list[int], records: Ints, chunk: int) -> list[int]:
        """Return a batch with the rows of its step, and go on to the next step.

        Args:
            batch: this rank's new records.
            records: those of all ranks.
            chunk: the first one that was not dealt completely before this step.
        """
        block = self._block(self.step)
        if block not in self._held:
            before, now = self._held[block - 1], self._grown(block - 1, self.step)
            self._held[block], self._new[block], self._chunks[block] = now, [], chunk
            if not len(before) and len(now) < self._rows_each:
                text = "a step replays %d rows of a memory of %d: it repeats them"
                _log.warning(text, self._rows_each, len(now))
            self._drop_before(block - min(PLACES // self._growth.every + 2, _BLOCKS))
        joined: list[int] = self._rows.joined(batch, self.step)
        self.step += 1
        self._new[block].append((self.step, records))
        return joined

    def _seen(self, block: int, step: int) -> Ints:
        """Return the records of a block's steps before a step."""
        parts = [records for stop, records in self._new[block] if stop <= step]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def _grown(self, block: int, step: int) -> Ints:
        """Return what is held once a block's records before a step were offered."""
        offered = np.concatenate([self._held[block], self._seen(block, step)])
        return self._growth.grown(self._growth.kept, offered).uids

    def state(self, step: int) -> SavedMemory:
        """Return the memory before a step.

        Raises:
            ConfigError: the step is long past.
        """
        block = self._block(step)
        last = block if block in self._held else block - 1  # the block has not begun
        if last not in self._held:
            raise ConfigError(f"step {step} is not one of the last {_BLOCKS} blocks (every=)")
        then = self._grown(last, step)
        held = self._held[last] if last == block else then
        seen = np.setdiff1d(then, held, assume_unique=True)
        return SavedMemory(memory=self._digest, step=step, held=_encoded(held), seen=_encoded(seen))

    def _drop_before(self, first: int) -> None:
        """Forget the blocks before one, but none that training may not have begun."""
        if self._needed_block >= 0:
            first = min(first, self._needed_block)
        for block in [number for number in self._held if number < first]:
            del self._held[block], self._new[block], self._chunks[block]

    # --- what the log must keep -----------------------------------------------------------------

    def needed(self, step: int, keep_steps: int) -> Needed | None:
        """Return what must stay once training has the batches below a step; None if as before.

        keep_steps: so much earlier a job may resume.
        """
        block, old = min(self._block(step), max(self._held)), self._needed_block
        if block == old:
            return None
        for number in range(old + 1, block + 1) if old >= 0 else ():
            left = np.setdiff1d(self._held[number - 1], self._held[number], assume_unique=True)
            self._left.append((number, left))
        self._needed_block = block
        every = self._growth.every
        self._left = [(b, left) for b, left in self._left if (block - b) * every <= keep_steps]
        parts = [self._held[block], *(left for _, left in self._left)]
        return Needed(self._chunks[block], unique(np.concatenate(parts)))

    def check(self, log: Log, there: Needed) -> None:
        """Check that a log has all that is held now; `there`: what producers knew to be needed.

        Raises:
            SourceNotFoundError: it was deleted.
        """
        block = self._block(self.step)
        mine = np.union1d(self._held[block], self._seen(block, self.step))
        self._left.append((block, there.samples))  # a job may resume at an even earlier place
        doubtful = np.setdiff1d(mine, there.samples) // log.about.records
        for chunk in np.unique(doubtful).tolist():
            if log.size(chunk) == ABSENT:
                raise SourceNotFoundError(
                    2,
                    f"the memory has records of chunk {chunk}, which was deleted: let producers"
                    " keep more than is produced between two checkpoints (keep=)",
                    log.path,
                )


def growth_of(content: Content) -> Growth:
    """Return how a stream's memory grows; raises ConfigError as `StreamBatches.rehearsing`."""
    if content.growth is None:
        raise ConfigError("a stream is rehearsed as it arrives: give Rehearsal(..., every=64)")
    if content.kept or content.growth.offered:
        raise ConfigError("a stream's memory begins empty: samples were added to this one")
    if content.growth.budget is None:
        raise ConfigError("a stream may be endless: give the memory a budget=")
    return content.growth


def _encoded(numbers: Ints) -> str:
    steps = np.diff(numbers, prepend=0).astype("<i8")
    return base64.b64encode(zlib.compress(steps.tobytes(), 9)).decode() if len(steps) else ""


def _decoded(text: str) -> Ints:
    """Return what `_encoded` was given.

    Raises:
        ConfigError: it is something else.
    """
    try:
        steps = np.frombuffer(zlib.decompress(base64.b64decode(text)) if text else b"", "<i8")
    except (ValueError, zlib.error) as e:
        raise ConfigError(f"the saved memory is damaged: {e}") from e
    return np.cumsum(steps.astype(np.int64))
