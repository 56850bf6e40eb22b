"""Pack a batch into slots in a worker; its trainer receives it as torch would deliver it.

`pack` pickles the batch with torch's own reductions (`torch.multiprocessing`), but puts the bytes
of CPU storages and of large numpy arrays into a slot instead of new shared memory. A long pickle
goes into a slot too, so the message has a few hundred bytes. `unpack` builds the tensors right over
the slot. Types, shapes, strides, values and aliasing within the batch are torch's. Two things
differ: a storage far larger than the part that the batch's tensors use is cut to that part; and a
tensor that the worker sends twice arrives as two, since nothing is shared with the worker.

`slot_collate` is torch's `default_collate`, except that it stacks right into the slot where `pack`
expects the data, so each sample is copied once.
"""

from __future__ import annotations

import copyreg
import ctypes
import pickle
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.multiprocessing import reductions

from creel.cache.memory.slots.slot import Slot
from creel.cache.memory.slots.writer import TINY, SlotWriter
from creel.loader.data.buffers import over
from creel.loader.making.transport.unpacking import (
    DTYPES,
    PART,
    Packed,
    Part,
    arrived_array,
    arrived_storage,
    arrived_tensor,
)
from creel.loader.torch_private import collate as torch_collate

_INLINE = 2048  # most bytes of pickle and storages sent in the message instead of a slot
_SLACK = 1 << 16  # unused bytes of a storage up to which it is not cut
_ARRAY = 1024  # smallest numpy array, in bytes, that goes into the slot

_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}

Reduction: TypeAlias = "tuple[Callable[..., object], tuple[object, ...]] | str"
CollateMap: TypeAlias = "dict[type | tuple[type, ...], Callable[..., object]]"

# torch leaves these untyped
_reduce_tensor = cast("Callable[[torch.Tensor], Reduction]", reductions.reduce_tensor)
_reduce_storage = cast("Callable[[torch.UntypedStorage], Reduction]", reductions.reduce_storage)


class _Storage:
    """A storage or array of the batch: its used bytes, and the object that keeps it alive."""

    __slots__ = ("address", "high", "keep", "low", "nbytes")

    def __init__(self, keep: object, address: int, nbytes: int) -> None:
        self.keep = keep
        self.address = address
        self.nbytes = nbytes
        self.low = nbytes
        self.high = 0

    def use(self, low: int, high: int) -> None:
        """Mark bytes [low, high) as used."""
        if low < high:
            self.low = min(self.low, low)
            self.high = max(self.high, high)

    def span(self) -> tuple[int, int]:
        """Return the bytes to send as [low, high): all, unless a large part is unused."""
        used = max(self.high - self.low, 0)
        if self.nbytes <= 2 * used + _SLACK:
            return 0, self.nbytes
        # Multiples of 64 are multiples of every item size, and aligned for vector code.
        return (self.low & ~63, self.high) if used else (0, 0)

    def read(self, low: int, high: int) -> bytes:
        return ctypes.string_at(self.address + low, high - low) if high > low else b""

    def write(self, low: int, high: int, slot: Slot, at: int) -> None:
        """Copy bytes [low, high) into a slot, releasing the GIL."""
        ctypes.memmove(slot.address + at, self.address + low, high - low)


class _Array(_Storage):
    """A numpy array: its elements in the order of its pickle."""

    __slots__ = ("order",)

    def __init__(self, array: NDArray[Any], order: Literal["C", "F"]) -> None:
        super().__init__(array, 0, array.nbytes)
        self.use(0, array.nbytes)
        self.order = order

    def read(self, low: int, high: int) -> bytes:
        return cast("NDArray[Any]", self.keep).tobytes(self.order)[low:high]

    def write(self, low: int, high: int, slot: Slot, at: int) -> None:  # noqa: ARG002  always whole
        array = cast("NDArray[Any]", self.keep)
        there: NDArray[Any] = np.ndarray(
            array.shape, array.dtype, buffer=slot.mapping, offset=at, order=self.order
        )
        there[...] = array


class _Dispatch(dict[type, Callable[[Any], Any]]):
    """A dispatch table that falls back to ForkingPickler's without copying it."""

    __slots__ = ()
    #: Reductions registered by torch and others; ForkingPickler has no public access to them.
    theirs: dict[type, Callable[[Any], Any]] = vars(ForkingPickler)["_extra_reducers"]

    def __missing__(self, kind: type) -> Callable[[Any], Any]:
        return self.theirs.get(kind) or copyreg.dispatch_table[kind]


