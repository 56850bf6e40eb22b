"""Retention: which objects stay over the turn of an epoch, from its two orders. Pure.

For epochs that read each object once, the source reads of the next epoch are all objects except
those held when it begins (law L1). These depend only on the two orders, so they are planned once
per epoch, ahead: while the epoch runs, an object that was read stays if the plan says so; else its
room goes to the next fetch that needs room. The plan has four properties:

- *total*: what stays fills the memory exactly;
- *lead*: it holds all that the next epoch begins with, so that epoch begins with hits, and its
  first misses are fetched into the room that they leave: reading ahead needs no room at the turn;
- *outflow*: of the rest, an even share of each stretch of the next epoch and of each rank stays
  (law L2), so that the source is read at a steady pace;
- *inflow*: along this epoch, no more stays than the room that earlier residents leave, less the
  room for misses that are fetched ahead. The memory is never exceeded.

Work is done in pieces of 65,536 objects of a few ms each, as it runs beside the daemon's loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from creel.policies.eviction_policy import FETCHING, RESIDENT

Ids = NDArray[np.int32]
Floats = NDArray[np.float64]

_PIECE = 1 << 16
_GOLDEN = 0.6180339887498949
#: Stretches of this epoch for which inflow is planned: at least 16 objects each, at most 1,024
#: (a lead of three in a hundred covers ten of them from 300 on).
_STRETCHES, _MIN_PER_STRETCH = 1024, 16
#: The same where sizes differ: with fewer, single large objects decide the share of their stretch,
#: and 5 % more objects are read in the same bytes.
_MIN_PER_UNEQUAL_STRETCH = 64
#: Kinds of objects, the best to keep first: what the next epoch begins with; then up to 40 sizes,
#: small ones first, where opens cost more than bytes; then what the next epoch does not read.
_LEAD, _EVEN, _REST, _KINDS = 0, 1, 41, 42
#: Objects of each piece that may be swapped to fill the memory exactly, where sizes differ.
_MAX_SWAPPED = 256


class StepsOf(Protocol):
    """(n,) steps by object, such as `next_use.Steps`."""

    def __getitem__(self, ids: NDArray[np.integer], /) -> NDArray[np.int32]: ...


@dataclass(frozen=True, eq=False)
class Turn:
    """What is known about the turn of an epoch; all arrays may be live views.

    Args:
        orders: for each rank, its order in the next epoch, in pieces; empty where unknown: then
            scrambled ids take its place.
        due: (n,) step of each object's next read.
        life: (n,) states as in `eviction_policy`.
        clock, end: steps of this epoch yet to be read; objects due from `end` on are not.
        size: (n,) bytes of each object, or (1,) where all are equal; negative: `guess` bytes.
        page: rooms are multiples of it.
        capacity: bytes to be held at the turn.
        lead: share of the next epoch that is kept first, and of this one that is read ahead.
        opens_dominate: whether small objects are kept rather than an even spread.
    """

    orders: Sequence[Sequence[Ids]]
    due: StepsOf
    life: NDArray[np.uint8]
    clock: int
    end: int
    size: NDArray[np.int64]
    guess: int
    page: int
    capacity: int
    lead: float
    opens_dominate: bool = False

    def plan(self) -> Kept:
        """See `plan`."""
        return plan(self)

    def nbytes(self, ids: Ids) -> Floats:
        """(k,) bytes of room that these objects take up."""
        if len(self.size) == 1:
            return np.full(len(ids), float(self.size[0]))
        size = self.size[ids]
        size = np.where(size < 0, self.guess, np.maximum(size, 1))
        return (-(-size // self.page) * self.page).astype(np.float64)


class Kept(NamedTuple):
    """The plan: (n,) whether each object stays; and those held and read already that need not."""

    stays: NDArray[np.bool_]
    surplus: list[Ids]


def plan(turn: Turn) -> Kept:
    """Return which objects stay when the epoch turns.

    >>> due, life = np.array([0, 1, 2, 3], np.int32), np.zeros(4, np.uint8)
    >>> order = np.array([3, 2, 1, 0], np.int32)
    >>> turn = Turn([[order]], due, life, 0, 4, np.array([10]), 10, 1, capacity=20, lead=0.5)
    >>> plan(turn).stays.tolist()
    [False, False, True, True]
    """
    seen = np.zeros(len(turn.life), np.bool_)
    same_size = len(turn.size) == 1
    least = _MIN_PER_STRETCH if same_size else _MIN_PER_UNEQUAL_STRETCH
    tally = _Tally(max(min(_STRETCHES, len(seen) // least), 8))
    sorted_in = (_sort_in(turn, ids, kind, tally) for ids, kind in _in_order(turn, seen))
    parts = [part for part in sorted_in if len(part.ids)]
    share = tally.kept_shares(turn, whole=int(turn.size[0]) if same_size else 0)
    stays = np.zeros(len(turn.life), np.bool_)
    _choose(parts, share, tally.number, stays)
    if not same_size:
        _fill(turn, parts, stays, tally)
    read = [ids[cell % tally.width == 0] for ids, cell in parts]
    return Kept(stays, [ids[~stays[ids]] for ids in read if len(ids)])


class _Part(NamedTuple):
    """Candidates in the order of the next epoch: ids, and (k,) kind and stretch in one number."""

    ids: Ids
    cell: NDArray[np.uint16]


class _Tally:
    """Bytes and counts by cell = kind * width + stretch; stretch 0 is what was read already."""

    def __init__(self, stretches: int) -> None:
        self.stretches = stretches
        self.width = stretches + 1
        self.nbytes = np.zeros(_KINDS * self.width)
        self.number = np.zeros(_KINDS * self.width, np.int64)
        self.leaving = np.zeros(self.width)  # bytes held that are yet to be read
        self.missing = np.zeros(self.width)  # bytes yet to be fetched

    def add(
        self,
        cell: NDArray[np.int64],
        nbytes: Floats,
        *,
        leaving: NDArray[np.bool_],
        missing: NDArray[np.bool_],
    ) -> None:
        """Count candidates."""
        self.number += np.bincount(cell, minlength=len(self.number))
        self.nbytes += np.bincount(cell, nbytes, minlength=len(self.nbytes))
        stretch = cell % self.width
        self.leaving += np.bincount(stretch[leaving], nbytes[leaving], minlength=self.width)
        self.missing += np.bincount(stretch[missing], nbytes[missing], minlength=self.width)

    def limits(self, turn: Turn) -> Floats:
        """(stretches + 1,) bytes that may have been kept by the end of each stretch."""
        left = self.leaving[::-1].cumsum()[::-1] - self.leaving
        fetched = self.missing.cumsum()
        edges = np.arange(self.width, dtype=np.float64)
        # The window in stretches: a share of the epoch, of which this part is left.
        ahead = np.interp(edges + turn.lead * self.stretches, edges, fetched) - fetched
        limit: Floats = turn.capacity - left - ahead
        limit[-1] = turn.capacity
        return limit

    def kept_shares(self, turn: Turn, *, whole: int) -> Floats:
        """Share of each cell that stays.

        whole: bytes of each object where all are equal: then shares are whole objects.
        """
        have = self.nbytes.reshape(_KINDS, -1)
        got = np.zeros_like(have)
        limit, room = self.limits(turn), float(turn.capacity)
        for k in np.flatnonzero(have.sum(1)).tolist():
            if room <= 0:
                break
            got[k] = have[k] if k == _LEAD else _taken(have[k], limit, whole)
            limit -= got[k].cumsum()  # reserves the room of better kinds that come later
            room -= float(have[k].sum())
        target = min(float(turn.capacity), float(have.sum()))
        self._settle(have, got, _rounded(target, whole) - float(got.sum()))
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(have > 0, got / have, 0.0).ravel()

    def _settle(self, have: Floats, got: Floats, lack: float) -> None:
        """Correct the total where it is too small or too large, late in the epoch."""
        kinds = np.flatnonzero(have.sum(1)).tolist()
        for b in range(self.stretches, -1, -1):
            if abs(lack) < 1:
                return
            for k in kinds if lack > 0 else reversed(kinds):
                more = min(lack, have[k, b] - got[k, b]) if lack > 0 else max(lack, -got[k, b])
                got[k, b] += more
                lack -= more


def _taken(have: Floats, limit: Floats, whole: int) -> Floats:
    """Bytes taken of each stretch, as early as the limits allow."""
    may_keep = np.maximum(np.minimum.accumulate(limit[::-1])[::-1], 0.0)
    got = np.zeros_like(have)
    debt = 0.0
    for b, more in enumerate(np.diff(may_keep, prepend=0.0).tolist()):
        debt += more  # what one stretch lacks is taken from the next
        got[b] = min(float(have[b]), _rounded(debt, whole))
        debt -= got[b]
    return got


def _rounded(nbytes: float, whole: int) -> float:
    return nbytes // whole * whole if whole else nbytes


def _in_order(turn: Turn, seen: NDArray[np.bool_]) -> Iterator[tuple[Ids, NDArray[np.int64]]]:
    """Yield pieces of all objects, each once, in the next epoch's order, and each object's kind.

    Objects that it does not read come last, in an order that scatters any stretch of ids.
    """
    ranks = [_Flat(pieces) for pieces in turn.orders]
    known = sum(map(len, ranks))
    cuts = -(-known // _PIECE)
    for i in range(cuts):
        found = [rank.between(i / cuts, (i + 1) / cuts) for rank in ranks]
        ids = np.concatenate([ids for ids, _ in found])
        kind = np.where(np.concatenate([at for _, at in found]) < turn.lead, _LEAD, _EVEN)
        new = ~seen[ids]
        seen[ids] = True
        yield ids[new], kind[new]
    n = len(seen)
    factor = _coprime(n)
    for start in range(0, n, _PIECE):
        ids = (np.arange(start, min(start + _PIECE, n)) * factor % n).astype(np.int32)
        ids = ids[~seen[ids]]
        yield ids, np.full(len(ids), _REST if known else _EVEN)


class _Flat:
    """Pieces of an order, indexed as one."""

    def __init__(self, pieces: Sequence[Ids]) -> None:
        self._pieces = pieces
        self._ends = np.cumsum([len(p) for p in pieces], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def between(self, start: float, stop: float) -> tuple[Ids, Floats]:
        """Ids between two shares of the order, and (k,) the share at which each is."""
        a, b = round(start * len(self)), round(stop * len(self))
        first, last = np.searchsorted(self._ends, [a, b], side="right").tolist()
        out = [np.empty(0, np.int32)]
        for i in range(first, min(last + 1, len(self._pieces))):
            begin = int(self._ends[i]) - len(self._pieces[i])
            out.append(self._pieces[i][max(a - begin, 0) : max(b - begin, 0)])
        return np.concatenate(out), np.arange(a, b) / max(len(self), 1)


def _sort_in(turn: Turn, ids: Ids, kind: NDArray[np.int64], tally: _Tally) -> _Part:
    """Kind and stretch of all objects that could stay: those held, and those yet to be read."""
    due, life = turn.due[ids], turn.life[ids]
    unread = due < turn.end
    held = (life == RESIDENT) | (life == FETCHING)
    could = unread | held
    ids, kind, due, unread, held = ids[could], kind[could], due[could], unread[could], held[could]
    nbytes = turn.nbytes(ids)
    when = np.maximum(due, turn.clock).astype(np.int64) - turn.clock
    when = 1 + when * tally.stretches // max(turn.end - turn.clock, 1)
    stretch = np.where(unread, np.minimum(when, tally.stretches), 0)
    if turn.opens_dominate:
        length = np.maximum(turn.size[ids % len(turn.size)], 1)
        small = _EVEN + np.frexp(length)[1].astype(np.int64).clip(0, _REST - _EVEN - 1)
        kind = np.where(kind == _EVEN, small, kind)
    cell = kind * tally.width + stretch
    tally.add(cell, nbytes, leaving=held & unread, missing=~held)
    return _Part(ids, cell.astype(np.uint16))


def _choose(
    parts: Sequence[_Part], share: Floats, number: NDArray[np.int64], stays: NDArray[np.bool_]
) -> None:
    """Take its share of each cell, evenly along the next epoch (systematic sampling)."""
    phase = np.arange(len(share)) * _GOLDEN % 1.0 * 0.98 + 0.01  # no sum ends at a whole number
    wanted = np.rint(share * number)  # exact counts, where all sizes are equal
    same_size = np.abs(share * number - wanted) < 1e-6
    share = np.where(same_size & (number > 0), wanted / np.maximum(number, 1), share)
    past = np.zeros(len(share), np.int64)
    for ids, cell in parts:
        order = cell.argsort(kind="stable")  # 16 bits: a radix sort
        ordered = cell[order]
        begins = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
        lengths = np.diff(np.append(begins, len(ordered)))
        at = np.arange(1, len(ordered) + 1) + np.repeat(past[ordered[begins]] - begins, lengths)
        past[ordered[begins]] += lengths
        each = share[ordered]
        at = at * each + phase[ordered]
        stays[ids[order[np.floor(at) > np.floor(at - each)]]] = True


def _fill(turn: Turn, parts: Sequence[_Part], stays: NDArray[np.bool_], tally: _Tally) -> None:
    """Where sizes differ: add or remove objects of the last kinds, scattered, until full."""
    held = sum(float(turn.nbytes(ids)[stays[ids]].sum()) for ids, _ in parts)
    lack = min(turn.capacity, tally.nbytes.sum()) - held
    found = []
    for ids, cell in parts:
        may = (stays[ids] == (lack < 0)) & (cell >= tally.width)  # the lead stays complete
        found.append(np.flatnonzero(may)[:: max(np.count_nonzero(may) // _MAX_SWAPPED, 1)])
    ids = np.concatenate([part.ids[at] for part, at in zip(parts, found, strict=True)])
    kind = np.concatenate([part.cell[at] for part, at in zip(parts, found, strict=True)])
    order = np.argsort(kind // tally.width, kind="stable")
    ids = ids[order if lack > 0 else order[::-1]]
    total = turn.nbytes(ids).cumsum()
    k = int(np.searchsorted(total, abs(lack), side="right" if lack > 0 else "left"))
    stays[ids[: k + (lack < 0)]] = lack > 0


def _coprime(n: int) -> int:
    """A number near the golden section of n that shares no divisor with it.

    >>> _coprime(10), _coprime(1)
    (7, 1)
    """
    k = max(int(n * _GOLDEN), 1)
    while np.gcd(k, n) != 1:
        k += 1
    return k
