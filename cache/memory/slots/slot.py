"""One slot: memory that carries a batch, or one large part of it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from dataclasses import dataclass
from typing import TypeAlias

# Windows has neither flag; it imports this module but makes no slots.
POPULATE = getattr(mmap, "MAP_SHARED", 0) | getattr(mmap, "MAP_POPULATE", 0)
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it

#: The exporter that tensors and arrays over a slot keep alive, and that dies with the last of them.
#: A numpy array could die before its views, as a view of a view refers to the base below.
Buffer: TypeAlias = "ctypes.Array[ctypes.c_char]"


def exporter(mapping: mmap.mmap | bytearray) -> Buffer:
    """Return the exporter of all bytes of a mapping."""
    return (ctypes.c_char * len(mapping)).from_buffer(mapping)


@dataclass(eq=False)
class Slot:
    """A slot as the worker sees it, mapped at `address`.

    `fd` is -1 for an inherited slot, which the trainer has already.
    """

    id: int  # as the trainer and the worker number it
    fd: int  # its memfd
    nbytes: int  # of its memory
    once: bool  # whether it carries one batch only
    mapping: mmap.mmap  # of its memory
    address: int  # of the first byte, in this process
    untouched: bool = False  # whether its pages are missing in this process's page tables
    filled: int = 0  # bytes used by the current batch
    large: int = 0  # bytes of the large part of this batch that has it alone; 0: parts share it
    handed_over: bool = False  # whether the trainer uses it
    # The exporter that tensors over the slot in this process (from collate) keep alive.
    local: weakref.ref[Buffer] | None = None

    def buffer(self) -> Buffer:
        """Return the exporter for tensors over the slot in the worker."""
        buffer = self.local() if self.local is not None else None
        if buffer is None:
            buffer = exporter(self.mapping)
            self.local = weakref.ref(buffer)
        return buffer

    @property
    def idle(self) -> bool:
        """Whether neither the trainer nor a tensor in this process uses the slot."""
        return not self.handed_over and (self.local is None or self.local() is None)

    def touch(self) -> None:
        """Map all pages of an inherited slot at once, in half the time of a fault for each."""
        self.untouched = False
        with contextlib.suppress(OSError):  # an older kernel: pages are mapped one by one
            self.mapping.madvise(_MADV_POPULATE_WRITE)

    def close(self) -> None:
        """Close the descriptor; the memory is freed with the last mapping."""
        if self.fd >= 0:
            os.close(self.fd)
        with contextlib.suppress(BufferError):  # a tensor in this process still uses it
            self.mapping.close()
