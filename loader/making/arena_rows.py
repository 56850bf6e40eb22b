"""ArenaRows: whether a maker builds batches from rows of the arena, and by what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from creel.loader.data.binding.gather import Gatherer
from creel.loader.making.stage import Stage
from creel.loader.making.transport.batch_message import Collate

if TYPE_CHECKING:
    from creel.loader.client.session import Session
    from creel.loader.data.binding.bind import Binding, Gather


class ArenaRows:
    """What builds the batches of one maker from bytes alone, as long as its dataset allows that.

    Attributes:
        fixed: whether that holds for good, so that `gatherer` is right for its `session`.
        gatherer: built for `session`; None: user code must make the batches.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        memory: Callable[[int], torch.Tensor],
        *,
        plain: bool,
        live: bool,
    ) -> None:
        """Make one; the arguments are those of `BatchMaker`."""
        self._stages, self._memory = stages, memory
        self._plain, self._live = plain, live
        self._gather: Gather | None = None
        self._labels: list[object] = []  # the binding's labels when `_gather` was made
        self.fixed = False
        self.gatherer: Gatherer | None = None
        self.session: Session | None = None

    def inspect(self, binding: Binding | None) -> None:
        """Note how batches are made from bytes, if the dataset as it is now allows that."""
        self._gather, self.gatherer, self.session = None, None, None
        self.fixed = False
        if binding is None:
            return
        if self._live:
            self._labels = binding.labels()
        gather = binding.gather() if self._plain else None
        if gather is not None and all(stage.gathers(gather) for stage in self._stages):
            self._gather = gather
        # Nobody changes a copy whose batches need no user code.
        self.fixed = not (self._live or (gather is not None and gather.has_code))

    def gatherer_of(self, binding: Binding, session: Session, collate: Collate) -> Gatherer | None:
        """Return what builds batches from this session's rows; None if user code must make them."""
        if self._changed(binding):
            self.inspect(binding)
        if self.session is not session:
            self.session, self.gatherer = session, None
            if self._gather is not None:
                self.gatherer = Gatherer(self._gather, session, self._memory, collate)
        return self.gatherer

    def _changed(self, binding: Binding) -> bool:
        """Whether the user has assigned attributes or labels since `inspect`."""
        gather = self._gather
        if self._live and any(
            a is not b for a, b in zip(self._labels, binding.labels(), strict=True)
        ):
            return True
        return not self.fixed and gather is not None and not binding.gathers(gather)