class _Packer:
    """Pickles one batch, and collects its storages instead of pickling them."""

    def __init__(self) -> None:
        self.storages: list[_Storage] = []
        self._numbers: dict[int, int] = {}  # address of the StorageImpl -> number

    def dump(self, batch: object) -> list[bytes]:
        """Return the pickle in pieces. Raises what pickling `batch` raises."""
        sink = _Sink()
        pickler = pickle.Pickler(cast(Any, sink), pickle.DEFAULT_PROTOCOL)
        pickler.dispatch_table = self._dispatch()
        pickler.dump(batch)
        return sink.pieces

    def _dispatch(self) -> _Dispatch:
        """Return the dispatch table: torch's reductions become ours, unless already replaced."""
        table = _Dispatch()
        theirs = table.theirs
        if theirs.get(torch.Tensor) is _reduce_tensor:
            table[torch.Tensor] = self._tensor
        if theirs.get(torch.UntypedStorage) is _reduce_storage:
            table[torch.UntypedStorage] = self._untyped
        if np.ndarray not in theirs and np.ndarray not in copyreg.dispatch_table:
            table[np.ndarray] = self._array
        return table

    def _tensor(self, tensor: torch.Tensor) -> Reduction:
        code = _CODES.get(tensor.dtype)
        if code is None or not _is_plain(tensor):
            return _reduce_tensor(tensor)
        number, storage = self._number(tensor.untyped_storage())
        shape, stride = tuple(tensor.shape), tensor.stride()
        offset = int(tensor.storage_offset())
        itemsize = tensor.itemsize
        if tensor.is_contiguous():
            storage.use(offset * itemsize, offset * itemsize + tensor.nbytes)
        elif 0 not in shape:
            last = sum([(n - 1) * s for n, s in zip(shape, stride, strict=True)])
            storage.use(offset * itemsize, (offset + last + 1) * itemsize)
        return arrived_tensor, (number, code, offset, shape, stride)

    def _untyped(self, storage: torch.UntypedStorage) -> Reduction:
        if storage.device.type != "cpu" or not storage.nbytes():
            return _reduce_storage(storage)
        number, entry = self._number(storage)
        entry.use(0, entry.nbytes)
        return arrived_storage, (number,)

    def _array(self, array: NDArray[Any]) -> Reduction:
        protocol = pickle.DEFAULT_PROTOCOL
        # numpy's own pickle (protocol 4) converts arrays of the other byte order.
        if array.nbytes < _ARRAY or array.dtype.hasobject or not array.dtype.isnative:
            return cast(Reduction, array.__reduce_ex__(protocol))
        order: Literal["C", "F"] = "F" if array.flags.fnc else "C"
        # Before protocol 5, a read-only array becomes writable when it is pickled.
        writable = protocol < 5 or array.flags.writeable or not array.flags.forc
        self.storages.append(_Array(array, order))
        number = len(self.storages) - 1
        return arrived_array, (number, array.dtype, array.shape, order, writable)

    def _number(self, storage: torch.UntypedStorage) -> tuple[int, _Storage]:
        key = storage._cdata  # noqa: SLF001  torch's own key of a storage
        number = self._numbers.get(key)
        if number is None:
            self.storages.append(_Storage(storage, storage.data_ptr(), storage.nbytes()))
            number = self._numbers[key] = len(self.storages) - 1
        return number, self.storages[number]


class _Sink:
    """A file that keeps its pieces as written: long bytes are copied only to the slot."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.write = self.pieces.append


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether storage bytes, shape and strides alone determine a tensor."""
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_nested
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor._is_zerotensor()  # noqa: SLF001  no public name
    )


def pack(batch: object, writer: SlotWriter) -> Packed:
    """Pack a batch into slots. Afterwards send `writer.unsent()` and the result.

    If no slot is available, for lack of descriptors or memory, the result holds the whole batch.

    Raises:
        Exception: pickling `batch` failed; its slots are free again.
    """
    try:
        packer = _Packer()
        pieces = packer.dump(batch)
        load = _Load(writer, packer.storages, pieces)
        try:
            return load.packed()
        except OSError:
            return load.inline()
    except BaseException:
        writer.abandon()
        raise


