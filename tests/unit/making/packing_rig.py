"""A worker's and a trainer's end of the slots in one process, and torch's own way as the oracle."""

from __future__ import annotations

import collections
import dataclasses
import pickle
from collections.abc import Callable, Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch

from creel.cache.memory.slots.reader import SlotReader
from creel.cache.memory.slots.writer import SlotWriter
from creel.loader.making.transport.packing import pack
from creel.loader.making.transport.unpacking import Packed, unpack


class Road:
    """A worker's and a trainer's end in one process."""

    def __init__(self, max_slots: int = 8) -> None:
        self.writer = SlotWriter(max_slots=max_slots)
        self.reader = SlotReader(max_leased=4)

    def send(self, batch: object) -> Packed:
        packed = pack(batch, self.writer)
        for slot in self.writer.unsent():
            self.reader.map_slot(*slot)
        assert len(pickle.dumps(packed)) < 4096
        return packed

    def trip(self, batch: Any) -> Any:
        out = unpack(self.send(batch), self.reader)
        self.writer.give_back(self.reader.returned())
        return out


def theirs(batch: Any) -> Any:
    """Return a batch after torch's worker-to-main queue (only its pickling, in one process)."""
    return ForkingPickler.loads(ForkingPickler.dumps(batch))


def outcome(function: Callable[..., Any], *args: Any) -> tuple[Any, Exception | None]:
    """Return (result, None), or (None, the exception raised)."""
    try:
        return function(*args), None
    except Exception as e:  # noqa: BLE001  any exception of torch is right
        return None, e


def same(a: Any, b: Any) -> None:
    """Assert equal types, values and layouts all the way down."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        same_tensor(a, b)
    elif isinstance(a, np.ndarray):
        assert (a.dtype, a.shape, a.strides) == (b.dtype, b.shape, b.strides)
        assert a.tolist() == b.tolist() if a.dtype.hasobject else a.tobytes() == b.tobytes()
        assert a.flags.writeable == b.flags.writeable
    elif isinstance(a, Mapping):
        assert list(a) == list(b)
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, (list, tuple, collections.deque)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif dataclasses.is_dataclass(a):
        same(vars(a), vars(b))
    else:
        assert a == b or (a != a and b != b)  # not a number


def same_tensor(a: torch.Tensor, b: torch.Tensor) -> None:
    assert (a.dtype, a.shape, a.layout) == (b.dtype, b.shape, b.layout)
    assert a.requires_grad == b.requires_grad
    assert a._is_view() == b._is_view()
    if a.layout is torch.strided and not a.is_nested:
        assert a.stride() == b.stride()
        raw = (t.resolve_conj().resolve_neg().detach().contiguous() for t in (a, b))
        left, right = (t.view(-1).view(torch.uint8) if t.numel() else t for t in raw)
        assert torch.equal(left, right)
    else:
        same(a.to_dense(), b.to_dense())


class Point(NamedTuple):
    x: Any
    y: Any


class Bag(dict[str, Any]):
    pass


class Custom:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom) and pickle.dumps(self.value) == pickle.dumps(other.value)

    __hash__ = None  # type: ignore[assignment]  # compared by value


class Sub(torch.Tensor):
    pass
