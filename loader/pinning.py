"""Pinned (page-locked) memory, which accelerators copy from while the trainer goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from creel.loader.torch_private import BaseDataLoaderIter, pin_memory


@dataclass(frozen=True)
class Pinning:
    """How an iterator pins its batches: `kind` of accelerator, and the index of the device."""

    kind: str | None  # None: the one there is; older torch leaves it open
    index: int

    @classmethod
    def of(cls, iterator: BaseDataLoaderIter) -> Pinning | None:
        """Return how `iterator` pins for the device that is current now; None if it does not."""
        if not iterator._pin_memory:  # noqa: SLF001  torch's
            return None
        kind = iterator._pin_memory_device or None  # noqa: SLF001
        return cls(kind, _current_and_set(kind)[0]())

    def use_device(self) -> None:
        """Have the calling thread use the device; a new thread would use the first."""
        _current_and_set(self.kind)[1](self.index)

    def pin(self, data: Any) -> Any:
        """Return `data` with its tensors in pinned memory; those that are there are not copied."""
        return pin_memory(data, self.kind)  # type: ignore[no-untyped-call]  # torch's

    def for_cuda(self) -> bool:
        """Whether `pinned` gives memory that `pin` need not copy."""
        return (self.kind or "cuda").startswith("cuda") and torch.cuda.is_available()


def pinned(nbytes: int) -> torch.Tensor:
    """Return (nbytes,) uint8 of torch's pinned memory for CUDA.

    Only torch's own will do: it reuses such memory when the copies to a device that were asked for
    (`non_blocking=True`) have ended. The end of a tensor says nothing about them.
    """
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def _current_and_set(kind: str | None) -> tuple[Callable[[], int], Callable[[int], object]]:
    """Functions that give and set a thread's device, in any torch."""
    known = getattr(torch, "accelerator", None)
    for current, set_to in (
        ("current_device_index", "set_device_index"),
        ("current_device_idx", "set_device_idx"),  # torch 2.6 and 2.7
    ):
        if hasattr(known, current):
            return getattr(known, current), getattr(known, set_to)
    module = getattr(torch, kind or "cuda")
    return module.current_device, module.set_device
