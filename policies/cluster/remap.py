"""Exchange samples among the ranks of a global batch, so that each node mostly reads its own. Pure.

Each step still reads the samples that torch deals to it, and gradients averaged over all ranks are
the same; which rank reads which of them differs. Every sample has an *affinity*, the node of rank
`sample % world`, and goes there as far as that node's ranks have room in the step. It depends on
nothing but the ranks of the job: all ranks exchange alike without asking each other, from the first
epoch on and whatever caches hold, and a run that is repeated reads the same.

A node reads the same samples in each epoch, so placement keeps them there. Only samples for which
their node has no room in the step move. If a node reads b samples in a step, those with affinity to
it are b on average, with a standard deviation of about sqrt(b), so 1 / sqrt(2 pi b) of all move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from creel.policies.arrays import Ids

#: Samples that are exchanged at once, in whole steps.
_PIECE = 1 << 20


class Exchange(NamedTuple):
    """How samples are exchanged within each global batch.

    Args:
        node_of: the node of each rank.
        batch: samples of a rank in a step; the last step of an epoch may have fewer.
    """

    node_of: tuple[int, ...]
    batch: int

    @property
    def moves(self) -> bool:
        """Whether there are several nodes; else all stay as they are dealt."""
        return len(set(self.node_of)) > 1

    def apply(self, dealt: Ids) -> Ids:
        """Return (k,) `dealt` exchanged; each step has the samples that it had.

        Args:
            dealt: (k,) samples from the beginning of a step on; sample i goes to rank i % world.

        >>> Exchange((0, 1), 1).apply(np.array([1, 0, 2, 3], np.int32)).tolist()
        [0, 1, 2, 3]
        """
        node_of = np.array(self.node_of, np.uint16)
        whole = self.batch * len(node_of)
        full = len(dealt) // whole * whole
        piece = max(_PIECE // whole, 1) * whole
        pieces = [dealt[at : min(at + piece, full)] for at in range(0, full, piece)]
        out = [_exchanged(some.reshape(-1, whole), node_of) for some in pieces]
        if full < len(dealt):
            out.append(_exchanged(dealt[full:].reshape(1, -1), node_of))
        return np.concatenate(out) if out else dealt


def nodes_alike(names: Sequence[str]) -> tuple[int, ...]:
    """The node of each rank, from the name of its node: numbered as they first come.

    >>> nodes_alike(["b", "a", "b"])
    (0, 1, 0)
    """
    numbers = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return tuple(numbers[name] for name in names)


def _exchanged(steps: Ids, node_of: NDArray[np.uint16]) -> Ids:
    """(steps * whole,) samples of full steps (steps, whole), exchanged within each."""
    whole = steps.shape[1]
    node_at = np.resize(node_of, whole)
    places = node_at.argsort(kind="stable")  # by node
    room = np.bincount(node_at)
    first_place = room.cumsum() - room
    affinity = node_of[steps % len(node_of)]
    samples = affinity.argsort(axis=1, kind="stable")  # (radix sort, as nodes have 16 bits)
    affinity = np.take_along_axis(affinity, samples, axis=1)
    # Of the samples with affinity to a node, the i-th takes its i-th place, while there is one.
    row = np.arange(len(steps))[:, None]
    count = np.bincount((row * len(room) + affinity).ravel(), minlength=len(steps) * len(room))
    count = count.reshape(len(steps), -1)
    nth = np.arange(whole) - np.take_along_axis(count.cumsum(1) - count, affinity, axis=1)
    stays = nth < room[affinity]
    flat = row * whole
    out = np.full(steps.size, -1, np.int32)
    given = steps.ravel()
    place = places[(first_place[affinity] + nth) * stays]
    out[(flat + place)[stays]] = given[(flat + samples)[stays]]
    out[out < 0] = given[np.sort((flat + samples)[~stays])]  # both ascend by step
    return out
