"""Fast versions of numpy functions that take several times as long."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Item = TypeVar("Item", bound=np.generic)


def some(mask: NDArray[np.bool_]) -> bool:
    """Like mask.any(): 0.2 us instead of 0.9 at 256 entries (numpy 2.4, 2-core AMD EPYC)."""
    return bool(np.count_nonzero(mask))


def every(mask: NDArray[np.bool_]) -> bool:
    """Like mask.all().

    >>> every(np.array([True, True])), some(np.array([False, False]))
    (True, False)
    """
    return bool(np.count_nonzero(mask) == mask.size)


def unique(ids: NDArray[Item]) -> NDArray[Item]:
    """(k,) the distinct numbers, ascending.

    `np.unique` alone hashes integers since numpy 2.3, which takes ten times as long as sorting, or
    more, on hundreds of thousands; with return_index it sorts.

    >>> unique(np.array([3, 1, 3])).tolist()
    [1, 3]
    """
    out: NDArray[Item] = np.unique(ids, return_index=True)[0]
    return out
