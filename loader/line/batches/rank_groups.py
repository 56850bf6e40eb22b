"""RankGroups: what the ranks of a job have agreed on for one loader, in its first epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from creel.loader.line.order.epoch_order import combinator_of, index_sampler
from creel.loader.making.groups.exchange import agreed, check_unchanged
from creel.loader.making.groups.replicate import join_group
from creel.loader.making.places.other_ranks import ALONE, OtherRanks

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from creel.loader.line.options.loader_args import LoaderArgs
    from creel.policies.order.remap import Exchange


class RankGroups:
    """To exchange samples (`remap`), and to share batches (`replicate`).

    Attributes:
        share: whether ranks are to share batches.
    """

    def __init__(self, args: LoaderArgs) -> None:
        self.share = args.replicate is not None
        self._args = args
        self._exchange: Exchange | None = None
        self._others = ALONE
        self._joined = False

    def exchange(self, loader: DataLoader[Any]) -> Exchange | None:
        """Return how the ranks exchange samples, as agreed in the first epoch; None: not at all.

        Raises:
            ConfigError: as `exchange.agreed` and `exchange.check_unchanged`.
        """
        if self._args.remap is None:
            return None
        if self._exchange is None:
            self._exchange = agreed(index_sampler(loader))
        check_unchanged(self._exchange, index_sampler(loader))
        return self._exchange if self._exchange.moves else None

    def others(self, loader: DataLoader[Any], plain: Callable[[], bool]) -> OtherRanks:
        """Return who shares this rank's batches, as agreed with other ranks at the first call.

        plain: whether batches are only copied from the arena.

        Raises:
            ConfigError: as `replicate.join_group`.
        """
        if self.share and not self._joined:
            combinator = combinator_of(loader)
            digest = "" if combinator is None else combinator.digest
            group = self._args.replicate
            self._others = join_group(loader, group, plain=plain(), digest=digest)
            self._joined = True
        return self._others

    @property
    def needed(self) -> bool:
        """Whether other ranks depend on this rank's creel, for batches or for exchanged samples."""
        return self._others.share or (self._exchange is not None and self._exchange.moves)

    def close(self) -> None:
        """Close the connections to other ranks."""
        self._others.close()
