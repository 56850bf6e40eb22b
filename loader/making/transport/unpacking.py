"""Unpack a batch in the trainer: tensors and arrays are built right over the slot.

The inverse of `packing.pack`.
"""

from __future__ import annotations

import pickle
import struct
import threading
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from creel.cache.memory.slots.reader import SlotReader
from creel.cache.memory.slots.slot import Buffer
from creel.cache.memory.slots.writer import TINY
from creel.errors import IllegalEventError
from creel.loader.data.buffers import over

#: Dtypes of packed tensors, numbered by their position in DTYPES. torch pickles all others.
_NAMES = (
    *("float32", "float64", "float16", "bfloat16", "complex64", "complex128", "complex32"),
    *("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
DTYPES = tuple(getattr(torch, name) for name in _NAMES if hasattr(torch, name))


class Packed(NamedTuple):
    """A packed batch: plain values that pickle in a microsecond.

    Attributes:
        slots: (id, whether it is used only once) of each slot of the batch.
        retired: ids of slots that the worker has given up.
        parts: one packed `Part` per storage.
        pickle: of the batch; empty if it lies in a slot, followed by the rows of `parts`.
        where: of that pickle: (slot number, offset, bytes).
        small: the bytes of all storages of a batch without slots.
    """

    slots: tuple[tuple[int, bool], ...]
    retired: tuple[int, ...]
    parts: bytes
    pickle: bytes
    small: bytes
    where: tuple[int, int, int] | None = None


class Part(NamedTuple):
    """Where a storage's bytes are: `nbytes` at `offset` of the batch's slot number `slot`.

    Slot -1 is `Packed.small`. The first `cut` bytes of the storage were left out.
    """

    slot: int
    offset: int
    nbytes: int
    cut: int


PART = struct.Struct("<4q")


class _Arrival:
    """The storages of a batch while this thread unpickles it."""

    def __init__(self, packed: Packed, reader: SlotReader) -> None:
        self._packed = packed
        self._reader = reader
        self._leases: list[Buffer | None] = [None] * len(packed.slots)
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._rows = memoryview(packed.parts)

    def load(self) -> object:
        """Unpickle and return the batch."""
        packed = self._packed
        source: bytes | memoryview = packed.pickle
        if packed.where is not None:
            number, offset, length = packed.where
            view = self._reader.view(packed.slots[number][0])
            source = view[offset : offset + length]
            self._rows = view[offset + length :]
        before = getattr(_local, "arrival", None)  # unpickling one batch may unpack another
        _local.arrival = self
        try:
            return pickle.loads(source)  # noqa: S301  from our own worker
        finally:
            _local.arrival = before

    def release(self) -> None:
        """Give back the slots that no tensor uses; others return when their tensors die."""
        for (slot_id, once), lease in zip(self._packed.slots, self._leases, strict=True):
            if lease is None:
                self._reader.release(slot_id, once=once)

    def part(self, number: int) -> Part:
        return Part._make(PART.unpack_from(self._rows, number * PART.size))

    def buffer(self, part: Part) -> tuple[object, int]:
        """Return (buffer, offset) for one tensor or array; the buffer is writable, not shared."""
        if part.slot < 0:
            return _copied(self._packed.small, part), 0
        lease = self._leases[part.slot]
        if part.nbytes <= TINY or (lease is None and self._reader.full):
            return _copied(self._reader.view(self._packed.slots[part.slot][0]), part), 0
        if lease is None:
            slot_id, once = self._packed.slots[part.slot]
            lease = self._leases[part.slot] = self._reader.lease(slot_id, once=once)
        return lease, part.offset

    def storage(self, number: int, part: Part) -> torch.UntypedStorage:
        """Return storage `number`, the same object at each call."""
        if number not in self._storages:
            if part.nbytes:
                buffer, offset = self.buffer(part)
                built = over(buffer, part.nbytes, offset)
            else:
                built = torch.empty(0, dtype=torch.uint8, device="cpu")
            self._storages[number] = built.untyped_storage()
        return self._storages[number]


def _copied(source: bytes | memoryview, part: Part) -> NDArray[np.uint8]:
    """Return a copy of the bytes of a part, (nbytes,)."""
    return np.frombuffer(source, np.uint8, part.nbytes, part.offset).copy()


_local = threading.local()


def _arriving() -> _Arrival:
    arrival: _Arrival | None = getattr(_local, "arrival", None)
    if arrival is None:
        raise IllegalEventError("a packed batch can only be read by `unpack`")
    return arrival


def arrived_tensor(
    number: int, code: int, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    """Return a tensor over storage `number` of the batch being unpickled; dtype DTYPES[code]."""
    arrival = _arriving()
    part = arrival.part(number)
    tensor = torch.empty(0, dtype=DTYPES[code], device="cpu")  # whatever the default device
    start = offset - part.cut // tensor.itemsize if part.nbytes else 0
    return tensor.set_(arrival.storage(number, part), start, shape, stride)


def arrived_storage(number: int) -> torch.UntypedStorage:
    """Return storage `number` of the batch being unpickled."""
    arrival = _arriving()
    return arrival.storage(number, arrival.part(number))


def arrived_array(
    number: int,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    order: Literal["C", "F"],
    writable: bool,
) -> NDArray[Any]:
    """Return a numpy array over storage `number` of the batch being unpickled."""
    arrival = _arriving()
    buffer, offset = arrival.buffer(arrival.part(number))
    array: NDArray[Any] = np.ndarray(shape, dtype, cast(Any, buffer), offset, order=order)
    array.flags.writeable = writable
    return array


def unpack(packed: Packed, reader: SlotReader) -> object:
    """Return the batch as torch would deliver it, with its large tensors in slots.

    New slots must be mapped before. Once `reader.max_leased` slots are leased, tensors are copied.

    Raises:
        IllegalEventError: a slot was not mapped.
        Exception: unpickling the batch failed; its slots are given back.
    """
    arrival = _Arrival(packed, reader)
    try:
        return arrival.load()
    finally:
        arrival.release()
        if packed.retired:
            reader.unmap(list(packed.retired))


def discard(packed: Packed, reader: SlotReader) -> None:
    """Give back the slots of a batch without reading it."""
    for slot_id, once in packed.slots:
        reader.release(slot_id, once=once)
    reader.unmap(list(packed.retired))
