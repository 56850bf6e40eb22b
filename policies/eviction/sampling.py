"""Which objects stay when an epoch ends: sampling rates, and an even choice. Pure.

`retention` plans one node with it, `placement` all nodes of a cluster. Both count their candidates
in a `Tally` by cell (node, priority, stretch of this epoch). `Tally.rates` gives the share of each
cell that stays, and `select` takes that share along the next epoch's order.

All nodes must compute the same result. So all numbers are integers, or floats in single operations
that IEEE 754 defines to the last bit; floats are never summed, as the order would matter. Work is
done in pieces of about 65,536 objects, a few ms each, as it may run beside an event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from creel.policies.arrays import NO_IDS, Ids, Index, Ints, Mask

#: (n,) node of each object, uint8 or uint16; the largest number of the type means no node.
Nodes = NDArray[np.uint8] | NDArray[np.uint16]

PIECE = 1 << 16
#: Consecutive objects of one rank in the next epoch, of which an even share stays.
BLOCK = 256
#: Most stretches of this epoch for which inflow is planned, and least objects in one. (From 300
#: stretches on, a lead of 3 % covers about ten of them.)
_STRETCHES, _MIN_PER_STRETCH = 1024, 16
#: Least objects in a stretch if sizes differ: with fewer, single large objects decide the rate of
#: their stretch, and 5 % more objects are read in the same bytes.
_MIN_PER_UNEQUAL_STRETCH = 64
#: The best priority: the objects that the next epoch begins with; all of them stay.
LEAD = 0
#: A rate of 1: rates are integers.
_ONE = 1 << 20
#: Rounds in which objects of two nodes are exchanged within their blocks, and objects of each piece
#: that may be added or removed at the end.
_MAX_ROUNDS, _MAX_SWAPPED = 16, 4096
_GOLDEN = 0.6180339887498949
_NODES_AT_ONCE = 64

NbytesOf = Callable[[Ids], Ints]


class Piece(NamedTuple):
    """Objects in the order of the next epoch, rank by rank.

    Args:
        ids: (k,) objects; each is at most once in all pieces.
        early: (k,) whether each belongs to the lead.
        block: (k,) number of the block of `BLOCK` objects, ascending.
        read: whether the next epoch reads these objects.
    """

    ids: Ids
    early: Mask
    block: NDArray[np.int32]
    read: bool


class Candidates(NamedTuple):
    """Candidates of a piece: (k,) ids, cells as in `Tally`, blocks, and whether they are read."""

    ids: Ids
    cell: NDArray[np.int32]
    block: NDArray[np.int32]
    read: bool


class Tally:
    """Bytes and counts of candidates by cell; bytes that leave and arrive, by node and stretch.

    cell = (node * priorities + priority) * width + stretch. Stretch 0 are the objects that this
    epoch has read already. `at` is node * width + stretch.

    Args:
        objects: most candidates of one node.
        whole: bytes of each object if all are equal, else 0.
    """

    def __init__(self, objects: int, *, nodes: int, priorities: int, whole: int) -> None:
        least = _MIN_PER_STRETCH if whole else _MIN_PER_UNEQUAL_STRETCH
        self.stretches = max(min(_STRETCHES, objects // least), 8)
        self.width = self.stretches + 1
        self.nodes, self.priorities, self.whole = nodes, priorities, whole
        self.nbytes = np.zeros(nodes * priorities * self.width, np.int64)
        self._leaving = np.zeros(nodes * self.width, np.int64)  # bytes held that are yet to be read
        self._missing = np.zeros(nodes * self.width, np.int64)  # bytes yet to be fetched
        self._number = self.nbytes if whole else np.zeros_like(self.nbytes)

    def add(self, cell: NDArray[np.integer], nbytes: Ints) -> None:
        np.add.at(self.nbytes, cell, nbytes)
        if not self.whole:
            np.add.at(self._number, cell, 1)

    def leave(self, at: NDArray[np.integer], nbytes: Ints) -> None:
        """Count bytes that a node holds until they are read."""
        np.add.at(self._leaving, at, nbytes)

    def miss(self, at: NDArray[np.integer], nbytes: Ints) -> None:
        """Count bytes that a node has to fetch for its own ranks."""
        np.add.at(self._missing, at, nbytes)

    def counts(self) -> Ints:
        """Return the number of candidates by cell."""
        return self._number // self.whole if self.whole else self._number

    def demand(self) -> Ints:
        """Return (nodes,) bytes of all candidates."""
        total: Ints = self.nbytes.reshape(self.nodes, -1).sum(1)
        return total

    def rates(self, capacity: Ints, lead: float) -> Ints:
        """Return the share of each cell's candidates that stays, in parts of `_ONE`.

        Args:
            capacity: (nodes,) bytes held when the epoch ends.
            lead: share of this epoch that is read ahead.
        """
        out = np.empty((self.nodes, self.priorities, self.width), np.int64)
        have = self.nbytes.reshape(out.shape)
        limit = self._limits(capacity, lead)
        for first in range(0, self.nodes, _NODES_AT_ONCE):  # bounds the memory of `_got`
            some = slice(first, first + _NODES_AT_ONCE)
            got = self._got(have[some], limit[some], capacity[some])
            rate = np.floor(got / np.maximum(have[some], 1) * _ONE)
            out[some] = rate.astype(np.int64)
        return out.ravel()

    def _limits(self, capacity: Ints, lead: float) -> Ints:
        """Return (nodes, width) bytes that may have been kept by the end of each stretch."""
        leaving = self._leaving.reshape(self.nodes, -1)
        left = leaving[:, ::-1].cumsum(1)[:, ::-1] - leaving
        fetched = self._missing.reshape(self.nodes, -1).cumsum(1)
        # The lead in stretches, and in 256ths of one.
        ahead, part = divmod(int(lead * self.stretches * 256), 256)
        low = np.minimum(np.arange(self.width) + ahead, self.stretches)
        high = np.minimum(low + 1, self.stretches)
        window = fetched[:, low] + (fetched[:, high] - fetched[:, low]) * part // 256 - fetched
        limit: Ints = capacity[:, None] - left - window
        limit[:, -1] = capacity
        return limit

    def _got(self, have: Ints, limit: Ints, capacity: Ints) -> Ints:
        """Return (nodes, priorities, width) bytes that stay."""
        got = np.zeros_like(have)
        room = capacity.copy()
        for k in range(self.priorities):
            total = have[:, k].sum(1)
            if not total.any():
                continue
            take = np.clip(room, 0, total)
            got[:, k] = have[:, k] if k == LEAD else self._taken(have[:, k], limit, take, total)
            limit -= got[:, k].cumsum(1)  # room reserved for better priorities
            room -= total
        target = np.minimum(capacity, have.sum((1, 2)))
        if self.whole:
            target -= target % self.whole
        return _settled(have, got, target - got.sum((1, 2)))

    def _taken(self, have: Ints, limit: Ints, take: Ints, total: Ints) -> Ints:
        """Return (nodes, width) bytes of one priority: an even share, or what the limits allow.

        Bytes that one stretch lacks are taken from the next ones. This is a queue: its output up to
        a stretch is its capacity so far less the most that it has ever been idle.
        """
        allowed = np.maximum(np.minimum.accumulate(limit[:, ::-1], 1)[:, ::-1], 0)
        past = have.cumsum(1)
        even = np.ceil(past * (take / np.maximum(total, 1))[:, None]).astype(np.int64)
        wanted: Ints = np.minimum(np.minimum(allowed, even), take[:, None])
        if self.whole:
            wanted -= wanted % self.whole
        idle = np.minimum(np.minimum.accumulate(wanted - past, 1), 0)
        return np.diff(past + idle, axis=1, prepend=0)


def _settled(have: Ints, got: Ints, lack: Ints) -> Ints:
    """Return `got` with its total corrected by (nodes,) `lack` bytes, late in the epoch.

    Within a stretch the best priorities are added first, and the worst ones removed first.
    """
    nodes, priorities, width = have.shape
    more: Ints = np.clip(lack, 0, None)
    if more.any():
        room = (have - got)[:, :, ::-1].transpose(0, 2, 1).reshape(nodes, -1)
        added: Ints = np.clip(more[:, None] - (room.cumsum(1) - room), 0, room)
        got += added.reshape(nodes, width, priorities).transpose(0, 2, 1)[:, :, ::-1]
    less: Ints = np.clip(-lack, 0, None)
    if less.any():
        room = got[:, ::-1, ::-1].transpose(0, 2, 1).reshape(nodes, -1)
        gone: Ints = np.clip(less[:, None] - (room.cumsum(1) - room), 0, room)
        got -= gone.reshape(nodes, width, priorities).transpose(0, 2, 1)[:, ::-1, ::-1]
    return got


def in_order(orders: Sequence[Sequence[Ids]], objects: int, lead: float) -> Iterator[Piece]:
    """Yield all objects, each once, in the order of the next epoch.

    Objects that it does not read come last, in an order that scatters any stretch of ids.

    Args:
        orders: for each rank, the objects that it reads in the next epoch, in pieces.
        objects: number of objects.
        lead: share of the next epoch that is early.
    """
    seen = np.zeros(objects, np.bool_)
    ranks = [_Flat(pieces) for pieces in orders]
    longest = max(map(len, ranks), default=0)
    # A multiple of BLOCK, so that no block belongs to two ranks.
    step = max(PIECE // max(len(ranks), 1) // BLOCK, 1) * BLOCK
    for start in range(0, longest, step):
        parts = [rank.between(start, start + step) for rank in ranks]
        ids = np.concatenate(parts)
        lengths = np.array([len(part) for part in parts])
        at = np.arange(len(ids)) - np.repeat(lengths.cumsum() - lengths, lengths)
        wholes = np.maximum([len(rank) for rank in ranks], 1)
        early = start + at < np.repeat(np.ceil(lead * wholes), lengths)
        block = np.repeat(np.arange(len(ranks)), lengths) * (step // BLOCK) + at // BLOCK
        new = np.flatnonzero(~seen[ids])
        if step >= longest:  # a single piece: padding repeats its first objects within it
            new = np.sort(new[np.unique(ids[new], return_index=True)[1]])
        seen[ids] = True
        yield Piece(ids[new], early[new], block[new].astype(np.int32), read=True)
    factor = coprime(objects)
    for start in range(0, objects, PIECE):
        ids = (np.arange(start, min(start + PIECE, objects)) * factor % objects).astype(np.int32)
        ids = ids[~seen[ids]]
        block = (np.arange(len(ids)) // BLOCK).astype(np.int32)
        yield Piece(ids, np.zeros(len(ids), np.bool_), block, read=not longest)


class _Flat:
    """Pieces of an order, indexed as one array."""

    def __init__(self, pieces: Sequence[Ids]) -> None:
        self._pieces = pieces
        self._ends = np.cumsum([len(p) for p in pieces], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def between(self, start: int, stop: int) -> Ids:
        """Return the entries from `start` to `stop`, as far as they exist."""
        if len(self._pieces) == 1:
            return self._pieces[0][start:stop]
        first, last = np.searchsorted(self._ends, [start, stop], side="right").tolist()
        out = [NO_IDS]
        for i in range(first, min(last + 1, len(self._pieces))):
            begin = int(self._ends[i]) - len(self._pieces[i])
            out.append(self._pieces[i][max(start - begin, 0) : max(stop - begin, 0)])
        return np.concatenate(out)


def select(
    parts: Sequence[Candidates],
    tally: Tally,
    capacity: Ints,
    lead: float,
    nbytes: NbytesOf,
    out: Nodes,
) -> None:
    """Write the node that keeps each candidate into `out`; entries of other objects do not change.

    Args:
        parts: all candidates.
        capacity: (nodes,) bytes.
        lead: share of an epoch that is read ahead.
        nbytes: returns (k,) bytes of objects.
        out: (n,) filled with the number that means no node.
    """
    choice = _Choice(tally, tally.rates(capacity, lead))
    held = np.zeros(tally.nodes, np.int64)
    for part in parts:
        stays = choice.of(part)
        node = part.cell[stays] // (tally.priorities * tally.width)
        out[part.ids[stays]] = node
        np.add.at(held, node, nbytes(part.ids[stays]))
    _fill(parts, tally, np.minimum(capacity, tally.demand()) - held, nbytes, out)


class _Choice:
    """Choose the share of each cell that stays, evenly along both epochs.

    This is systematic sampling: the rates of all candidates are summed up, and a candidate with
    which the sum passes a whole number stays. The sum runs along the next epoch from block to
    block, so that any run of blocks keeps its share to within one object. Within a block it runs
    along this epoch.
    """

    def __init__(self, tally: Tally, rate: Ints) -> None:
        self._tally, self._rate = tally, rate
        self._carry = _ONE // 2
        self._behind = np.zeros(tally.nodes, np.int64)  # chosen less due, in parts of _ONE
        # Candidates that the next epoch reads, without the lead: how many are left, and how many of
        # these should be chosen, in parts of _ONE.
        priorities = np.arange(len(rate)) // tally.width % tally.priorities
        some = (priorities != LEAD) & (priorities != tally.priorities - 1)
        number = tally.counts()[some]
        self._left, self._due = int(number.sum()), int((rate[some] * number).sum())

    def of(self, part: Candidates) -> Index:
        """Return the indices of the candidates of this part that stay."""
        if not len(part.ids):
            return np.empty(0, np.intp)
        tally = self._tally
        due = rate = self._rate[part.cell]
        lead = part.cell // tally.width % tally.priorities == LEAD
        if part.read:
            rate = _evened(due, part.block, lead, max(self._due, 0) // max(self._left, 1))
        levels = max(PIECE // (int(part.block[-1]) + 1), 1)
        now = (part.cell % tally.width) * levels // tally.width
        order = (part.block * levels + now).astype(np.uint16).argsort(kind="stable")  # radix sort
        total = rate[order].cumsum() + self._carry
        chosen = np.zeros(len(order), np.bool_)
        chosen[order] = total // _ONE != (total - rate[order]) // _ONE
        self._carry = int(total[-1]) % _ONE
        if part.read:
            self._left -= int(np.count_nonzero(~lead))
            self._due -= int(np.count_nonzero(chosen & ~lead)) * _ONE
        if tally.nodes > 1:
            node = part.cell // (tally.priorities * tally.width)
            self._behind += _sums(node, chosen * _ONE - due, tally.nodes)
            _exchange(chosen, node, part.block, (due > 0) & (due < _ONE), self._behind)
        return np.flatnonzero(chosen)


def _evened(rate: Ints, block: NDArray[np.int32], lead: Mask, mean: int) -> Ints:
    """Return rates whose sum in each block is `mean` times the objects that are not of the lead.

    The rates between 0 and 1 change first; if that does not suffice, the others do as well.
    """
    blocks = int(block[-1]) + 1
    free = ~lead
    full, none = free & (rate == _ONE), rate == 0
    partly = ~(lead | full | none)
    number = {
        name: np.bincount(block[mask], minlength=blocks)
        for name, mask in (("free", free), ("full", full), ("none", none), ("partly", partly))
    }
    due = np.where(partly, rate, 0)
    has = _sums(block, due, blocks)
    most = number["partly"] * _ONE
    target = number["free"] * mean
    need = np.clip(target - number["full"] * _ONE, 0, most)
    up = need > has
    grown = _ONE - (_ONE - rate) * (most - need)[block] // np.maximum(most - has, 1)[block]
    shrunk = rate * need[block] // np.maximum(has, 1)[block]
    of_full = np.minimum(target // np.maximum(number["full"], 1), _ONE)
    of_none = np.maximum(target - number["full"] * _ONE - most, 0) // np.maximum(number["none"], 1)
    out = np.where(up[block], grown, shrunk)
    out = np.where(full, of_full[block], np.where(none, np.minimum(of_none, _ONE)[block], out))
    return np.where(lead, rate, out)


def _sums(at: NDArray[np.integer], values: Ints, length: int) -> Ints:
    out = np.zeros(length, np.int64)
    np.add.at(out, at, values)
    return out


def _exchange(
    chosen: Mask, node: NDArray[np.int32], block: NDArray[np.int32], partly: Mask, behind: Ints
) -> None:
    """Exchange objects of two nodes within their block, until no node has too many.

    Each block keeps as many objects as before, and each node gets as many as it is due.
    """
    could = np.flatnonzero(partly)
    for _ in range(_MAX_ROUNDS):
        if max(behind.max(), -behind.min()) < _ONE:
            return
        # Only whole objects count on one side; on the other, a fraction counts as one.
        excess = behind // _ONE if behind.max() >= _ONE else -(-behind // _ONE)
        lost = could[chosen[could] & (excess[node[could]] > 0)]
        won = could[~chosen[could] & (excess[node[could]] < 0)]
        lost, won = lost[_first(block[lost])], won[_first(block[won])]
        _, a, b = np.intersect1d(block[lost], block[won], assume_unique=True, return_indices=True)
        lost, won = lost[a], won[b]
        fits = (_times_before(node[lost]) < excess[node[lost]]) & (
            _times_before(node[won]) < -excess[node[won]]
        )
        if not fits.any():
            return
        lost, won = lost[fits], won[fits]
        chosen[lost], chosen[won] = False, True
        np.add.at(behind, node[lost], -_ONE)
        np.add.at(behind, node[won], _ONE)


def _first(ascending: NDArray[np.int32]) -> Mask:
    """Return (k,) whether each entry is the first with its number."""
    return np.append(True, ascending[1:] != ascending[:-1])[: len(ascending)]


def _times_before(numbers: NDArray[np.int32]) -> Index:
    """Return (k,) how often each number occurs before.

    >>> _times_before(np.array([3, 1, 3, 3], np.int32)).tolist()
    [0, 0, 1, 2]
    """
    order = numbers.argsort(kind="stable")
    begins = np.flatnonzero(_first(numbers[order]))
    out = np.empty(len(numbers), np.intp)
    lengths = np.diff(np.append(begins, len(numbers)))
    out[order] = np.arange(len(numbers)) - np.repeat(begins, lengths)
    return out


def _fill(
    parts: Sequence[Candidates], tally: Tally, lack: Ints, nbytes: NbytesOf, out: Nodes
) -> None:
    """Add or remove scattered objects until each node has its bytes; better priorities stay."""
    candidates = [(NO_IDS, NO_IDS)]
    nobody = np.iinfo(out.dtype).max
    for part in parts:
        node, priority = np.divmod(part.cell // tally.width, tally.priorities)
        stays = out[part.ids] != nobody
        short = lack[node]
        may = np.flatnonzero((stays == (short < 0)) & (short != 0) & (priority != LEAD))
        may = may[:: max(len(may) // _MAX_SWAPPED, 1)]
        better = np.where(lack[node[may]] < 0, tally.priorities - priority[may], priority[may])
        candidates.append((part.ids[may], node[may] * (tally.priorities + 1) + better))
    ids = np.concatenate([ids for ids, _ in candidates])
    key = np.concatenate([key for _, key in candidates])
    order = key.argsort(kind="stable")
    ids, node = ids[order], key[order] // (tally.priorities + 1)
    size = nbytes(ids)
    total = size.cumsum()
    first = np.flatnonzero(_first(node))
    before = np.repeat((total - size)[first], np.diff(np.append(first, len(ids))))
    total -= before
    # Add objects as long as they fit; remove objects until the others fit.
    changes = np.where(lack[node] > 0, total <= lack[node], total - size < -lack[node])
    ids, node = ids[changes], node[changes]
    out[ids] = np.where(lack[node] > 0, node, nobody)


def coprime(n: int) -> int:
    """Return a number near the golden section of n that is coprime to n.

    >>> coprime(10), coprime(1)
    (7, 1)
    """
    k = max(int(n * _GOLDEN), 1)
    while np.gcd(k, n) != 1:
        k += 1
    return k
