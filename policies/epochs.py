"""What leaves when every epoch reads each object at most once (laws L1 and L2). Pure."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from creel.policies.keeper import NOBODY, Keeper, Need, joined
from creel.policies.masks import every, some
from creel.policies.pools import Index, Pool, Sorted, Spread, Tray
from creel.policies.prefetch import affordable
from creel.policies.uses import NEVER, Uses


class _Source(Protocol):
    def take(self, k: int) -> Index: ...


class _Stack:
    """Arrays of ids, one after the other."""

    def __init__(self, parts: list[Index]) -> None:
        self._parts = parts

    def take(self, k: int) -> Index:
        """Remove and return up to k of the last one."""
        if not self._parts or k <= 0:
            return NOBODY
        ids = self._parts.pop()
        if len(ids) > k:
            self._parts.append(ids[:-k])
            ids = ids[-k:]
        return ids


_LISTED_IDLE = 1
#: Residents listed at a time after `relist`: 1 ms, where all of an ImageNet at once took 50.
_PART = 32_768
#: Candidates among which the tightest fit is sought: sixteen or more for each of a batch of 256.
_TRAY = 4096
#: A room that is larger than wanted by more than 1/2^_LOOSE is kept for others.
_LOOSE = 4  # else seven epochs at f = .75 lose 2 % (benchmarks/image_sizes.py)


class EpochKeeper(Keeper):
    """For epochs that read each object at most once: laws L1 and L2.

    Residents that were read in the present epoch may leave, evenly over the next one. What the
    present epoch still reads is in no list. A fetch for the next epoch, just before the turn, would
    push out what that epoch reads later. So what its first `begin` steps read leaves last, where
    that is known: an epoch begins with hits, and reads its first misses while they are used. Such
    loans are limited to `lend_more` objects an epoch, or to `lend` where nothing was known.

    Args:
        size: (n,) lengths, where the large shall leave first (opens cost more than bytes).
        room: (n,) bytes each resident takes up, where they differ: newcomers get the places of
            those whose room fits them.
    """

    def __init__(
        self,
        life: NDArray[np.uint8],
        pins: NDArray[np.int32],
        uses: Uses,
        size: NDArray[np.int64] | None = None,
        room: NDArray[np.int64] | None = None,
    ) -> None:
        super().__init__(life, pins, [uses])
        self.uses = uses
        self.fits = room is not None
        self.begin = 0
        self._guarded = False  # whether all victims since the turn were none the next begins with
        self._gave = False  # whether there were any
        self.epoch = 0  # the latest in which anything was read
        self.known = 0  # the latest whose plan all ranks have told
        self.lend = self.lend_more = 0
        self._size = size
        self._room = np.empty(0, np.int64) if room is None else room
        self._tray = Tray(self._room)
        self._soon: list[Index] = []  # read in `epoch` and by the first steps of the next
        self._lent: dict[int, int] = {}
        self._stamp = np.zeros(len(life), np.int32)
        self._idle: list[Index] = []  # no known plan reads them
        self._unlisted: list[Index] = []  # even samples of the residents, since `relist`
        self._now: Pool = Sorted(0, lambda ids: ids)  # read in `epoch`: may leave
        self._past: tuple[Pool, int, bool] | None = None  # read in the epoch before: only for loans
        self._now_stamp = self._stamps = _LISTED_IDLE + 1

    def turn(self, epoch: int) -> None:
        """The first object was read in `epoch`."""
        self._past = None
        if epoch == self.epoch + 1 and not self.stale:
            self._past = self._now, self._now_stamp, self._guarded
        self.epoch = epoch
        self._guarded = self._gave = False
        if self._past is not None:
            self._renew()
        elif not self.stale:
            self.relist()
        self._lent = {e: n for e, n in self._lent.items() if e >= epoch}

    def relist(self) -> None:
        """Sort all residents anew: plans have changed."""
        self.stale = False
        self._renew()
        self._stamp[self._stamp == _LISTED_IDLE] = 0
        self._idle = []
        ids = self._unpinned()
        parts = -(-len(ids) // _PART)
        self._unlisted = [ids[i::parts] for i in range(parts)]

    def released(self, ids: Index) -> None:
        """Nobody has pinned these residents any more (an object may come twice)."""
        if self.stale:
            return  # the lists are made when somebody first asks for victims
        due = self.uses.due[ids]
        limit = self.uses.start(self.epoch + 1)
        new = self._stamp[ids] != self._now_stamp
        new &= due >= limit
        if not every(new):
            ids, due = ids[new], due[new]
            if not len(ids):
                return
        once = self._once(ids)
        if not every(once):
            ids, due = ids[once], due[once]
        if self.known > self.epoch:
            dead = due == NEVER
            if some(dead):
                self._to_idle(ids[dead])
                ids, due = ids[~dead], due[~dead]
        self._stamp[ids] = self._now_stamp
        if self.begin and limit < NEVER:
            soon = due < limit + self.begin
            if some(soon):
                self._soon.append(ids[soon])
                ids = ids[~soon]
        self._to_idle(self._now.add(ids))

    def protect(self, ids: Index) -> None:
        """The present epoch's plan was told to reach these, too: they leave the lists."""
        due = self.uses.due[ids] < self.uses.start(self.epoch + 1)
        self._stamp[ids[due]] = 0

    def victims(self, k: int, need: Need) -> Index:
        """Up to k distinct objects to evict for `need`; they are in no list after this."""
        if self.stale:
            self.relist()
        self._list_some()
        self._gave = True
        ids = self._draw(k, need)
        while len(ids) < k and self._unlisted:
            self._list_some()
            ids = np.concatenate([ids, self._draw(k - len(ids), need)])
        return ids

    def _list_some(self) -> None:
        """Enter one more part of the residents there were when all lists were made anew."""
        if self._unlisted:
            ids = self._unlisted.pop()
            self.released(ids[self._leaving(ids)])

    def _draw(self, k: int, need: Need) -> Index:
        """Up to k of those in the lists."""
        out = [self._from_idle(k)] if self._idle else []
        k -= sum(map(len, out))
        if k > 0 and need.epoch <= self.epoch:
            for source in (self._now, self._tray, _Stack(self._soon)):
                out.append(self._from(source, self._now_stamp, k))
                k -= len(out[-1])
                if k <= 0:
                    break
        if k > 0:
            out.append(self._loan(k, need))
        return joined(out)

    def fitting(self, wants: NDArray[np.int64], need: Need) -> Index:
        """(k,) distinct objects to evict, each with as much room as is wanted, or -1."""
        if self.stale:
            self.relist()
        self._list_some()
        self._gave = True
        out = np.full(len(wants), -1, np.intp)
        order = np.arange(len(wants) if need.epoch <= self.epoch else 0)
        while len(order):
            self._fill_tray(len(order))
            # where there is not enough for all: for the first, be they large or small
            order = order[: affordable(wants[order], self._tray.nbytes)]
            order = order[wants[order].argsort(kind="stable")]
            ids = self._tray.fit(wants[order])
            order, ids = order[ids >= 0], ids[ids >= 0]
            tight = self._room[ids] - wants[order] <= wants[order] >> _LOOSE
            if not every(tight):
                self._tray.add(ids[~tight])
                order, ids = order[tight], ids[tight]
            may = (self._stamp[ids] == self._now_stamp) & self._leaving(ids)
            may &= self._room[ids] >= wants[order]
            self._stamp[ids] = 0
            out[order[may]] = ids[may]
            order = np.sort(order[~may])
        lack = out < 0
        if some(lack):
            out[lack] = self._lend(wants[lack], need)
        return out

    def _lend(self, wants: NDArray[np.int64], need: Need) -> Index:
        """`fitting` at the expense of what the epoch reads later."""
        out = np.full(len(wants), -1, np.intp)
        ids = self._loan(len(wants), need)
        if len(ids):
            tray = Tray(self._room)
            tray.add(ids)
            order = wants.argsort()
            out[order] = tray.fit(wants[order])
            back = tray.take(len(tray))
            self._lent[need.epoch] -= len(back)
            self.released(back)
        return out

    def _fill_tray(self, k: int) -> None:
        """Let all candidates, but no more than _TRAY, be in the tray; and k if anyhow possible."""
        if self._idle:
            self._enter(self._from_idle(_TRAY))
        self._enter(self._from(self._now, self._now_stamp, _TRAY - len(self._tray)))
        while len(self._tray) < k and self._unlisted:
            self._list_some()
            self._enter(self._from(self._now, self._now_stamp, _TRAY - len(self._tray)))
        if len(self._tray) < k and self._soon:
            self._enter(self._from(_Stack(self._soon), self._now_stamp, k - len(self._tray)))

    def _enter(self, ids: Index) -> None:
        self._stamp[ids] = self._now_stamp
        self._tray.add(ids)

    def dispensable(self, ids: Index, need: Need) -> NDArray[np.bool_]:
        """(k,) which of these may leave for `need`: what the present epoch reads no more."""
        if need.epoch > self.epoch:
            return np.zeros(len(ids), np.bool_)
        idle: NDArray[np.bool_] = self.uses.due[ids] >= self.uses.start(self.epoch + 1)
        return idle

    def _loan(self, k: int, need: Need) -> Index:
        """Objects that `need.epoch` reads later than `need.step`."""
        lent = self._lent.get(need.epoch, 0)
        lists = self._past
        if need.epoch == self.epoch + 1:
            lists = self._now, self._now_stamp, self._guarded
        if lists is None or need.epoch - self.epoch not in (0, 1):
            return NOBODY
        pool, stamp, guarded = lists
        k = min(k, (self.lend_more if guarded else self.lend) - lent)
        if k <= 0:
            return NOBODY
        ids = self._from(pool, stamp, k)
        if len(ids) < k and need.epoch > self.epoch:
            ids = np.concatenate([ids, self._from(self._tray, self._now_stamp, k - len(ids))])
        self._lent[need.epoch] = lent + len(ids)  # those due too soon count: no second try
        return ids[self.uses.due[ids] > need.step]

    def _from(self, pool: _Source, stamp: int, k: int) -> Index:
        out = []
        while k > 0:
            ids = pool.take(k)
            if not len(ids):
                break
            good = self._drawn(ids, stamp)
            out.append(good)
            k -= len(good)
        return joined(out)

    def _from_idle(self, k: int) -> Index:
        out = []
        while k > 0 and self._idle:
            ids = self._idle.pop()
            if len(ids) > k:
                self._idle.append(ids[:-k])
                ids = ids[-k:]
            good = self._drawn(ids, _LISTED_IDLE)
            out.append(good)
            k -= len(good)
        return joined(out)

    def _drawn(self, ids: Index, stamp: int) -> Index:
        """Those of the entries that count, and may leave; none of them is listed any more."""
        counts = self._stamp[ids] == stamp
        if not every(counts):
            ids = ids[counts]
        once = self._once(ids)
        if not every(once):
            ids = ids[once]
        self._stamp[ids] = 0
        may = self._leaving(ids)
        return ids if every(may) else ids[may]

    def _to_idle(self, ids: Index) -> None:
        if len(ids):
            self._stamp[ids] = _LISTED_IDLE
            self._idle.append(ids)

    def _once(self, ids: Index) -> NDArray[np.bool_]:
        """(k,) true for one entry of each object; spoils the stamps."""
        order = np.arange(-len(ids), 0, dtype=np.int32)
        self._stamp[ids] = order
        once: NDArray[np.bool_] = self._stamp[ids] == order
        return once

    def _pool(self) -> Pool:
        if self._size is not None:
            size = self._size
            return Sorted(len(size), lambda ids: np.maximum(size[ids], 0))
        table = self.uses.table(self.epoch + 1) if self.known > self.epoch else None
        if table is not None:
            return Spread.by_step(*table, self.uses.span(self.epoch + 1))
        return Spread.by_chance(len(self._life))

    def _renew(self) -> None:
        """New lists for those that are read in `epoch`."""
        known = self.known > self.epoch and self.uses.knows(self.epoch + 1)
        self._guarded = known and (self._guarded or not self._gave)
        self._now, self._tray, self._soon = self._pool(), Tray(self._room), []
        self._stamps += 1
        self._now_stamp = self._stamps
