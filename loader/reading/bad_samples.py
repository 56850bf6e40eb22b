"""Samples that cannot be read: left out or replaced, where a person asks for it (`on_error`).

`Tolerant` stands between a fetcher and the dataset. Which sample takes the place of a bad one
follows from the bad one's number alone, so that all ranks, all epochs and a resumed run choose
alike without a word to each other, if they find the same samples bad. Only what the dataset raises
counts, not what collation does.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import xxhash
from torch.utils.data import Dataset

from creel.errors import ConfigError, TooManyBadSamplesError

OnError = Literal["raise", "skip", "substitute"]
#: Samples tried in the place of a bad one, one after the other.
_TRIES = 100
_LONGEST_REASON = 300
#: Stands for a sample that is left out, until its batch is collated.
_SKIPPED = object()


@dataclass(frozen=True, slots=True)
class BadSample:
    """A sample that raised: its number in the dataset, and why."""

    index: int
    reason: str


@dataclass
class Tolerance:
    """What is to be done about bad samples, and which are known; pickled to workers.

    Args:
        on_error: "skip" leaves a bad sample out of its batch, "substitute" takes another one.
        most: maximum number of bad samples; one more raises.
    """

    on_error: OnError
    most: int
    known: dict[int, str] = field(default_factory=dict)
    _new: list[BadSample] = field(default_factory=list)

    @property
    def wanted(self) -> bool:
        """Whether bad samples are anything but errors."""
        return self.on_error != "raise"

    def check(self) -> None:
        """Raise ConfigError for values that mean nothing."""
        if self.on_error not in {"raise", "skip", "substitute"}:
            raise ConfigError(f'on_error={self.on_error!r}: "raise", "skip" or "substitute"')
        if type(self.most) is not int or self.most < 0:
            raise ConfigError(f"max_bad_samples={self.most!r}: a number of samples, 0 or more")

    def add(self, index: int, reason: str) -> bool:
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

    def found(self, index: int, error: Exception) -> None:
        """As `add`, for `take_new`; what it raises has the dataset's own error as its cause."""
        reason = plain(f"{type(error).__name__}: {error}")[:_LONGEST_REASON]
        try:
            new = self.add(index, reason)
        except TooManyBadSamplesError as e:
            raise e from error
        if new:
            self._new.append(BadSample(index, reason))

    def take_new(self) -> tuple[BadSample, ...]:
        """What `found` has noted since the last call."""
        new, self._new = tuple(self._new), []
        return new


class Tolerant(Dataset[Any]):
    """A dataset whose bad samples are left out or replaced."""

    def __init__(self, dataset: Any, tolerance: Tolerance) -> None:
        self._dataset = dataset
        self._tolerance = tolerance

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        """A sample where there are no batches: nothing can be left out of one."""
        return self._read(index, replace=True)

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        """The samples of a batch in torch's order of calls; `_SKIPPED` for one that is left out."""
        known = self._tolerance.known
        many = getattr(self._dataset, "__getitems__", None)
        if many is not None and not any(_number(i) in known for i in indices):
            try:
                return list(many(indices))
            except Exception:  # noqa: BLE001, S110  which of them it was is found one by one
                pass
        replace = self._tolerance.on_error == "substitute"
        samples = [self._read(i, replace=replace) for i in indices]
        if indices and all(sample is _SKIPPED for sample in samples):
            samples[0] = self._replacement(_number(indices[0]))  # no batch is empty
        return samples

    def _read(self, index: Any, *, replace: bool) -> Any:
        if _number(index) not in self._tolerance.known:
            try:
                return self._dataset[index]
            except Exception as e:
                if _number(index) < 0:
                    raise  # no number of a sample: the sampler is to blame
                self._tolerance.found(_number(index), e)
        return self._replacement(_number(index)) if replace else _SKIPPED

    def _replacement(self, bad: int) -> Any:
        n = len(self._dataset)
        for attempt in range(_TRIES):
            index = replacement(bad, attempt, n)
            if index in self._tolerance.known:
                continue
            try:
                return self._dataset[index]
            except Exception as e:  # noqa: BLE001  as above
                self._tolerance.found(index, e)
        raise TooManyBadSamplesError(
            f"none of {_TRIES} samples could be read in the place of sample {bad}:"
            f" {self._tolerance.known[bad]}"
        )


def replacement(bad: int, attempt: int, n: int) -> int:
    """The number of the sample, of n, that is tried in the place of a bad one.

    >>> [replacement(7, attempt, 1000) for attempt in range(3)]
    [662, 14, 255]
    """
    return xxhash.xxh3_64_intdigest(struct.pack("<qq", bad, attempt)) % n


def plain(text: str) -> str:
    """The text with what is not UTF-8 (a path may be anything) in escapes."""
    return text.encode(errors="backslashreplace").decode()


def without_skipped(collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`collate`, of batches, without the samples that are left out."""

    def collated(samples: Any) -> Any:
        return collate([sample for sample in samples if sample is not _SKIPPED])

    return collated


def _number(index: Any) -> int:
    """The number of a sample; -1 for an index that is none."""
    try:
        return operator.index(index)
    except TypeError:
        return -1
