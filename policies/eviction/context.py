"""What an eviction policy asks about its job, and what it hands out to be planned. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from creel.policies.arrays import Ids, Index, Ints, Mask


class PlanningTask(Protocol):
    """What a policy has planned outside the event loop, from what was known when it asked."""

    def plan(self) -> object:
        """Return the plan; only the policy that asked knows what it is."""


class PlanningContext(Protocol):
    """What the policy asks about its job when it may need a plan."""

    @property
    def known(self) -> int:
        """The latest epoch for which every rank has published (some of) its plan."""

    @property
    def clock(self) -> int:
        """Steps that all ranks have done."""

    @property
    def capacity(self) -> int:
        """Bytes of memory, and of disk, that the dataset may claim."""

    def capacities(self, memory: Ints, disk: Ints) -> Ints:
        """(nodes,) bytes that the dataset may claim of each node's memory and disk.

        All nodes compute the same numbers.

        Args:
            memory: (nodes,) bytes.
            disk: (nodes, 2) bytes, and the unit in which records take them.
        """

    @property
    def nbytes(self) -> float:
        """Bytes of all objects of the dataset; unknown lengths are guessed."""

    @property
    def size(self) -> Ints:
        """As `EpochBoundary.size`."""

    @property
    def agreed_size(self) -> Ints:
        """(n,) bytes of each object as all nodes know them, or (1,) if some are unknown."""

    @property
    def page(self) -> int:
        """As `EpochBoundary.page`."""

    @property
    def lead(self) -> tuple[int, int]:
        """Steps that readers work ahead, and steps that should be read ahead."""

    def orders(self, epoch: int) -> Sequence[Sequence[Ids]]:
        """As `EpochBoundary.orders`."""


class PeerHomes(Protocol):
    """Which peers to ask for objects whose holder no plan names (`cluster.homes.Homes`)."""

    def origins(self, ids: Index) -> Ints:
        """Return (k,) the peer to ask for each object, or the source."""

    def asked(self, ids: Index) -> Mask:
        """Return (k,) whether peers of some job ask this node for each object."""

    def awaited(self, ids: Index, epoch: int, left: int) -> Mask | None:
        """Return (k,) whether to ask for each object only later, or None.

        Args:
            epoch: the epoch that reads the objects.
            left: steps that the ranks of this node have left of the epoch before.
        """

    def relayed(self, ids: Index) -> Mask:
        """Return (k,) whether peers of one job ask here for an object at home in another."""
