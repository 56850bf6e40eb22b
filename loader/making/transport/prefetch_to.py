"""`creel.prefetch_to`: batches that are copied to an accelerator while the step before computes."""

from __future__ import annotations

import copy
import sys
import weakref
from collections import deque
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    MutableSequence,
    Sequence,
)
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import torch

from creel.loader.making.transport.pinning import Lender
from creel.system.forks import at_fork

T = TypeVar("T")


def prefetch_to(device: torch.device | str | int, loader: Iterable[T]) -> OnDevice[T]:
    """Return an iterable over the batches of `loader`, on a device.

        for x, y in creel.prefetch_to("cuda", loader):
            ...

    On CUDA the next batch is copied on a stream of its own while the step computes. Give the loader
    `pin_memory=True`: other memory is copied in the calling thread. Plain batches of a
    `creel.DataLoader`'s workers are then copied out of the workers' own memory. On other devices
    each batch is moved when it is asked for.

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
        self._copies: Copies | None = None  # kept: memory belongs to a stream

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
        if self._copies is None:
            self._copies = Copies(torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]  # torch's
        lender = batches if isinstance(batches, Lender) else Lender()
        lender.lend()
        # What a creel loader's `indices` are made of: those of the batch that is used, not held.
        returned = getattr(self.loader, "_creel_returned", SimpleNamespace(index=None))
        self._batches = OneAhead(batches, partial(self._copies.begin, lender=lender), returned)
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
        ahead = self.held = self._taken() if self.held is None else self.held
        if isinstance(ahead, Exception):
            self.held = None
            raise ahead
        finish, index = ahead
        self.held = self._taken()
        self._returned.index = index
        return finish()

    def _taken(self) -> tuple[Callable[[], T], Any] | Exception:
        try:
            return self._copied(next(self._of_loader)), self._returned.index
        except Exception as e:  # noqa: BLE001  StopIteration too: the batch before comes first
            return e


class Copy:
    """The copy of a batch: `done` when it has ended, and what is not written until then."""

    def __init__(self, done: torch.cuda.Event, lent: Sequence[object]) -> None:
        self.done, self.lent = done, lent
        _copies.add(self)


class Copies:
    """Copies of batches to a device, on a stream of their own."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._pending: deque[Copy] = deque()  # in order: those of lent memory

    def begin(self, batch: T, lender: Lender) -> Callable[[], T]:
        """Begin to copy the last batch of `lender`.

        Returns:
            What makes the current stream wait for the copy, and returns it.
        """
        while self._pending and self._pending[0].done.query():  # type: ignore[no-untyped-call]  # torch's
            self._pending.popleft()
        stream, lent = self._stream, lender.take_lent()
        # Memory of batches that were dropped is used again: after the steps that may still read it.
        # Unlike Tensor.record_stream this also holds for tensors inside objects with own `to`.
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        try:
            with torch.cuda.stream(stream):
                on_device: T = moved(batch, stream.device)
        finally:
            copy = Copy(stream.record_event(), lent)
            if lent:
                self._pending.append(copy)

        def finish() -> T:
            torch.cuda.current_stream(stream.device).wait_event(copy.done)
            return on_device

        return finish

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        """Wait for the copies: what they read is written when it is no longer held."""
        while self._pending and not ends():
            copy = self._pending.popleft()
            if copy not in _of_parents:
                with suppress(RuntimeError):  # CUDA has failed: nothing is copied
                    copy.done.synchronize()


_copies: weakref.WeakSet[Copy] = weakref.WeakSet()
#: In a forked child: the copies of its parents. It must not use their events, nor even end one, by
#: which torch would end the child.
_of_parents: list[Copy] = []
at_fork(after_in_child=lambda: _of_parents.extend(_copies))


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
