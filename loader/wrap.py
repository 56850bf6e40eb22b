"""creel.wrap: a dataset behind a proxy, for loaders that are not creel's (accelerate, Trainer).

The proxy reads through the node's daemon in whatever process it is asked for samples (see
`creel.loader.stepwise`); inside of creel's own loader it only passes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

from torch.utils.data import Dataset, IterableDataset

from creel.errors import ConfigError
from creel.loader.base import Sample, fetch_many
from creel.loader.stepwise import Journal, Stepwise, spawning

if TYPE_CHECKING:
    from creel.loader.learnt import Learnt

D = TypeVar("D")


class Wrapped(Dataset[Sample]):
    """Stands for another dataset: its length, samples and attributes; isinstance sees its class."""

    _wrapped: Dataset[Sample]
    _stepwise: Stepwise

    def __init__(self, dataset: Dataset[Sample]) -> None:
        object.__setattr__(self, "_wrapped", dataset)
        object.__setattr__(self, "_stepwise", Stepwise(dataset))

    def __len__(self) -> int:
        return len(self._wrapped)  # type: ignore[arg-type]  # torch's Dataset promises no length

    def __getitem__(self, index: int) -> Sample:
        return self._stepwise.read([index], lambda dataset: dataset[index])

    def __getitems__(self, indices: Sequence[int]) -> Iterable[Sample]:
        return self._stepwise.read(indices, lambda dataset: fetch_many(dataset, indices))

    @property  # type: ignore[misc]  # a property where object has a plain attribute: meant so
    def __class__(self) -> type:
        return type(self._wrapped)

    def __getattr__(self, name: str) -> Sample:
        # Only for what the proxy lacks; its own are missing while a copy is being made.
        if name in {"_wrapped", "_stepwise"}:
            raise AttributeError(name)
        return getattr(self._wrapped, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._wrapped, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._wrapped, name)

    def __reduce__(self) -> tuple[object, ...]:
        if spawning():
            self._stepwise.prepare()
        return _wrapped_again, (self._wrapped, self._stepwise.journal())

    def __repr__(self) -> str:
        return f"creel.wrap({self._wrapped!r})"


def _wrapped_again(dataset: Dataset[Sample], journal: Journal | None) -> Wrapped:
    """A proxy out of its pickle: in a worker it goes on listening for its trainer."""
    proxy = Wrapped(dataset)
    if journal is not None:
        stepwise: Stepwise = object.__getattribute__(proxy, "_stepwise")
        stepwise.goes_on(journal)
    return proxy


def wrap(dataset: D) -> D:
    """A proxy for a map-style dataset, usable wherever the dataset is. A proxy is given back.

    Raises:
        ConfigError: an iterable dataset, or nothing that has samples by number.
    """
    if type(dataset) is Wrapped:
        return dataset
    if isinstance(dataset, IterableDataset):
        raise ConfigError("creel.wrap takes a map-style dataset, not an IterableDataset")
    if not hasattr(dataset, "__getitem__"):
        raise ConfigError(f"creel.wrap takes a dataset, not {dataset!r}")
    return cast(D, Wrapped(cast("Dataset[Sample]", dataset)))


def learnt(dataset: Wrapped) -> Learnt | None:
    """What a proxy's dataset, which declares nothing, is known to read by now."""
    stepwise: Stepwise = object.__getattribute__(dataset, "_stepwise")
    return stepwise.learnt()


def unwrap(dataset: object) -> object:
    """What a proxy stands for; everything else is itself."""
    while type(dataset) is Wrapped:
        dataset = object.__getattribute__(dataset, "_wrapped")
    return dataset
