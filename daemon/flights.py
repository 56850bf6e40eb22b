"""Fetches under way: one per object over all sessions, within bounds. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from creel.cache.extents import ABSENT as NOWHERE
from creel.cache.extents import must
from creel.cache.space import FixedPool
from creel.daemon.events import Fetch
from creel.daemon.holding import Holding, Index, Sizes
from creel.daemon.shares import Shares
from creel.errors import IllegalEventError
from creel.policies.masks import every
from creel.policies.prefetch import Window, affordable, portions
from creel.policies.retain import ABSENT, FETCHING, Need

#: Share of the objects and bytes under way that is left to those who wait.
_SPARED = 0.25
#: A fetch that nobody waits for (`Warm`) may take until then, in seconds.
_WHENEVER_S = 3600.0
_CHUNK = 512


@dataclass(eq=False, slots=True)
class Flight:
    """One fetch: objects, offsets (NOWHERE: length unknown), lengths, and for whom.

    `nbytes` is what was expected in all, `expected` the part of it that has no room yet.
    """

    holding: Holding
    ids: Index
    offset: Sizes
    length: Sizes
    need: Need
    begun: float
    nbytes: int
    expected: int
    generation: int  # see `Versions`


class Flights:
    """All fetches that were started and have not landed."""

    def __init__(self, shares: Shares, window: Window) -> None:
        self.objects = 0
        self.nbytes = 0
        self._shares = shares
        self._window = window
        self._flights: dict[int, Flight] = {}
        self._last = 0
        self.generation = 0  # the present one
        self._mark = 0
        shares.busy = self.offsets

    def leave(self, nbytes: Sizes, *, urgent: bool) -> int:
        """How many objects of these sizes may start now; at least one when nothing is under way."""
        part = 1.0 if urgent else 1.0 - _SPARED
        objects = int(part * self._window.inflight_objects) - self.objects
        room = int(part * self._window.inflight_nbytes) - self.nbytes
        k = max(min(len(nbytes), objects, affordable(nbytes, room)), 0)
        return k if self._flights else min(max(k, 1), len(nbytes))

    def start(
        self,
        h: Holding,
        ids: Index,
        offset: Sizes,
        length: Sizes,
        need: Need,
        now: float,
        due: float,
    ) -> list[Fetch]:
        """Start fetches of these objects, all equally urgent."""
        if not len(ids):
            return []
        h.life[ids] = FETCHING
        order = ids.argsort()
        ids, length = ids[order], length[order]
        # Rooms of one size may be dealt out anew: neighbours are then written in one go.
        offset = np.sort(offset) if isinstance(h.pool, FixedPool) else offset[order]
        nbytes, small = h.expected(length), ids.astype(np.int32)
        strange = nbytes is not length
        out = []
        for part in portions(nbytes, self._window):
            self._last += 1
            total = int(nbytes[part].sum())
            guessed = int(nbytes[part][length[part] < 0].sum()) if strange else 0
            room = offset[part], length[part]
            flight = Flight(h, ids[part], *room, need, now, total, guessed, self.generation)
            self._flights[self._last] = flight
            self.objects += len(flight.ids)
            self.nbytes += total
            self._shares.expected += guessed
            out.append(Fetch(self._last, h.name, small[part], flight.offset, flight.length, due))
        return out

    def land(self, fetch: int, objects: int) -> Flight | None:
        """Take a fetch off the books; None when it is not on them.

        Raises:
            IllegalEventError: it was not of so many objects.
        """
        flight = self._flights.get(fetch)
        if flight is None:
            return None
        if len(flight.ids) != objects:
            raise IllegalEventError(f"fetch {fetch} was of {len(flight.ids)} objects")
        del self._flights[fetch]
        self.objects -= objects
        self.nbytes -= flight.nbytes
        self._shares.expected -= flight.expected
        return flight

    def mark(self) -> None:
        """An event begins: `abort` means the fetches that are started from now on."""
        self._mark = self._last

    def abort(self) -> None:
        """The fetches started since `mark` were never begun: their room is free again."""
        for number in [n for n in self._flights if n > self._mark]:
            flight = self._flights[number]
            placed = flight.offset != NOWHERE
            flight.holding.give_back(flight.ids[placed], flight.offset[placed])
            flight.holding.life[flight.ids] = ABSENT
            self.land(number, len(flight.ids))

    def warm(self, h: Holding, now: float) -> list[Fetch]:
        """Load the dataset in order of ids, into free room only, while little else is under way."""
        out: list[Fetch] = []
        while 0 <= h.warming < len(h):
            stop = min(h.warming + _CHUNK, len(h))
            ids = h.warming + np.flatnonzero(h.life[h.warming : stop] == ABSENT)
            guess = h.expected(h.length[ids])
            k = self.leave(2 * guess, urgent=False)  # half of what sessions may have
            fit = min(k, affordable(guess, self._shares.free_nbytes))
            length = h.length[ids[:fit]]
            offset = np.full(fit, NOWHERE, np.int64)
            known = length >= 0
            offset[known] = h.place(ids[:fit][known], length[known])
            placed = (offset != NOWHERE) | (length < 0)
            chosen = ids[:fit][placed], offset[placed], length[placed]
            out += self.start(h, *chosen, Need(0, 0), now, now + _WHENEVER_S)
            if fit < k or not every(placed):
                if self._shares.expected:  # a guess holds room that the truth may not need
                    return out
                break  # no room
            if k < len(ids):
                return out  # enough under way
            h.warming = stop
        h.warming = -1
        return out

    def of(self, h: Holding, object_id: int) -> Flight | None:
        """The fetch that brings an object, if one does."""
        flights = (f for f in self._flights.values() if f.holding is h)
        return next((f for f in flights if object_id in f.ids), None)

    def ids(self, h: Holding) -> Index:
        """(k,) objects of a dataset that are under way."""
        own = [f.ids for f in self._flights.values() if f.holding is h]
        return np.concatenate([np.empty(0, np.intp), *own])

    def placed(self, h: Holding) -> Index:
        """(k,) objects of a dataset that are under way and have room."""
        own = [f.ids[f.offset != NOWHERE] for f in self._flights.values() if f.holding is h]
        return np.concatenate([np.empty(0, np.intp), *own])

    def offsets(self, h: Holding) -> tuple[Sizes, Sizes]:
        """(k,) offsets and (k,) lengths that fetches of a dataset write to."""
        own = [f for f in self._flights.values() if f.holding is h]
        none = np.empty(0, np.int64)
        offset = np.concatenate([none, *(f.offset for f in own)])
        length = np.concatenate([none, *(f.length for f in own)])
        return offset[offset != NOWHERE], length[offset != NOWHERE]

    def check(self) -> None:
        """Raise IllegalEventError unless the sums are right."""
        flights = self._flights.values()
        must(self.objects == sum(len(f.ids) for f in flights), "objects under way")
        must(self.nbytes == sum(f.nbytes for f in flights), "bytes under way")
        must(self._shares.expected == sum(f.expected for f in flights), "bytes expected")
