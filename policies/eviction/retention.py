"""Retention: which objects stay over the end of an epoch, from the orders of two epochs. Pure.

If epochs read each object once, the next epoch reads from the source all objects that are not held
when it begins (law L1). Which objects should stay depends on the two orders alone, so it is planned
ahead, once per epoch. While the epoch runs, an object that was read stays if the plan says so;
otherwise it makes room for the next fetch. The plan has four properties:

- *total*: the objects that stay fill the memory exactly;
- *lead*: the first objects of the next epoch stay, so that it begins with hits; its first misses
  are fetched into the room that these hits leave, so that reading ahead needs no room then;
- *outflow*: of the others, an even share of each stretch of the next epoch and of each rank stays
  (law L2), so that the source is read at a steady pace;
- *inflow*: at any time in this epoch, the objects that stay fit into the room that earlier
  residents have left, less the room for misses fetched ahead. The memory is never exceeded.

This is the plan of one node; `placement` plans all nodes of a cluster by the same rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from creel.policies.arrays import Ids, Ints, Mask
from creel.policies.eviction.policy import FETCHING, RESIDENT, STORED
from creel.policies.eviction.sampling import LEAD, Candidates, Piece, Tally, in_order, select

#: Priorities, best first: the objects that the next epoch begins with (LEAD, 0), the others that it
#: reads (_EVEN), and those that it does not read (_REST).
_EVEN, _REST, _PRIORITIES = 1, 2, 3
_NOBODY = 255


class StepsOf(Protocol):
    """(n,) steps by object, such as `next_use.Steps`."""

    def __getitem__(self, ids: NDArray[np.integer], /) -> NDArray[np.int32]: ...


class Kept(NamedTuple):
    """The plan: (n,) whether each object stays; held objects, read already, that need not stay."""

    stays: Mask
    surplus: list[Ids]


@dataclass(frozen=True, eq=False)
class EpochBoundary:
    """What is known about the end of an epoch; all arrays may be live views.

    Args:
        orders: for each rank, its order in the next epoch, in pieces; empty if unknown: then the
            ids are scrambled instead.
        due: (n,) step of each object's next read.
        state: (n,) states as in `eviction.policy`.
        clock, end: first and end of the steps that this epoch still has to read.
        size: (n,) bytes of each object, or (1,) if all are equal; negative: unknown, `guess` bytes.
        page: each object takes up a multiple of these bytes.
        capacity: bytes to be held when the epoch ends.
        lead: share of the next epoch that is kept first, and of this one that is read ahead.
        stored: (n,) whether each is on disk, as in `eviction.policy`; None: the node has no disk.
    """

    orders: Sequence[Sequence[Ids]]
    due: StepsOf
    state: NDArray[np.uint8]
    clock: int
    end: int
    size: Ints
    guess: int
    page: int
    capacity: int
    lead: float
    stored: NDArray[np.uint8] | None = None

    def nbytes(self, ids: Ids) -> Ints:
        """Return (k,) bytes of room that these objects take up."""
        if len(self.size) == 1:
            return np.full(len(ids), self.size[0])
        size = self.size[ids]
        size = np.where(size < 0, self.guess, np.maximum(size, 1))
        return -(-size // self.page) * self.page

    def plan(self) -> Kept:
        """Return which objects stay when the epoch ends.

        >>> due, state = np.array([0, 1, 2, 3], np.int32), np.zeros(4, np.uint8)
        >>> order = np.array([3, 2, 1, 0], np.int32)
        >>> size = np.array([10])
        >>> sizes = size, 10, 1
        >>> end = EpochBoundary([[order]], due, state, 0, 4, *sizes, capacity=20, lead=0.5)
        >>> end.plan().stays.tolist()
        [False, False, True, True]
        """
        objects = len(self.state)
        whole = int(self.size[0]) if len(self.size) == 1 else 0
        tally = Tally(objects, nodes=1, priorities=_PRIORITIES, whole=whole)
        pieces = in_order(self.orders, objects, self.lead)
        parts = [part for part in (self._sort_in(p, tally) for p in pieces) if len(part.ids)]
        keeping_node = np.full(objects, _NOBODY, np.uint8)
        select(parts, tally, np.array([self.capacity]), self.lead, self.nbytes, keeping_node)
        stays = keeping_node != _NOBODY
        read = [part.ids[part.cell % tally.width == 0] for part in parts]
        return Kept(stays, [ids[~stays[ids]] for ids in read if len(ids)])

    def _sort_in(self, piece: Piece, tally: Tally) -> Candidates:
        """Count the candidates, objects held or yet to be read, by priority and stretch."""
        due, state = self.due[piece.ids], self.state[piece.ids]
        unread = due < self.end
        held = (state == RESIDENT) | (state == FETCHING)
        if self.stored is not None:
            held |= self.stored[piece.ids] == STORED
        could = np.flatnonzero(unread | held)
        ids, due, unread, held = piece.ids[could], due[could], unread[could], held[could]
        when = np.maximum(due, self.clock).astype(np.int64) - self.clock
        when = 1 + when * tally.stretches // max(self.end - self.clock, 1)
        stretch = np.where(unread, np.minimum(when, tally.stretches), 0)
        priority = np.where(piece.early[could], LEAD, _EVEN if piece.read else _REST)
        cell = priority * tally.width + stretch
        nbytes = self.nbytes(ids)
        tally.add(cell, nbytes)
        tally.leave(stretch[held & unread], nbytes[held & unread])
        tally.miss(stretch[~held], nbytes[~held])
        return Candidates(ids, cell.astype(np.int32), piece.block[could], piece.read)
