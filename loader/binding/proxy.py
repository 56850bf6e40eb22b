"""Wrapped: the proxy that `creel.wrap` returns, and the dataset inside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from creel.loader.datasets.base import Sample, fetch_many

if TYPE_CHECKING:
    from creel.config import Config
    from creel.loader.binding.access_trace import AccessTrace
    from creel.loader.binding.wrapped_reads import WrappedReads


class Wrapped(Dataset[Sample]):
    """A proxy with the length, samples, attributes and (for isinstance) class of a dataset."""

    _wrapped: Dataset[Sample]
    _reads: WrappedReads

    def __init__(self, dataset: Dataset[Sample], reads: WrappedReads) -> None:
        object.__setattr__(self, "_wrapped", dataset)
        object.__setattr__(self, "_reads", reads)

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
        # Called for names that the proxy lacks. While a copy is being made, it lacks these two.
        if name in {"_wrapped", "_reads"}:
            raise AttributeError(name)
        return getattr(self._wrapped, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._wrapped, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._wrapped, name)

    def __reduce__(self) -> tuple[object, ...]:
        return Wrapped, (self._wrapped, self._reads)

    def __repr__(self) -> str:
        return f"creel.wrap({self._wrapped!r})"


def unwrap(dataset: Any) -> Any:
    """Return the dataset of a proxy; any other dataset unchanged."""
    while type(dataset) is Wrapped:
        dataset = object.__getattribute__(dataset, "_wrapped")
    return dataset


def trace_of(dataset: object) -> AccessTrace | None:
    """Return the trace of a proxy's dataset; None if it has none so far, or is no proxy."""
    if type(dataset) is not Wrapped:
        return None
    reads: WrappedReads = object.__getattribute__(dataset, "_reads")
    return reads.trace()


def configure(dataset: Wrapped, config: Config, origins: dict[str, str]) -> None:
    """Let a proxy use the settings of the loader that reads it; `origins`: see `Config.load`."""
    reads: WrappedReads = object.__getattribute__(dataset, "_reads")
    reads.config = config, origins


def recorded(dataset: Wrapped) -> bool:
    """Whether reads of a proxy's dataset were recorded that had to wait for their source."""
    reads: WrappedReads = object.__getattribute__(dataset, "_reads")
    return reads.recorded()
