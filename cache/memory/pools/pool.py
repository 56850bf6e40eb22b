"""What a space and its pools know of each other. Pure."""

from __future__ import annotations

from typing import Protocol, Self

from creel.cache.memory.pools.free_ranges import FreeRanges
from creel.cache.memory.pools.runs import Runs
from creel.policies.arrays import Ints


class ObjectPool(Protocol):
    """The memory of one dataset in a space; places (see `runs`) and sizes are (k,) int64."""

    same_size: bool  # whether all rooms have one size
    used: int  # bytes of all rooms
    record: int  # bytes of a room if all have one size, else 0
    page: int  # the size of every room is a multiple of it

    def alloc(self, nbytes: Ints) -> Ints:
        """Allocate objects of these sizes; return their places, NOWHERE where there is no room."""

    def rounded(self, nbytes: Ints) -> Ints:
        """Return the bytes of the rooms for objects of these sizes."""

    def free(self, places: Ints, nbytes: Ints) -> int:
        """Free objects of these sizes; return the bytes of their rooms."""

    def runs(self, places: Ints) -> Runs:
        """Return the runs of those objects that consist of several."""

    def rooms(self, places: Ints, nbytes: Ints) -> tuple[Ints, Ints]:
        """Return starts and sizes of all ranges that these objects occupy, in any order."""

    def ranges(self) -> tuple[Ints, Ints]:
        """Return starts and sizes of the pool's ranges (-1: up to the start of the next range)."""

    def adopt(self, ranges: tuple[Ints, Ints], places: Ints, nbytes: Ints, runs: Runs) -> None:
        """Take over ranges with objects in them, as the result of `ranges` was; the pool is empty.

        Raises:
            IllegalEventError: the objects do not lie in them (nothing was changed).
        """

    def clear(self) -> bool:
        """Free all objects at once, if the pool can; return whether it has."""

    def take_over(self, other: Self) -> None:
        """Take over all rooms of another pool with rooms of the same kind, which is empty then."""

    def trim(self) -> None:
        """Return unused slabs to the space."""

    def check(self, held: Ints) -> None:
        """Raise IllegalEventError unless the `held` bytes of all ranges add up."""


class Space(Protocol):
    """The bytes that pools share (`Allocator`)."""

    nbytes: int
    extents: FreeRanges

    def trim(self, asking: ObjectPool) -> None:
        """Take empty slabs back from all pools except the one that needs room."""
