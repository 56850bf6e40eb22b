"""Exchange samples among the ranks of a global batch, so each node mostly reads its own. Pure.

Each step still reads the samples that torch deals to it, and gradients averaged over all ranks are
the same; only which rank reads which of them differs. Every sample has an *affinity*, the node of
rank `sample % world`, and goes to that node as far as its ranks have room in the step. This depends
only on the ranks of the job. So all ranks compute the same exchange without asking each other, from
the first epoch on and whatever caches hold, and a repeated run reads the same.

A node reads mostly the same samples in each epoch, so placement keeps them there. Only samples for
which their node has no room in the step move. If a node reads b samples in a step, those with
affinity to it are b on average, with a standard deviation of about sqrt(b), so 1 / sqrt(2 pi b) of
all samples move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from creel.policies.arrays import Ids

#: Samples processed at once, rounded to whole steps.
_SAMPLES_AT_ONCE = 1 << 20


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
        """Whether there are several nodes; a single one exchanges nothing."""
        return len(set(self.node_of)) > 1

    def apply(self, dealt: Ids) -> Ids:
        """Return (k,) `dealt` after the exchange; each step has the same samples as before.

        Args:
            dealt: (k,) samples, from the start of a step on; sample i goes to rank i % world.

        >>> Exchange((0, 1), 1).apply(np.array([1, 0, 2, 3], np.int32)).tolist()
        [0, 1, 2, 3]
        """
        node_of = np.array(self.node_of, np.uint16)
        whole = self.batch * len(node_of)
        full = len(dealt) // whole * whole
        piece = max(_SAMPLES_AT_ONCE // whole, 1) * whole
        pieces = [dealt[at : min(at + piece, full)] for at in range(0, full, piece)]
        out = [_exchanged(some.reshape(-1, whole), node_of) for some in pieces]
        if full < len(dealt):
            out.append(_exchanged(dealt[full:].reshape(1, -1), node_of))
        return np.concatenate(out) if out else dealt


def nodes_alike(names: Sequence[str]) -> tuple[int, ...]:
    """Return the node of each rank, from its node's name; nodes are numbered by first mention.

    >>> nodes_alike(["b", "a", "b"])
    (0, 1, 0)
    """
    numbers = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return tuple(numbers[name] for name in names)


def _exchanged(steps: Ids, node_of: NDArray[np.uint16]) -> Ids:
    """Exchange samples within each full step of (steps, whole); return (steps * whole,)."""
    whole = steps.shape[1]
    node_at = np.resize(node_of, whole)
    places = node_at.argsort(kind="stable")  # places of the batch, by node
    room = np.bincount(node_at)
    first_place = room.cumsum() - room
    affinity = node_of[steps % len(node_of)]
    samples = affinity.argsort(axis=1, kind="stable")  # radix sort: nodes have 16 bits
    affinity = np.take_along_axis(affinity, samples, axis=1)
    # The i-th sample with affinity to a node takes the node's i-th place, if there is one.
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
    out[out < 0] = given[np.sort((flat + samples)[~stays])]  # both are sorted by step
    return out
