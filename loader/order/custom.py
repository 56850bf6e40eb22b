"""CustomOrder: the order of a user's own sampler, which only torch's iterator runs.

PacedOrder: of one whose items arrive while training runs, such as those of a stream.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import DataLoader

from creel.loader.order.epoch_order import EpochOrder, IteratorStart, OrderState
from creel.loader.order.epoch_plan import EpochPlan
from creel.loader.order.generators import encode_state, state_of


class PacedIterator:
    """What iterating a sampler gives whose items arrive while training runs; it knows its place."""

    #: Whether `delivered` will be called.
    reports = False

    def __iter__(self) -> Iterator[object]:
        return self

    def __next__(self) -> object:
        """Return the next item; waits for it."""
        raise NotImplementedError

    def arrived(self) -> bool:
        """Whether `next` returns, or ends the epoch, without a wait."""
        raise NotImplementedError

    def begin_at(self, batch: int) -> None:
        """Number the first item `batch`: the sampler was given the place of that one."""
        raise NotImplementedError

    def state(self, batches: int) -> object:
        """Return what the sampler's `load_state_dict` needs to begin with item `batches`."""
        raise NotImplementedError

    def delivered(self, batches: int) -> None:
        """Note that training has all items below `batches`."""
        raise NotImplementedError


class CustomOrder(EpochOrder):
    """The order of a custom sampler: iterated when torch would, never ahead.

    It is predicted only if the user permits it, by running a copy (`sampler_copy`).
    """

    known = False

    def __init__(
        self, loader: DataLoader[object], begun: IteratorStart, previous: EpochOrder | None = None
    ) -> None:
        super().__init__(loader, begun)
        self._begun = begun.sampler_iter
        self._kept = previous is not None and previous.base_seed == begun.base_seed

    def note_wrong_prediction(self) -> None:
        if self.copied is not None:
            self.copied.give_up("it yielded other samples than the sampler itself")

    def __next__(self) -> object:
        pulled = next(self._begun)
        self.pulled += 1
        return pulled

    def close(self) -> None:
        self._begun = iter(())

    def skip(self, batches: int) -> None:
        for _ in range(batches):
            if next(self, None) is None:
                return

    def predict(self, epochs_ahead: int = 0) -> EpochPlan | None:
        return None if self.copied is None else self.copied.plan(epochs_ahead, kept=self._kept)

    def state(self, *, over: bool = False) -> OrderState:
        state = super().state(over=over)
        if over and self._loader.generator is not None:
            state["loader_rng"] = encode_state(state_of(self._loader.generator))
        return state


class PacedOrder(CustomOrder):
    """The order of a sampler whose iterator is a PacedIterator."""

    paced = True

    def __init__(
        self, loader: DataLoader[object], begun: IteratorStart, items: PacedIterator
    ) -> None:
        super().__init__(loader, begun)
        self._items = items
        items.reports = True

    def arrived(self) -> bool:
        return self._items.arrived()

    def skip(self, batches: int) -> None:
        self._items.begin_at(batches)
        self.pulled += batches

    def delivered(self, batches: int) -> None:
        self._items.delivered(batches)

    def state_after(self, batches: int, *, over: bool) -> OrderState:
        state = self.state(over=over)
        state["own"] = [{"state": self._items.state(batches)}]
        return state
