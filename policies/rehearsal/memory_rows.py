"""Which samples a rehearsal memory keeps. Pure.

The content is a function of the set of samples that were offered, whatever their order: it is
mergeable, so a memory needs only what it keeps, and a sample that has left never comes back.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from creel.policies.arrays import Ints

Keys = NDArray[np.uint64]

#: The class of samples without labels.
UNLABELLED: int = -(1 << 63)
_MASK = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SEEDS = 0xD1342543DE82EF95  # odd: other seeds give other offsets


class Offered(NamedTuple):
    """Samples that a memory may keep.

    Attributes:
        uids: (n,) their numbers, unique.
        classes: (n,) what is balanced; all equal where it does not matter.
        keys: (n,) the smallest of a class are kept first.
    """

    uids: Ints
    classes: Ints
    keys: Keys

    def take(self, places: NDArray[np.intp]) -> Offered:
        return Offered(self.uids[places], self.classes[places], self.keys[places])


def mixed(numbers: NDArray[np.integer], seed: int) -> Keys:
    """Return (n,) well mixed 64-bit numbers, a function of each number and the seed.

    The output function of splitmix64 (Steele, Lea and Flood 2014), twice.
    """
    with np.errstate(over="ignore"):
        z = numbers.astype(np.uint64) * _GOLDEN + np.uint64(seed * _SEEDS & _MASK)
        return _stirred(_stirred(z) + _GOLDEN)


def _stirred(z: Keys) -> Keys:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def ascending(values: NDArray[np.float64]) -> Keys:
    """Convert (n,) numbers, none of them NaN, to keys in the same order.

    >>> np.argsort(ascending(np.array([0.5, -3.0, np.inf, 0.0]))).tolist()
    [1, 3, 0, 2]
    """
    bits = (values + 0.0).view(np.uint64)  # -0.0 becomes 0.0
    negative = bits >> np.uint64(63) == 1
    return np.where(negative, ~bits, bits | np.uint64(1 << 63))


def kept(offered: Offered, budget: int | None, seed: int) -> NDArray[np.intp]:
    """Choose at most `budget` samples, balanced over the classes; None for all.

    The first `budget` by (rank of the key within the class, hash of the class) are kept. So the
    budget is used whole; a class that has fewer samples than its share is kept whole, and the
    shares of all others differ by at most one. With hashes of the uids as keys, each sample of a
    class is kept with the same probability.

    Returns:
        (k,) places in `offered` of what is kept, by ascending uid.
    """
    uids, classes, keys = offered
    if budget is None or budget >= len(uids):
        return np.argsort(uids, kind="stable")  # of two ascending runs it takes linear time
    order = np.lexsort((uids, keys, classes))
    ordered = classes[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    sizes = np.diff(starts, append=len(order))
    ranks = np.arange(len(order)) - np.repeat(starts, sizes)
    first = np.repeat(mixed(ordered[starts], seed), sizes)
    chosen = order[np.lexsort((first, ranks))[:budget]]
    return chosen[np.argsort(uids[chosen])]


def merged(a: Offered, b: Offered) -> Offered:
    """Return the samples of both."""
    return Offered(*(np.concatenate(both) for both in zip(a, b, strict=True)))
