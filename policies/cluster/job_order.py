"""The order in which all ranks of a job read an epoch, from a few numbers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from creel.policies.arrays import NO_IDS, Ids, Ints
from creel.policies.order.dealing import Dealing
from creel.policies.order.remap import Exchange
from creel.policies.order.torch_random import SHUFFLE_LIMIT, Shuffle, TorchRandom
from creel.policies.rehearsal.replay_passes import Passes

#: Most passes of a memory in an epoch that a daemon draws, 1 ms each, and most rows of these.
_MOST_PASSES, _MOST_ROWS = 2048, 1 << 26
#: `JobOrder.seed` of an order that is not shuffled.
IN_ORDER = -1


def by_rank(order: Ids, world: int) -> list[Ids]:
    """Return what each rank reads of a global order, dealt as by torch's DistributedSampler.

    >>> [ids.tolist() for ids in by_rank(np.array([5, 3, 4, 1], np.int32), 2)]
    [[5, 4], [3, 1]]
    """
    return [order[rank::world] for rank in range(world)]


@dataclass(frozen=True, eq=False)
class SampleObjects:
    """Which object each sample is, where sample i is not object i: of a `Subset`, for example.

    Args:
        objects: (samples,) one object each.
        hashed: `hash_of` the objects, if it is known already.
    """

    objects: Ids
    hashed: blake2b | None = None

    def are(self, samples: int, some: Ints, objects: Ids) -> bool:
        """Return whether there are as many samples, and these (k,) some are these objects."""
        return len(self.objects) == samples and np.array_equal(self.objects[some], objects)

    def __eq__(self, other: object) -> bool:
        """Whether the samples are the same: each rank of a node says them anew."""
        return isinstance(other, SampleObjects) and self.digest == other.digest

    def __hash__(self) -> int:
        return self.digest

    @cached_property
    def digest(self) -> int:
        """63 bits that differ between jobs that read other parts of a dataset."""
        hashed = hash_of(self.objects) if self.hashed is None else self.hashed
        return int.from_bytes(hashed.digest(), "little") >> 1


def hash_of(objects: Ids = NO_IDS) -> blake2b:
    """Return a hash of the objects of samples; `update` it with those of further samples."""
    return blake2b(objects.data, digest_size=8)


class JobReplays(NamedTuple):
    """What all ranks of a job replay in an epoch: rows of a rehearsal memory.

    Args:
        passes: how they share the rows.
        first_step: the number, among all steps of the job, of the epoch's first.
    """

    passes: Passes
    first_step: int

    def sound(self, steps: int, world: int) -> bool:
        """Whether the numbers are possible in an epoch of so many steps and ranks."""
        kept, each, ranks, seed = self.passes
        return (
            0 < kept < SHUFFLE_LIMIT
            and 0 < each < 1 << 31
            and ranks == world
            and each * world * steps < 1 << 31
            and 0 <= seed < 1 << 64
            and 0 <= self.first_step < 1 << 62
        )

    def quick(self, steps: int) -> bool:
        """Whether `rows` takes at most some seconds, and half a gigabyte."""
        drawn = -(-steps // self.passes.steps)
        few = drawn <= _MOST_PASSES and drawn * self.passes.kept <= _MOST_ROWS
        return few and steps * self.passes.step_rows <= _MOST_ROWS

    def rows(self, steps: int) -> Ints:
        """Return the (steps, each * world) rows of the memory that each step replays."""
        passes = self.passes
        return passes.to_all(self.first_step + np.arange(steps), passes.head)


class JobOrder(NamedTuple):
    """One epoch of a job, as torch's `DistributedSampler` deals it to the ranks (`Dealing`).

    The order is a permutation of the samples, with its head repeated or its tail cut off:
    `each * world` items in all. Rows of a rehearsal memory may follow in each step.

    Args:
        samples: number of samples, without the rows of a memory.
        world: number of ranks.
        each: samples per rank.
        batch: samples per step of a rank; the last step may have fewer.
        seed: of the permutation, or IN_ORDER.
        remapped: whether the ranks exchange samples within each step (`remap.Exchange`).
        object_of: the object of each sample, and then of each row of the memory; None: sample i is
            object i.
        replays: the rows in each step; None: the job replays nothing.
    """

    samples: int
    world: int
    each: int
    batch: int
    seed: int
    remapped: bool = False
    object_of: SampleObjects | None = None
    replays: JobReplays | None = None

    def sound(self) -> bool:
        """Whether the numbers are possible."""
        counts = self.samples, self.world, self.each, self.batch
        dealt = self.each * self.world
        return (
            all(0 < n < 1 << 31 for n in counts)
            and dealt <= 2 * max(self.samples, self.world)
            and (self.seed == IN_ORDER or self.samples < SHUFFLE_LIMIT)
            and IN_ORDER <= self.seed < 1 << 63
            and (self.object_of is None or len(self.object_of.objects) == self.numbers)
            and (self.replays is None or self._replays_soundly(self.replays))
        )

    def _replays_soundly(self, replays: JobReplays) -> bool:
        known = self.object_of is not None and not self.remapped
        return known and replays.sound(self.steps, self.world)

    @property
    def quick(self) -> bool:
        """Whether a daemon may compute it: one thread plans for all jobs of a node."""
        return self.replays is None or self.replays.quick(self.steps)

    @property
    def numbers(self) -> int:
        """Number of samples and of rows that are replayed."""
        return self.samples + (0 if self.replays is None else self.replays.passes.kept)

    @property
    def mark(self) -> int:
        """A number by which nodes know this epoch of this job: its seed, if it reads all."""
        return self.seed if self.object_of is None else self.seed ^ self.object_of.digest

    @property
    def steps(self) -> int:
        """Steps of each rank."""
        return -(-self.each // self.batch)

    @property
    def ends(self) -> Ints:
        """(steps,) How many objects each rank has read at the end of each step.

        >>> JobOrder(10, 2, 5, 2, IN_ORDER).ends.tolist()
        [2, 4, 5]
        """
        steps = np.arange(1, self.steps + 1, dtype=np.int64)
        replayed = 0 if self.replays is None else self.replays.passes.each
        return np.minimum(steps * self.batch, self.each) + steps * replayed

    def permutation(self) -> Ids:
        """Return (samples,) objects in order, before its head is repeated or its tail cut off.

        >>> JobOrder(3, 1, 3, 1, IN_ORDER).permutation().tolist()
        [0, 1, 2]
        >>> object_of = SampleObjects(np.array([7, 9, 4], np.int32))
        >>> JobOrder(3, 1, 3, 1, IN_ORDER, object_of=object_of).permutation().tolist()
        [7, 9, 4]
        """
        if self.seed == IN_ORDER:
            order = np.arange(self.samples, dtype=np.int32)
        else:
            order = Shuffle(self.samples, TorchRandom.seeded(self.seed)).all()
        return order if self.object_of is None else self.object_of.objects[order]

    def by_rank(self, node_of: Sequence[int]) -> list[Ids]:
        """Return for each rank (ends[-1],) the objects that it reads, in order.

        Args:
            node_of: (world,) the node of each rank.

        >>> [ids.tolist() for ids in JobOrder(3, 2, 2, 1, IN_ORDER).by_rank([0, 0])]
        [[0, 2], [1, 0]]
        """
        order = self.permutation()
        exchange = Exchange(tuple(node_of), self.batch) if self.remapped else None
        dealing = Dealing(self.samples, self.world, self.each, exchange=exchange)
        dealt = dealing.to_all(lambda k: order[:k], 0, self.each)
        new = by_rank(dealt.astype(np.int32, copy=False), self.world)
        return new if self.replays is None else self._replayed(new, self.replays)

    def _replayed(self, new: list[Ids], replays: JobReplays) -> list[Ids]:
        """Return what each rank reads, with the rows of each step behind its new samples."""
        assert self.object_of is not None  # noqa: S101  `sound`
        rows, each = self.samples + replays.rows(self.steps), replays.passes.each
        at = np.minimum(np.arange(1, self.steps + 1) * self.batch, self.each).repeat(each)
        of_rank = [np.sort(rows[:, rank :: self.world], axis=1) for rank in range(self.world)]
        objects = self.object_of.objects
        return [
            np.insert(ids, at, objects[mine.ravel()])
            for ids, mine in zip(new, of_rank, strict=True)
        ]

    def after(self, other: JobOrder, epochs: int) -> JobOrder:
        """Return the order `epochs` later, if seeds go on as from the previous order `other`.

        >>> JobOrder(3, 1, 3, 1, 8).after(JobOrder(3, 1, 3, 1, 7), 2).seed
        10
        """
        if IN_ORDER in {self.seed, other.seed}:
            return self
        return self._replace(seed=max(self.seed + epochs * (self.seed - other.seed), 0))
