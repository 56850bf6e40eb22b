"""Fields: takes records apart into their fields, as dicts of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from creel.loader.data.datasets.records import torch_dtype


class Fields:
    """Takes records apart into their fields: views, without a copy.

    Attributes:
        parts: name, type and shape of each, and its first byte in a record, and the byte behind it.
    """

    def __init__(self, layout: np.dtype[Any]) -> None:
        """Raises ConfigError for a type that torch lacks."""
        self.parts: list[tuple[str, torch.dtype, tuple[int, ...], int, int]] = []
        self._nbytes = layout.itemsize
        fields: Mapping[str, Any] = layout.fields or {}
        for name in layout.names or ():
            kind, offset = fields[name][:2]
            dtype = torch_dtype(kind.base)
            self.parts.append((name, dtype, kind.shape, offset, offset + kind.itemsize))

    def rows(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return (n, ...) tensors of (n, nbytes) records."""
        n = len(rows)
        return {
            name: rows[:, start:stop].view(dtype).view(n, *shape)
            for name, dtype, shape, start, stop in self.parts
        }

    def empty(
        self, n: int, memory: Callable[[int], torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], list[tuple[memoryview, ...]]]:
        """Return (n, ...) tensors in `memory(nbytes)`, and for each record where its bytes go."""
        fields, end = {}, 0
        columns: list[list[memoryview]] = []  # (n,) buffers each
        for name, dtype, shape, start, stop in self.parts:
            columns.append([memoryview(bytearray(start - end))] * n)  # between the fields
            flat = memory(n * (stop - start))
            fields[name] = flat.view(dtype).view(n, *shape)
            columns.append([row.data for row in flat.numpy().reshape(n, stop - start)])
            end = stop
        columns.append([memoryview(bytearray(self._nbytes - end))] * n)
        return fields, list(zip(*(column for column in columns if len(column[0])), strict=True))

    def __call__(self, record: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the fields of one (nbytes,) record."""
        return {name: rows[0] for name, rows in self.rows(record[None]).items()}


class Then:
    """One function after another, as one that pickles."""

    def __init__(self, first: Callable[[Any], Any], second: Callable[[Any], Any]) -> None:
        self._first, self._second = first, second

    def __call__(self, given: torch.Tensor) -> Any:
        return self._second(self._first(given))
