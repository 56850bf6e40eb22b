"""Samples that cannot be read: left out or replaced if the user asks for it (`on_error`).

`Tolerant` stands between a fetcher and the dataset. The number of a bad sample alone determines the
sample that replaces it. So all ranks, all epochs and a resumed run choose the same one without
communication, if they find the same samples bad. Where samples have no numbers, or their dataset no
length, a sample of the same batch replaces it; in a stream, a record of the batch, or of one of the
batch's chunks. Only exceptions of the dataset count, not those of
collation.
"""

from __future__ import annotations

import operator
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice
from typing import Any, Literal, TypeAlias

import xxhash
from torch.utils.data import Dataset, IterableDataset

from creel.errors import ConfigError, TooManyBadSamplesError
from creel.loader.data.rehearsed import span_of
from creel.loader.data.user_code.values import check_choice, check_whole

OnError = Literal["raise", "skip", "substitute"]
#: A sample's number, or its key as text.
Key: TypeAlias = "int | str"
#: How many samples are tried in place of a bad one.
_MAX_REPLACEMENTS = 100
_LONGEST_REASON = 300
#: The attribute of an exception that `note_path` sets.
_PATH = "_creel_path"
#: Stands for a skipped sample until its batch is collated.
_SKIPPED = object()


@dataclass(frozen=True, slots=True)
class BadSample:
    """A sample whose read raised: which, the reason, the file it opened last ("": unknown)."""

    index: Key
    reason: str
    path: str = ""


@dataclass
class Tolerance:
    """How bad samples are handled, and which are known; pickled to workers.

    Args:
        on_error: "skip" leaves a bad sample out of its batch, "substitute" replaces it.
        most: maximum number of bad samples; one more raises.
    """

    on_error: OnError
    most: int
    known: dict[Key, str] = field(default_factory=dict)
    _new: list[BadSample] = field(default_factory=list)

    @cached_property
    def wanted(self) -> bool:
        """Whether bad samples are to be skipped or replaced."""
        return self.on_error != "raise"

    @property
    def remedy(self) -> str:
        """What becomes of a bad sample, for the log."""
        return "left out" if self.on_error == "skip" else "replaced"

    def check(self, dataset: object) -> None:
        """Raise ConfigError for invalid values, or a dataset whose samples nothing names."""
        check_choice("on_error", self.on_error, ("raise", "skip", "substitute"))
        check_whole("max_bad_samples", self.most, 0, "a number of samples")
        if self.wanted and isinstance(dataset, IterableDataset):
            raise ConfigError(
                f"on_error={self.on_error!r}: an IterableDataset has no samples by number"
            )

    def add(self, index: Key, reason: str) -> bool:
        """Note a bad sample; False if it was known.

        Raises:
            TooManyBadSamplesError: there are more than `most`.
        """
        if index in self.known:
            return False
        if len(self.known) >= self.most:
            raise TooManyBadSamplesError(
                f"{len(self.known) + 1} samples cannot be read, max_bad_samples is {self.most}; the"
                f" last one: sample {index}: {reason}"
            )
        self.known[index] = reason
        return True

    def note_raised(self, index: Key, error: Exception) -> None:
        """`add` a sample that raised, and note it for `take_new`; errors are chained to `error`."""
        reason = printable(f"{type(error).__name__}: {error}")[:_LONGEST_REASON]
        try:
            new = self.add(index, reason)
        except TooManyBadSamplesError as e:
            raise e from error
        if new:
            self._new.append(BadSample(index, reason, _path(error)))

    def delivered(self, index: Any, dataset: Any, *, many: bool = True) -> Any:
        """Return the samples that a batch of `index` has, of good ones only.

        many: whether `index` is a group of samples, not one.
        """
        if not self.known:
            return index
        batch = list(iter(index)) if many else [index]
        keys = [key_of(sample) for sample in batch]
        if not any(key in self.known for key in keys):
            return index
        if not many:
            return self._in_place_of(batch, 0, dataset)
        if self.on_error == "substitute":
            return [self._in_place_of(batch, place, dataset) for place in range(len(batch))]
        good = [key for key in keys if key not in self.known]
        return good or [self._in_place_of(batch, 0, dataset)]  # a batch is never empty

    def _in_place_of(self, batch: Sequence[Any], place: int, dataset: Any) -> Key:
        tried = (batch[place], *candidates(batch, place, dataset))
        # None is left if a sample that was good in this batch was bad in another.
        left = (key for sample in tried if (key := key_of(sample)) not in self.known)
        return next(left, key_of(batch[place]))

    def take_new(self) -> tuple[BadSample, ...]:
        """Return the samples that `note_raised` has noted since the last call."""
        new, self._new = tuple(self._new), []
        return new


