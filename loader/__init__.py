"""The training-process side of creel. Names load at first use, since importing torch is slow."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from creel.loader.dataloader import DataLoader as DataLoader

__all__ = ["DataLoader"]

if not TYPE_CHECKING:

    def __getattr__(name):
        """Import `DataLoader` (and torch) at its first use."""
        if name == "DataLoader":
            from creel.loader.dataloader import DataLoader

            return DataLoader
        raise AttributeError(f"module 'creel.loader' has no attribute {name!r}")
