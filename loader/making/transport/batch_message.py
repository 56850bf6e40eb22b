"""The message that carries a batch: the packed batch and its new slots, sent with descriptors."""

from __future__ import annotations

import errno
import functools
import mmap
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch.utils.data import default_collate

from creel.cache.memory.slots.reader import SlotReader
from creel.cache.memory.slots.slot import Slot
from creel.cache.memory.slots.writer import SlotWriter
from creel.loader.data.buffers import over
from creel.loader.making.transport.packing import pack, slot_collate
from creel.loader.making.transport.unpacking import Packed
from creel.system.limits import may_keep

Collate: TypeAlias = Callable[[Sequence[object]], object]


class BatchMessage(NamedTuple):
    """A packed batch, and (id, nbytes) of each new slot; the slots' descriptors are sent along."""

    new: tuple[tuple[int, int], ...]
    packed: Packed


class Outbox(SlotWriter):
    """The worker's side: packs batches into slots."""

    def __init__(self, slots: int, inherited: Sequence[mmap.mmap] = ()) -> None:
        super().__init__(max_slots=slots if may_keep() else 0, inherited=inherited)

    def collate(self, collate_fn: Collate) -> Collate:
        """Return `collate_fn`, or for default_collate a version that collates right into a slot."""
        if collate_fn is default_collate:
            return functools.partial(slot_collate, writer=self)
        return collate_fn

    def memory(self, nbytes: int) -> torch.Tensor:
        """Return (nbytes,) uint8 for the batch being made, in a slot if one is available."""
        try:
            slot, offset = self.room(nbytes)
        except OSError:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return over(slot.buffer(), nbytes, offset)

    def pack(self, data: object) -> tuple[BatchMessage, list[int]]:
        """Return the message and the descriptors to send with it; raises what pickling raises."""
        packed = pack(data, self)
        unsent = self.unsent()
        new = tuple((number, nbytes) for number, _, nbytes in unsent)
        return BatchMessage(new, packed), [fd for _, fd, _ in unsent]

    def without_slots(self, data: object, lost: BatchMessage) -> BatchMessage:
        """Pack the batch again without slots, after the trainer received no new slot of `lost`."""
        message = BatchMessage((), pack(data, _NoSlots(max_slots=0)))
        self.give_back([~number for number, _ in lost.new])
        return message


class _NoSlots(SlotWriter):
    def take(self, nbytes: int, position: int = 0) -> Slot:  # noqa: ARG002
        raise OSError(errno.EMFILE, f"no descriptor for {nbytes} bytes")


class Inbox(SlotReader):
    """The trainer's side, for one worker. Each message must be accepted first, in order."""

    def accept(self, message: BatchMessage, fds: list[int]) -> Packed:
        """Map the new slots and close their descriptors.

        Raises:
            OSError, MemoryError: a slot could be neither mapped nor copied.
        """
        try:
            for (number, nbytes), fd in zip(message.new, fds, strict=True):
                self.map_slot(number, fd, nbytes)
        finally:
            for fd in fds:
                os.close(fd)
        return message.packed
