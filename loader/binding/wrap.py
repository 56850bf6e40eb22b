"""creel.wrap: a proxy of a dataset, for loaders that are not creel's (accelerate, Trainer).

The proxy reads through the node's daemon in any process that takes samples from it (see
`creel.loader.binding.wrapped_reads`); inside creel's own loader it only delegates.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

from torch.utils.data import Dataset, IterableDataset

from creel.errors import ConfigError
from creel.loader.binding.wrapped_reads import Journal, WrappedReads, spawning
from creel.loader.datasets.base import Sample, fetch_many

if TYPE_CHECKING:
    from creel.loader.binding.access_trace import AccessTrace

D = TypeVar("D")


class Wrapped(Dataset[Sample]):
    """A proxy with the length, samples, attributes and (for isinstance) class of a dataset."""

    _wrapped: Dataset[Sample]
    _reads: WrappedReads

    def __init__(self, dataset: Dataset[Sample]) -> None:
        object.__setattr__(self, "_wrapped", dataset)
        object.__setattr__(self, "_reads", WrappedReads(dataset))

    def __len__(self) -> int:
        return len(self._wrapped)  # type: ignore[arg-type]  # torch's Dataset promises no length

    def __getitem__(self, index: int) -> Sample:
        return self._reads.read([index], lambda dataset: dataset[index])

    def __getitems__(self, indices: Sequence[int]) -> Iterable[Sample]:
        return self._reads.read(indices, lambda dataset: fetch_many(dataset, indices))

    @property  # type: ignore[misc]  # object has a plain attribute here; this is intended
    def __class__(self) -> type:
        return type(self._wrapped)

    def __getattr__(self, name: str) -> Sample:
        # Called for what the proxy lacks; while a copy is being made it lacks these two.
        if name in {"_wrapped", "_reads"}:
            raise AttributeError(name)
        return getattr(self._wrapped, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._wrapped, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._wrapped, name)

    def __reduce__(self) -> tuple[object, ...]:
        if spawning():
            self._reads.prepare()
        return _wrapped_again, (self._wrapped, self._reads.journal())

    def __repr__(self) -> str:
        return f"creel.wrap({self._wrapped!r})"


def _wrapped_again(dataset: Dataset[Sample], journal: Journal | None) -> Wrapped:
    """Unpickle a proxy; in a spawned worker it goes on recording for its trainer."""
    proxy = Wrapped(dataset)
    if journal is not None:
        reads: WrappedReads = object.__getattribute__(proxy, "_reads")
        reads.resume_journal(journal)
    return proxy


def wrap(dataset: D) -> D:
    """A proxy for a map-style dataset, usable in its place. A proxy is returned as it is.

    Raises:
        ConfigError: an iterable dataset, or an object without `__getitem__`.
    """
    if type(dataset) is Wrapped:
        return dataset
    if isinstance(dataset, IterableDataset):
        raise ConfigError("creel.wrap takes a map-style dataset, not an IterableDataset")
    if not hasattr(dataset, "__getitem__"):
        raise ConfigError(f"creel.wrap takes a dataset, not {dataset!r}")
    # They import this module; importing them at the first read would delay it by 30 ms.
    for module in ("access_recorder", "bind"):
        importlib.import_module(f"creel.loader.binding.{module}")
    return cast(D, Wrapped(cast("Dataset[Sample]", dataset)))


def trace(dataset: Wrapped) -> AccessTrace | None:
    """The trace of a proxy's dataset, or None if there is none so far."""
    reads: WrappedReads = object.__getattribute__(dataset, "_reads")
    return reads.trace()


def unwrap(dataset: object) -> object:
    """The dataset of a proxy; anything else is returned as it is."""
    while type(dataset) is Wrapped:
        dataset = object.__getattribute__(dataset, "_wrapped")
    return dataset
