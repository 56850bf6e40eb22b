"""Wrapped: what the rest of creel knows of an object that `creel.wrap` returned.

`creel.loader.data.tracing` implements it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard, TypeVar

from torch.utils.data import Dataset

from creel.policies.arrays import Ids, Ints

if TYPE_CHECKING:
    from creel.cache.storage.stores.access import Options
    from creel.config import Config
    from creel.loader.data.datasets.base import CreelDataset, Sample

T = TypeVar("T")


class Wrapping(NamedTuple):
    """What `creel.wrap` was asked for; see there."""

    whole: bool = False
    storage_options: Options = None


AS_IT_IS = Wrapping()


class Trace(Protocol):
    """What each sample of a wrapped dataset reads.

    leaves: the datasets with the objects. counts: (size,) the number of objects of each sample.
    """

    leaves: list[CreelDataset]
    counts: Ints

    def numbers(self, bases: Ints) -> Ids:
        """Return (counts.sum(),) ids of the objects, sample by sample.

        `bases`: (len(leaves),) the first id of each leaf.
        """
        ...


class Reading(Protocol):
    """How a wrapped dataset is read."""

    dataset: Dataset[Sample]
    wrapping: Wrapping
    #: Settings and their origins; None: those of the process.
    config: tuple[Config, dict[str, str]] | None
    #: Whether a loader of creel's counts the batches.
    counted: bool
    #: Whether one reads it, and opens the session for what it is to read.
    led: bool

    def read(self, indices: Sequence[int], fetch: Callable[[Dataset[Sample]], T]) -> T:
        """Call `fetch(dataset)`, which reads these samples, through the arena if possible."""
        ...

    def trace(self) -> Trace | None:
        """Return the trace, if there is one so far; the first call may begin to record it."""
        ...

    def recorded(self) -> bool:
        """Whether reads are being recorded, and any process has recorded some."""
        ...

    def recording(self) -> bool:
        """Whether it is not known yet what samples read."""
        ...

    def supposed(self) -> object | None:
        """Return the hypothesis about what samples read; None if there is none by now."""
        ...

    def holds_paths(self) -> bool:
        """Whether the dataset holds a list of its files that counts before any sample is read."""
        ...


class Wrapped:
    """Base of the classes of wrapped datasets (see `creel.loader.data.tracing.wrap`)."""

    __slots__ = ()
    #: In a slot; unset in an object that was made by `type(wrapped)(...)`.
    _creel_reads: Reading

    def _creel_begin(self) -> Reading:
        """Set `_creel_reads` in such an object, and return it."""
        raise NotImplementedError


def is_wrapped(dataset: object) -> TypeGuard[Wrapped]:
    """Whether `wrap` returned the dataset; runs no code of a dataset."""
    return issubclass(type(dataset), Wrapped)


def reads_of(wrapped: Wrapped) -> Reading:
    """Return how a wrapped dataset is read."""
    try:
        reads: Reading = object.__getattribute__(wrapped, "_creel_reads")
        return reads  # noqa: TRY300  runs for each sample
    except AttributeError:
        return type(wrapped)._creel_begin(wrapped)  # noqa: SLF001  not by the dataset's own lookup


def unwrap(dataset: Any) -> Any:
    """Return the dataset that a wrapped one reads; any other dataset unchanged."""
    return reads_of(dataset).dataset if is_wrapped(dataset) else dataset


def trace_of(dataset: object) -> Trace | None:
    """Return the trace of a wrapped dataset; None if it has none so far, or is not wrapped."""
    return reads_of(dataset).trace() if is_wrapped(dataset) else None


def configure(dataset: Wrapped, config: Config, origins: dict[str, str]) -> None:
    """Use the settings of the loader that reads a dataset; `origins`: see `Config.load`."""
    reads_of(dataset).config = config, origins
    reads_of(dataset).counted = True


def recording(dataset: Wrapped) -> bool:
    """Whether it is not known yet what samples of a wrapped dataset read."""
    return reads_of(dataset).recording()


def supposed(dataset: Wrapped) -> object | None:
    """Return the hypothesis about what samples read; None if there is none by now."""
    return reads_of(dataset).supposed()


def holds_paths(dataset: Wrapped) -> bool:
    """Whether it holds a list of its files that counts before any sample is read."""
    return reads_of(dataset).holds_paths()


def lead(dataset: Wrapped) -> None:
    """Let a loader of creel's open the session for what a dataset is to read."""
    reads_of(dataset).led = True


def recorded(dataset: Wrapped) -> bool:
    """Whether reads of a wrapped dataset are being recorded, and any process has recorded some."""
    return reads_of(dataset).recorded()
