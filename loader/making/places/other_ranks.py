"""OtherRanks: the ranks of this node that share a loader's batches, as a place knows them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from creel.loader.data.reading.bad_samples import BadSample
    from creel.loader.making.batch_times import BatchTimes
    from creel.loader.making.places.place import BatchPlace
    from creel.loader.making.stage import Make
    from creel.loader.making.transport.batch_message import BatchMessage


class Followers(Protocol):
    """Ranks that also get the batches of one iterator's worker processes."""

    def expect(self, tag: int, batch: int, index: object) -> None:
        """Note the samples of a batch that is asked for."""

    def send(
        self,
        tag: int,
        batch: int,
        worker: int,
        message: BatchMessage,
        fds: Sequence[int],
        times: BatchTimes,
        bad: tuple[BadSample, ...],
    ) -> None:
        """Send a batch as it came from its worker. The caller keeps the descriptors."""

    def returned(self, worker: int, slots: Sequence[int]) -> list[int]:
        """Take back slots of this rank; return those that no rank holds any more."""
        ...

    def close(self) -> None:
        """End the iterator: no more batches come."""


class Tee(Protocol):
    """Sends the batches that the training thread makes to other ranks, too."""

    def around(self, make: Make, times: Callable[[int], BatchTimes]) -> Make:
        """Return what makes a batch, and sends it; `times`: see `BatchMaker.times`."""
        ...

    def close(self) -> None:
        """End the iterator: no more batches come."""


class OtherRanks:
    """The ranks of this node that share batches with this one: by default none.

    Attributes:
        share: whether there are any.
    """

    share = False

    def place(self, max_leased: int) -> BatchPlace | None:  # noqa: ARG002  for who shares
        """Return where another rank makes this one's batches; None: this one makes its own.

        max_leased: as `loader.max_leased`.
        """
        return None

    def followers(self, ahead: int) -> Followers | None:  # noqa: ARG002  as above
        """Return who gets the batches of worker processes, up to `ahead` of them ahead of use."""
        return None

    def tee(self, slots: int) -> Tee | None:  # noqa: ARG002  as above
        """Return what sends the batches of the training thread, by so many slots; None: nobody."""
        return None

    def close(self) -> None:
        """Close the connections, now or with the last iterator."""


#: Those of a rank that makes its batches for itself.
ALONE = OtherRanks()
