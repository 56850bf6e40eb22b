"""Pinned (page-locked) memory, from which accelerators copy while the trainer goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from creel.loader.torch_private import BaseDataLoaderIter, pin_memory


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

    def for_cuda(self) -> bool:
        """Whether `pin` need not copy the memory that `pinned` returns."""
        return (self.kind or "cuda").startswith("cuda") and torch.cuda.is_available()


def pinned(nbytes: int) -> torch.Tensor:
    """Return (nbytes,) uint8 of torch's pinned memory for CUDA.

    Only torch's own memory will do: torch reuses it when its pending copies to a device
    (`non_blocking=True`) have ended. The end of a tensor says nothing about them.
    """
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


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
