"""The index of a dataset's records on disk, in 6 bytes per object."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from creel.cache.disk.journal import ENTRY, Entries
from creel.policies.arrays import Ints

#: A record of this many units or more is entered as a chain, as the column `units` has 16 bits.
MANY_UNITS = (1 << 16) - 1


@dataclass(eq=False)
class DatasetIndex:
    """The places of a dataset's records.

    `place` (n,): first unit + 1 of a record in one run; -number in `chains` of a record in several
    runs; 0 for objects that are not on disk. `units` (n,): units of a record in one run.
    """

    identity: bytes
    place: NDArray[np.int32]
    units: NDArray[np.uint16]
    chains: dict[int, Ints] = field(default_factory=dict)  # (r, 2) first unit and units

    def runs(self, object_id: int) -> Ints | None:
        """Return (r, 2) first unit and units of each run of an object, or None."""
        place = int(self.place[object_id])
        if place > 0:
            return np.array([[place - 1, int(self.units[object_id])]])
        return self.chains[-place] if place else None

    def put(self, object_id: int, runs: Ints) -> None:
        """Enter an object that is not in the index."""
        if len(runs) == 1 and runs[0, 1] < MANY_UNITS:
            self.place[object_id], self.units[object_id] = runs[0, 0] + 1, runs[0, 1]
        else:
            number = int(runs[0, 0]) + 1
            self.chains[number], self.place[object_id] = runs, -number

    def pop(self, object_id: int) -> Ints | None:
        """Remove an object; return its runs, or None if it is not in the index."""
        runs = self.runs(object_id)
        if runs is not None:
            self.chains.pop(-int(self.place[object_id]), None)
            self.place[object_id] = 0
        return runs


def half(identity: bytes) -> int:
    return int.from_bytes(identity[:8], "little")


def runs_of(entries: Entries) -> Ints:
    return np.stack([entries["start"], entries["units"]], 1).astype(np.int64)


def entries_of(index: DatasetIndex, length: Ints) -> Entries:
    place = index.place
    single, several = np.flatnonzero(place > 0), np.flatnonzero(place < 0)
    chains = [index.chains[-number] for number in place[several].tolist()]
    owner = np.append(single, np.repeat(several, [len(runs) for runs in chains]))
    runs = np.stack([place[single] - 1, index.units[single]], 1).astype(np.int64)
    runs = np.concatenate([runs, *chains])
    out = np.zeros(len(owner), ENTRY)
    out["dataset"], out["object"], out["nbytes"] = half(index.identity), owner, length[owner]
    out["start"], out["units"] = runs.T
    return out
