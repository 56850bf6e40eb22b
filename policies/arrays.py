"""Array types, and faster versions of some numpy functions. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

#: Object ids: the type numpy indexes with, and the smaller one of plans and messages.
Index: TypeAlias = NDArray[np.intp]
Ids: TypeAlias = NDArray[np.int32]
#: Bytes, places, versions, steps, or numbers of samples.
Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Mask: TypeAlias = NDArray[np.bool_]

Item = TypeVar("Item", bound=np.generic)

NONE: Index = np.empty(0, np.intp)
NO_IDS: Ids = np.empty(0, np.int32)


def joined(parts: Sequence[Index]) -> Index:
    """Concatenate arrays; return a single one without a copy."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else NONE


def some(mask: Mask) -> bool:
    """Like mask.any(): 0.2 us instead of 0.9 at 256 entries (numpy 2.4, 2-core AMD EPYC)."""
    return bool(np.count_nonzero(mask))


def every(mask: Mask) -> bool:
    """Like mask.all().

    >>> every(np.array([True, True])), some(np.array([False, False]))
    (True, False)
    """
    return bool(np.count_nonzero(mask) == mask.size)


def unique(ids: NDArray[Item]) -> NDArray[Item]:
    """Return (k,) the distinct values, ascending.

    Since numpy 2.3 `np.unique` hashes integers, which takes at least ten times as long as sorting
    for hundreds of thousands of them. With return_index it sorts.

    >>> unique(np.array([3, 1, 3])).tolist()
    [1, 3]
    """
    out: NDArray[Item] = np.unique(ids, return_index=True)[0]
    return out
