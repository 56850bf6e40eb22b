"""`creel.prefetch_to`: batches that are copied to an accelerator while the step before computes."""

from __future__ import annotations

import copy
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    MutableSequence,
    Sequence,
)
from functools import partial
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


def prefetch_to(device: torch.device | str | int, loader: Iterable[T]) -> OnDevice[T]:
    """Return an iterable over the batches of `loader`, on a device.

        for x, y in creel.prefetch_to("cuda", loader):
            ...

    On CUDA the next batch is copied on a stream of its own while the step computes. Give the loader
    `pin_memory=True`: other memory is copied in the calling thread. On other devices each batch is
    moved when it is asked for.

    Tensors, and whatever else has `to(device)`, are moved; dicts, lists, tuples and the like keep
    their types, as with `pin_memory=True`. What a batch raises is raised in its turn.

    Args:
        device: of torch.
        loader: `creel.DataLoader`, torch's, or any other iterable.
    """
    return OnDevice(device, loader)


class OnDevice(Generic[T]):
    """The batches of a loader on a device; other attributes, as `set_epoch`, are the loader's.

    `indices` and `replayed` of a `creel.DataLoader` name the samples of the batch that is used.

    Attributes:
        loader: as it was given.
    """

    def __init__(self, device: torch.device | str | int, loader: Iterable[T]) -> None:
        self.device, self.loader = torch.device(device), loader
        self._batches: OneAhead[Any] | None = None
        self._stream: torch.cuda.Stream | None = None  # kept: memory belongs to a stream

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # TypeError if it has none

    def __getattr__(self, name: str) -> Any:
        if name in {"loader", "device"}:  # not yet, in a copy
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[T]:
        batches = iter(self.loader)
        if self.device.type != "cuda":
            self._batches = None
            return map(partial(moved, device=self.device), batches)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # torch's
        # What a creel loader's `indices` are made of: those of the batch that is used, not held.
        returned = getattr(self.loader, "_creel_returned", SimpleNamespace(index=None))
        self._batches = OneAhead(batches, partial(_copied, self._stream), returned)
        return self._batches

    def state_dict(self) -> Any:
        """Return the state of a `creel.DataLoader`, up to the last batch that was returned here."""
        loader: Any = self.loader
        state = loader.state_dict()
        held = None if self._batches is None else self._batches.held
        if held is None:
            return state
        ahead = not isinstance(held, Exception)
        return loader.state_dict(delivered=state["batches"] - ahead)


class OneAhead(Iterator[T]):
    """Begins to copy each batch before the one ahead of it is returned.

    Attributes:
        held: what follows: (what finishes a copy, its samples), or what the loader raised.
    """

    def __init__(
        self, batches: Iterator[T], copied: Callable[[T], Callable[[], T]], returned: Any
    ) -> None:
        """Take batches of a loader.

        Args:
            copied: begins to copy a batch; the result waits for the copy and returns it.
            returned: `index` names the samples of the last batch.
        """
        self._of_loader, self._copied, self._returned = batches, copied, returned
        self.held: tuple[Callable[[], T], Any] | Exception | None = None

    def __next__(self) -> T:
        found = self.held = self._taken() if self.held is None else self.held
        if isinstance(found, Exception):
            self.held = None
            raise found
        finish, index = found
        self.held = self._taken()
        self._returned.index = index
        return finish()

    def _taken(self) -> tuple[Callable[[], T], Any] | Exception:
        try:
            return self._copied(next(self._of_loader)), self._returned.index
        except Exception as e:  # noqa: BLE001  StopIteration too: the batch before comes first
            return e


def _copied(stream: torch.cuda.Stream, batch: T) -> Callable[[], T]:
    """Begin to copy a batch, and return what makes the current stream wait for it."""
    # Memory of batches that were dropped is used again: after the steps that may still read it.
    # Unlike Tensor.record_stream this also holds for tensors inside objects with a `to` of theirs.
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        on_device: T = moved(batch, stream.device)
    done = stream.record_event()

    def finish() -> T:
        torch.cuda.current_stream(stream.device).wait_event(done)
        return on_device

    return finish


def moved(data: Any, device: torch.device) -> Any:
    """Return a batch on a device; containers keep their types, as with torch's `pin_memory`."""
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=device.type == "cuda")
    if callable(getattr(data, "to", None)):
        return data.to(device)
    if isinstance(data, Mapping):
        return _like(data, {key: moved(part, device) for key, part in data.items()})
    if isinstance(data, Sequence) and not isinstance(data, (str, bytes)):
        return _like(data, [moved(part, device) for part in data])
    return data


def _like(data: Any, parts: Any) -> Any:
    """Return parts in a container like `data`; or as they are, if none can be made."""
    if hasattr(data, "_fields"):
        return type(data)(*parts)
    try:
        if not isinstance(data, (MutableMapping, MutableSequence)):
            return type(data)(parts)
        clone: Any = copy.copy(data)  # it may have attributes beyond its parts
        if isinstance(data, Mapping):
            clone.update(parts)
        for number, part in enumerate(parts if isinstance(data, Sequence) else ()):
            clone[number] = part
    except TypeError:
        return parts
    return clone
