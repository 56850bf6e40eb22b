"""Wrapped: what the rest of creel knows of an object that `creel.wrap` returned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

if TYPE_CHECKING:
    from creel.config import Config
    from creel.loader.binding.access_trace import AccessTrace
    from creel.loader.binding.wrapped_reads import WrappedReads
    from creel.loader.reading.storage import Options


class Wrapping(NamedTuple):
    """What `creel.wrap` was asked for; see there."""

    whole: bool = False
    storage_options: Options = None


AS_IT_IS = Wrapping()


class Wrapped:
    """Base of the classes of wrapped datasets (see `creel.loader.binding.wrap`)."""

    __slots__ = ()
    #: In a slot; unset in an object that was made by `type(wrapped)(...)`.
    _creel_reads: WrappedReads

    def _creel_begin(self) -> WrappedReads:
        """Set `_creel_reads` in such an object, and return it."""
        raise NotImplementedError


def is_wrapped(dataset: object) -> TypeGuard[Wrapped]:
    """Whether `wrap` returned the dataset; runs no code of a dataset."""
    return issubclass(type(dataset), Wrapped)


def reads_of(wrapped: Wrapped) -> WrappedReads:
    """Return how a wrapped dataset is read."""
    try:
        reads: WrappedReads = object.__getattribute__(wrapped, "_creel_reads")
        return reads  # noqa: TRY300  runs for each sample
    except AttributeError:
        return type(wrapped)._creel_begin(wrapped)  # noqa: SLF001  not by the dataset's own lookup


def unwrap(dataset: Any) -> Any:
    """Return the dataset that a wrapped one reads; any other dataset unchanged."""
    return reads_of(dataset).dataset if is_wrapped(dataset) else dataset


def trace_of(dataset: object) -> AccessTrace | None:
    """Return the trace of a wrapped dataset; None if it has none so far, or is not wrapped."""
    return reads_of(dataset).trace() if is_wrapped(dataset) else None


def configure(dataset: Wrapped, config: Config, origins: dict[str, str]) -> None:
    """Use the settings of the loader that reads a dataset; `origins`: see `Config.load`."""
    reads_of(dataset).config = config, origins


def recorded(dataset: Wrapped) -> bool:
    """Whether reads of a wrapped dataset were recorded that had to wait for their source."""
    return reads_of(dataset).recorded()
