"""Pinned (page-locked) memory, from which accelerators copy while the trainer goes on.

A batch of workers lies in slots, from which `Pinning.pin` copies it to torch's own pinned memory:
torch reuses that when its copies to a device have ended. When those from other memory have ended,
only who began them can tell. So slots that carry many batches are locked themselves, and these not
copied, if a `Lender` is asked to by somebody (`creel.prefetch_to`) who holds what it lends.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from creel.cache.memory.buffers import address_of
from creel.loader.torch_private import BaseDataLoaderIter, pin_memory

#: cudaHostRegisterPortable: the memory is locked for all devices.
_PORTABLE = 1


@dataclass(frozen=True)
class Pinning:
    """How an iterator pins its batches: `kind` of accelerator, and the index of the device."""

    kind: str | None  # None: the only kind there is, which older torch leaves open
    index: int

    @classmethod
    def of(cls, iterator: BaseDataLoaderIter) -> Pinning | None:
        """Return how `iterator` pins for the current device; None if it does not."""
        if not iterator._pin_memory:  # noqa: SLF001  torch's
            return None
        kind = iterator._pin_memory_device or None  # noqa: SLF001
        return cls(kind, _current_and_set(kind)[0]())

    def use_device(self) -> None:
        """Let the calling thread use the device; a new thread would use the first one."""
        _current_and_set(self.kind)[1](self.index)

    def pin(self, data: Any) -> Any:
        """Return `data` with its tensors in pinned memory; pinned tensors are not copied."""
        return pin_memory(data, self.kind)  # type: ignore[no-untyped-call]  # torch's

    def lock(self, mapping: mmap.mmap) -> object:
        """Lock the pages of a mapping for CUDA, and return what keeps them locked.

        Raises:
            RuntimeError: they cannot be locked.
        """
        return PageLock.of(mapping, self.index)

    def for_cuda(self) -> bool:
        """Whether `pin` need not copy the memory that `pinned` returns."""
        return (self.kind or "cuda").startswith("cuda") and torch.cuda.is_available()


class Lender:
    """An iterator whose batches can lie in memory that is used again."""

    _lent: Sequence[object] = ()

    def lend(self) -> None:
        """Lend memory from now on in this epoch: the caller calls `take_lent` after each batch."""

    def take_lent(self) -> Sequence[object]:
        """Return what is to be held until no copy from the last batch is in progress."""
        lent, self._lent = self._lent, ()
        return lent


class PageLock:
    """Registers memory with CUDA, for all devices, as long as this object lives."""

    def __init__(self, address: int, nbytes: int, device: int) -> None:
        """Lock `nbytes` at `address`, which stay mapped.

        Args:
            device: current here; in the thread in which this object dies it may not be.

        Raises:
            RuntimeError: CUDA cannot lock them.
        """
        self._address, self._device, self._pid = address, device, os.getpid()
        self._unregister: Callable[[int], Any] | None = None
        cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch's
        code = int(cuda.cudaHostRegister(address, nbytes, _PORTABLE))
        if code:
            # CUDA would also tell the next caller that asks for this thread's last error.
            with suppress(RuntimeError):
                torch.zeros(1, device=f"cuda:{device}")
            raise RuntimeError(f"CUDA cannot lock {nbytes} bytes: error {code}")
        self._unregister = cuda.cudaHostUnregister

    @classmethod
    def of(cls, mapping: mmap.mmap, device: int) -> PageLock:
        """Lock a mapping, whose owner lets the lock die first."""
        return cls(address_of(mapping), len(mapping), device)

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if self._unregister is None or ends():
            return
        if os.getpid() == self._pid:  # CUDA is not usable in a forked child
            with torch.cuda.device(self._device):  # else a new thread would begin to use device 0
                self._unregister(self._address)


def is_plain(data: Any) -> bool:
    """Whether `data` is nothing but tensors and simple values in simple containers.

    What is moved to a device then refers to nothing that `data` refers to.
    """
    kind = type(data)
    if kind in (dict, OrderedDict):
        return all(map(is_plain, data.values()))
    if kind in (list, tuple) or (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        return all(map(is_plain, data))
    return kind in (torch.Tensor, int, float, bool, str, bytes, type(None))


def pinned(nbytes: int) -> torch.Tensor:
    """Return (nbytes,) uint8 of torch's pinned memory for CUDA.

    Only torch's own memory will do: torch reuses it when its pending copies to a device
    (`non_blocking=True`) have ended. The end of a tensor says nothing about them.
    """
    return empty_pinned(nbytes, dtype=torch.uint8, device="cpu")


#: As `torch.empty`, in torch's pinned memory for CUDA.
empty_pinned = partial(torch.empty, pin_memory=True)


def _current_and_set(kind: str | None) -> tuple[Callable[[], int], Callable[[int], object]]:
    """Return the functions that get and set a thread's device, in any torch."""
    known = getattr(torch, "accelerator", None)
    for current, set_to in (
        ("current_device_index", "set_device_index"),
        ("current_device_idx", "set_device_idx"),  # torch 2.6 and 2.7
    ):
        if hasattr(known, current):
            return getattr(known, current), getattr(known, set_to)
    module = getattr(torch, kind or "cuda")
    return module.current_device, module.set_device