class _Load:
    """Places the storages and pickle of one batch in slots or in the message."""

    def __init__(self, writer: SlotWriter, storages: list[_Storage], pieces: list[bytes]) -> None:
        self._writer = writer
        self._storages = storages
        self._pieces = pieces
        self._slots: dict[int, int] = {}  # slot id -> number in this batch

    def packed(self) -> Packed:
        length = sum(map(len, self._pieces))
        spans = [storage.span() for storage in self._storages]
        total = length + sum(high - low for low, high in spans)
        if total + PART.size * len(spans) <= _INLINE:
            return self.inline()
        # The largest first: tiny ones find room behind them.
        order = sorted(range(len(spans)), key=lambda i: spans[i][0] - spans[i][1])
        parts = {i: self._place(self._storages[i], spans[i]) for i in order}
        rows = b"".join([PART.pack(*parts[i]) for i in range(len(spans))])
        where = None
        if length + len(rows) > _INLINE:
            where = self._write_pickle(length, rows)
        slots = self._writer.seal()
        # In order of their numbers; a slot that only collate filled has none.
        slots.sort(key=lambda slot: self._slots.get(slot.id, len(slots)))
        return Packed(
            slots=tuple((slot.id, slot.once) for slot in slots),
            retired=tuple(self._writer.retired()),
            parts=b"" if where else rows,
            pickle=b"" if where else b"".join(self._pieces),
            small=b"",
            where=where,
        )

    def inline(self) -> Packed:
        """Put the whole batch in the message."""
        blocks, parts, at = [], [], 0
        for storage in self._storages:
            low, high = storage.span()
            parts.append(PART.pack(-1, at, high - low, low))
            blocks.append(storage.read(low, high))
            at += high - low
        self._writer.abandon()  # collate may have begun a slot
        retired = tuple(self._writer.retired())
        return Packed((), retired, b"".join(parts), b"".join(self._pieces), b"".join(blocks))

    def _place(self, storage: _Storage, span: tuple[int, int]) -> Part:
        low, high = span
        if low == high:
            return Part(-1, 0, 0, low)
        held = self._writer.holds(storage.address + low, high - low) if storage.address else None
        if held is None:
            slot, at = self._writer.room(high - low)
            storage.write(low, high, slot, at)
        else:
            slot, at = held
        return Part(self._number(slot), at, high - low, low)

    def _write_pickle(self, length: int, rows: bytes) -> tuple[int, int, int]:
        slot, at = self._writer.room(length + len(rows))
        view, start = memoryview(slot.mapping), at
        for piece in (*self._pieces, rows):
            view[at : at + len(piece)] = piece
            at += len(piece)
        return self._number(slot), start, length

    def _number(self, slot: Slot) -> int:
        return self._slots.setdefault(slot.id, len(self._slots))


# --- collate ----------------------------------------------------------------------------------


def slot_collate(batch: Sequence[object], writer: SlotWriter) -> object:
    """`torch.utils.data.default_collate` as a worker runs it, with stacks in the slot.

    Raises what `default_collate` raises.
    """
    writer.abandon()  # frees slots of a batch whose collation failed
    theirs = cast(CollateMap, torch_collate.default_collate_fn_map)
    functions = dict(theirs)
    if functions.get(torch.Tensor) is torch_collate.collate_tensor_fn:
        functions[torch.Tensor] = _Stack(writer)
    return torch_collate.collate(batch, collate_fn_map=functions)


class _Stack:
    """`collate_tensor_fn` that writes into a slot."""

    def __init__(self, writer: SlotWriter) -> None:
        self._writer = writer

    def __call__(
        self, batch: Sequence[torch.Tensor], *, collate_fn_map: CollateMap | None = None
    ) -> torch.Tensor:
        elem = batch[0]
        if set(map(type, batch)) == {torch.Tensor} and elem.dtype in _CODES and _is_plain(elem):
            try:
                return torch.stack(cast(Any, batch), 0, out=self._out(elem, len(batch)))
            except (RuntimeError, OSError):
                pass  # sizes differ, or gradients: torch raises its own error below; or no slot
        theirs = cast("Callable[..., torch.Tensor]", torch_collate.collate_tensor_fn)
        return theirs(batch, collate_fn_map=collate_fn_map)

    def _out(self, elem: torch.Tensor, count: int) -> torch.Tensor:
        """Return memory for `count` tensors like `elem`: in a slot, unless small."""
        shape = (count, *elem.shape)
        nbytes = elem.nbytes * count
        if nbytes <= TINY:  # made outside slots, since unpacking copies it anyway
            return torch.empty(shape, dtype=elem.dtype, device="cpu")
        slot, at = self._writer.room(nbytes)
        flat = over(slot.buffer(), nbytes // elem.itemsize, at, elem.dtype)
        return flat.resize_(shape)  # in place: a view would have `_base` set
