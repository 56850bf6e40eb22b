"""Seeds per sample (`seeding="sample"`): the same random augmentation whoever reads a sample.

`Seeded` stands between a fetcher and the dataset. Before each sample it seeds the generators of
`random`, NumPy and torch of this process from the epoch's seed and the sample's number. So a
sample depends neither on which worker reads it, nor on what that worker has read before.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash
from torch.utils.data import Dataset, default_collate, default_convert

from creel.loader.data.binding.tree import reads_singly
from creel.loader.making.generators import restored_generators, seed_here
from creel.loader.making.stage import Collate, Make, Stage
from creel.loader.making.task import BatchSeeds, Task

if TYPE_CHECKING:
    from creel.loader.client.session import Session
    from creel.loader.data.binding.bind import Gather

_MASK = (1 << 64) - 1
#: In place of a sample's number: of what has none, and of a batch.
_NO_NUMBER, _BATCH = -1, -2


class EpochSeeds:
    """The seeds of one iterator's epochs.

    Attributes:
        seed: of this epoch; None before the first.
    """

    def __init__(self) -> None:
        self.seed: int | None = None
        self._repeats = False

    def begin(self, seed: int, *, repeats: bool, before: int | None = None) -> None:
        """Begin an epoch.

        Args:
            seed: torch's base seed, or that of the epoch that is resumed.
            repeats: whether the epoch may read a sample twice.
            before: seed of the epoch before, if torch draws no new one for this epoch.
        """
        self.seed = seed if before is None else next_epoch(before)
        self._repeats = repeats

    def of(self, batch: int) -> BatchSeeds:
        """Return the seeds of a batch by its number in the epoch."""
        return BatchSeeds(self.seed or 0, batch, self._repeats)


class Numbered(NamedTuple):
    """What a sampler yielded for a batch, and the seeds of the batch."""

    index: Any
    seeds: BatchSeeds


def next_epoch(seed: int) -> int:
    """Return the seed of the epoch after that of `seed`, if torch draws no new base seed for it.

    >>> next_epoch(7)
    9324454920402081455
    """
    return xxhash.xxh3_64_intdigest(struct.pack("<Q", seed & _MASK))


def sample_seed(epoch: int, number: int, batch: int = 0, place: int = 0) -> int:
    """Return a sample's seed, of 64 bits.

    Args:
        epoch: seed of the epoch.
        number: of the sample in its dataset.
        batch, place: of the sample in an epoch that may read it twice, else 0.

    >>> sample_seed(7, 0) == sample_seed(7, 0), sample_seed(7, 0) == sample_seed(7, 1)
    (True, False)
    """
    return xxhash.xxh3_64_intdigest(
        struct.pack("<4Q", epoch & _MASK, number & _MASK, batch & _MASK, place & _MASK)
    )


class Seeded(Dataset[Any]):
    """A dataset before each of whose samples the generators are seeded.

    A batch that its own `__getitems__` reads is seeded once, by the batch's number.
    """

    def __init__(self, dataset: Any) -> None:
        """`begin` must be called before each batch, unless its index is `Numbered`."""
        self.dataset = dataset
        self._seeds = BatchSeeds(0, 0, False)
        self._first = 0

    def begin(self, seeds: BatchSeeds, first: int = 0) -> None:
        """Set what the seeds of the next batch come from, or of a part from its row `first` on."""
        self._seeds, self._first = seeds, first

    def begin_sample(self, place: int) -> None:
        """Set the place in its batch of the next sample that is read alone."""
        self._first = place

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        index = self._begun(index)
        self._seed(index, self._first)
        return self.dataset[index]

    def __getitems__(self, indices: Any) -> Any:
        indices = self._begun(indices)
        if not reads_singly(self.dataset):
            self.seed_batch()
            return self.dataset.__getitems__(indices)
        samples = []
        for place, index in enumerate(indices, self._first):
            self._seed(index, place)
            samples.append(self.dataset[index])
        return samples

    def _begun(self, index: Any) -> Any:
        if type(index) is Numbered:
            self.begin(index.seeds)
            return index.index
        return index

    def _seed(self, index: Any, place: int) -> None:
        seeds, number = self._seeds, _number(index)
        if seeds.repeats or number == _NO_NUMBER:
            seed_here(sample_seed(seeds.epoch, number, seeds.batch, place))
        else:
            seed_here(sample_seed(seeds.epoch, number))

    def seed_batch(self) -> None:
        """Seed the generators for code that takes the whole batch."""
        seed_here(sample_seed(self._seeds.epoch, _BATCH, self._seeds.batch))

    def collating(self, collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return `collate`, if it is the user's one that seeds first; torch's own draw nothing."""
        torchs = collate is default_collate or collate is default_convert
        return collate if torchs else SeededCollate(self, collate)


class SeededCollate:
    """A user's collate_fn before which the generators are seeded, by the batch's number."""

    def __init__(self, seeded: Seeded, collate: Callable[[Any], Any]) -> None:
        self._seeded = seeded
        self._collate = collate

    def __call__(self, samples: Sequence[Any]) -> Any:
        self._seeded.seed_batch()
        return self._collate(samples)


class Seeding(Stage):
    """Seeds each sample by its number, and a person's collation by the batch's."""

    in_parts = True

    def __init__(self) -> None:
        self._seeded = Seeded(None)

    def inside(self, dataset: Any, collate: Collate) -> tuple[Any, Collate]:
        self._seeded = Seeded(dataset)
        return self._seeded, self._seeded.collating(collate)

    def begin(self, task: Task) -> None:
        if task.seeds is not None:
            self._seeded.begin(task.seeds, task.first)

    def gathers(self, gather: Gather) -> bool:
        return not gather.has_code

    def in_trainer(self, make: Make) -> Make:
        def restoring(task: Task, session: Session | None) -> Any:
            with restored_generators():  # the trainer's own stay as they are
                return make(task, session)

        return restoring


def _number(index: Any) -> int:
    """Return the index as a sample's number; `_NO_NUMBER` if it is another key."""
    try:
        number = int(index.__index__())
    except (AttributeError, TypeError, ValueError):
        return _NO_NUMBER
    return number if number >= 0 else _NO_NUMBER
