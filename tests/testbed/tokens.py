"""Indexed tokens as Megatron's `IndexedDatasetBuilder` writes them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

_CODES = {"u1": 1, "i1": 2, "i2": 3, "i4": 4, "i8": 5, "f8": 6, "f4": 7, "u2": 8}


def write_tokens(prefix: Path, documents: Sequence[Any]) -> Path:
    """Write `prefix`.bin and .idx; all documents are arrays of one type. Returns the prefix."""
    Path(f"{prefix}.bin").write_bytes(b"".join(document.tobytes() for document in documents))
    lengths = np.array([len(document) for document in documents], "<i4")
    starts = np.cumsum([0, *(document.nbytes for document in documents)])[:-1].astype("<i8")
    count, code = len(documents), _CODES[documents[0].dtype.str[1:]]
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, code, count, count + 1)
    ends = np.arange(count + 1, dtype="<i8").tobytes()
    Path(f"{prefix}.idx").write_bytes(head + lengths.tobytes() + starts.tobytes() + ends)
    return prefix