class Tolerant(Dataset[Any]):
    """A dataset whose bad samples are left out or replaced."""

    def __init__(self, dataset: Any, tolerance: Tolerance, reads: Any) -> None:
        """`reads`: what samples are taken from: the dataset, or a `Seeded` around it."""
        self._dataset, self._reads = dataset, reads
        self._tolerance = tolerance
        self._good: Any = None  # the sample that was read last

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        """Read one sample outside of a batch; a bad one is replaced, as it cannot be skipped."""
        return self._read([index], 0, replace=True)

    def __getitems__(self, indices: Iterable[Any]) -> list[Any]:
        """Read the samples of a batch with the calls torch makes; a skipped one is `_SKIPPED`."""
        known, batch = self._tolerance.known, list(iter(indices))
        many = getattr(self._reads, "__getitems__", None)
        if many is not None and not any(key_of(sample) in known for sample in batch):
            try:
                return list(many(batch if isinstance(indices, Iterator) else indices))
            except Exception:  # noqa: BLE001, S110  reading one by one finds the bad sample
                pass
        replace = self._tolerance.on_error == "substitute"
        samples = []
        for place in range(len(batch)):
            if self._reads is not self._dataset:
                self._reads.begin_sample(place)
            samples.append(self._read(batch, place, replace=replace))
        if samples and all(sample is _SKIPPED for sample in samples):
            samples[0] = self._replacement(batch, 0)  # a batch is never empty
        return samples

    def _read(self, batch: Sequence[Any], place: int, *, replace: bool) -> Any:
        index, key = batch[place], key_of(batch[place])
        if key not in self._tolerance.known:
            try:
                sample = self._reads[index]
            except Exception as e:
                if isinstance(key, int) and key < 0:
                    raise  # not a valid index: the sampler is at fault
                self._tolerance.note_raised(key, e)
            else:
                self._good = index
                return sample
        return self._replacement(batch, place) if replace else _SKIPPED

    def _replacement(self, batch: Sequence[Any], place: int) -> Any:
        bad, tried = key_of(batch[place]), 0
        last = [self._good] if isinstance(bad, str) and self._good is not None else []
        for index in chain(candidates(batch, place, self._dataset), last):
            key, tried = key_of(index), tried + 1
            if key in self._tolerance.known:
                continue
            try:
                return self._reads[index]
            except Exception as e:  # noqa: BLE001  same as above
                self._tolerance.note_raised(key, e)
        none = (
            f"none of {tried} samples could be read" if tried else "no sample is known to be good"
        )
        raise TooManyBadSamplesError(
            f"{none} in the place of sample {bad}: {self._tolerance.known[bad]}"
        )


def candidates(batch: Sequence[Any], place: int, dataset: Any) -> Iterator[Any]:
    """Yield the samples that may take the place of one of a batch, the first choice first.

    >>> [*candidates(["a", "b", "c"], 1, dataset=None)]
    ['c', 'a']
    """
    key, mates = key_of(batch[place]), (*batch[place + 1 :], *batch[:place])
    beside = getattr(dataset, "_creel_beside", None)
    if beside is not None:  # a stream: earlier records may be deleted, and later ones not be there
        others = beside([key_of(sample) for sample in batch])
        yield from islice((*mates, *others), _MAX_REPLACEMENTS)
        return
    if isinstance(key, int) and (span := span_of(dataset, key)) is not None:
        yield from (replacement(key, attempt, *span) for attempt in range(_MAX_REPLACEMENTS))
        return
    yield from mates
    if isinstance(key, int):  # those before it are likely to be there
        yield from range(key - 1, max(key - 1 - _MAX_REPLACEMENTS, -1), -1)


def replacement(bad: int, attempt: int, n: int, first: int = 0) -> int:
    """Return the sample that attempt number `attempt` puts in place of a bad one.

    Args:
        n, first: it is one of the samples first, ..., first + n - 1.

    >>> [replacement(7, attempt, 1000) for attempt in range(3)]
    [662, 14, 255]
    """
    return first + xxhash.xxh3_64_intdigest(struct.pack("<qq", bad, attempt)) % n


def note_path(error: BaseException, path: str) -> None:
    """Note in an exception which file a sample had opened when it raised it."""
    if path and not hasattr(error, _PATH):
        with suppress(AttributeError, TypeError):  # a class that takes no attributes
            setattr(error, _PATH, path)


def _path(error: Exception) -> str:
    """Return the file that a sample read when it raised; "" if it is not known."""
    path = getattr(error, _PATH, "") or (isinstance(error, OSError) and error.filename)
    return os.fsdecode(path) if isinstance(path, (str, bytes)) else ""


def printable(text: str) -> str:
    """Return the text with escapes for what is not UTF-8, which paths may contain."""
    return text.encode(errors="backslashreplace").decode()


def without_skipped(collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap a batch's `collate` so that it never sees skipped samples."""

    def collated(samples: Any) -> Any:
        return collate([sample for sample in samples if sample is not _SKIPPED])

    return collated


def key_of(index: Any) -> Key:
    """Return the number of a sample that a sampler yielded; of another key, its text."""
    if type(index) is int:
        return index
    with suppress(Exception):  # the person's class
        return operator.index(index)
    with suppress(Exception):
        return repr(index)
    return f"<{type(index).__name__}>"
