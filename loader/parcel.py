"""A batch's parcel: `transport`'s packing together with the descriptors of new slots."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch.utils.data._utils.collate import default_collate

from creel.cache.slots import SlotReader, SlotWriter
from creel.limits import may_keep
from creel.loader.overlay import over
from creel.loader.transport import Packed, discard, pack, slot_collate, unpack

Collate: TypeAlias = Callable[[Sequence[object]], object]


class Parcel(NamedTuple):
    """What goes over the wire: (id, bytes) of each slot whose descriptor comes along, the batch."""

    new: tuple[tuple[int, int], ...]
    packed: Packed


class Outbox:
    """The worker's side."""

    def __init__(self, slots: int) -> None:
        self._writer = SlotWriter(max_slots=slots if may_keep() else 0)
        self.take_back = self._writer.give_back

    def collate(self, collate_fn: Collate) -> Collate:
        """The same function, or for torch's own one that collates right into a slot."""
        if collate_fn is default_collate:
            return functools.partial(slot_collate, writer=self._writer)
        return collate_fn

    def memory(self, nbytes: int) -> torch.Tensor:
        """(nbytes,) uint8 of the batch in the making, right in a slot if there is one to be had."""
        try:
            slot, offset = self._writer.room(nbytes)
        except OSError:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return over(slot.buffer(), nbytes, offset)

    def pack(self, data: object) -> tuple[Parcel, list[int]]:
        """The parcel and the descriptors to send with it. Raises whatever pickling raises."""
        packed = pack(data, self._writer)
        unsent = self._writer.unsent()
        return Parcel(tuple((i, n) for i, _, n in unsent), packed), [fd for _, fd, _ in unsent]


class Inbox:
    """The trainer's side, for one worker. `accept` comes first for each parcel, in their order."""

    def __init__(self, max_leased: int) -> None:
        self._reader = SlotReader(max_leased=max_leased)
        self.take_freed = self._reader.returned

    def accept(self, parcel: Parcel, fds: list[int]) -> Packed:
        """Take in the new slots and close their descriptors.

        Raises:
            OSError: no room for a slot, mapped or copied.
            MemoryError: likewise.
        """
        try:
            for (number, nbytes), fd in zip(parcel.new, fds, strict=True):
                self._reader.adopt(number, fd, nbytes)
        finally:
            for fd in fds:
                os.close(fd)
        return parcel.packed

    def unpack(self, packed: Packed) -> object:
        """The batch; raises whatever unpickling raises."""
        return unpack(packed, self._reader)

    def discard(self, packed: Packed) -> None:
        """Give back what a batch holds that nobody wants."""
        discard(packed, self._reader)

    def close(self) -> None:
        """Forget all slots; tensors over them stay valid."""
        self._reader.close()
