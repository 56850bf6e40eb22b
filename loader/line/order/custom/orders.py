"""CustomOrder: the order of a user's own sampler, which only torch's iterator runs.

PacedOrder: of one whose items arrive while training runs, such as those of a stream.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from creel.loader.data.user_code.protected import attribute
from creel.loader.line.order.epoch_order import EpochOrder, IteratorStart, OrderState
from creel.loader.line.order.epoch_plan import EpochPlan
from creel.loader.line.order.generators import decode_state, encode_state, set_state, state_of

#: How many samplers may be around one of torch's.
_DEEPEST = 4


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

    A sampler around one of torch's, by its attribute `sampler`, is resumed with the draws of that:
    torch's draw at their first item only, from a generator of their own or else the global one.
    """

    known = False

    def __init__(
        self,
        loader: DataLoader[object],
        begun: IteratorStart,
        previous: EpochOrder | None = None,
        given: OrderState | None = None,
        *,
        redraw: bool = False,
    ) -> None:
        """Make an order.

        Args:
            given: the state of an epoch to begin again.
            redraw: the global generator is as it was then, so that its draws repeat themselves.
        """
        super().__init__(loader, begun)
        self._begun = begun.sampler_iter
        self._kept = previous is not None and previous.base_seed == begun.base_seed
        self._generator = inner_generator(loader, self._sampler)
        self._inner_rng = ""  # state of it before the first item was pulled
        self._given_rng = (given or {}).get("inner_rng", "")
        if redraw and self._generator is torch.default_generator:
            self._given_rng = ""

    def note_wrong_prediction(self) -> None:
        if self.copied is not None:
            self.copied.give_up("it yielded other samples than the sampler itself")

    def __next__(self) -> object:
        first = not self.pulled and self._generator is not None
        pulled = self._first() if first else next(self._begun)
        self.pulled += 1
        return pulled

    def _first(self) -> object:
        """Pull the first item, with the draws that a resumed epoch made at that time."""
        generator = self._generator
        assert generator is not None  # noqa: S101  see `__next__`
        present = state_of(generator)
        if not self._given_rng:
            self._inner_rng = encode_state(present)
            return next(self._begun)
        self._inner_rng = self._given_rng
        set_state(generator, decode_state(self._given_rng))
        try:
            return next(self._begun)
        finally:
            if generator is torch.default_generator:  # it belongs to the user
                set_state(generator, present)

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
        inner = self._generator
        if inner is not None and not (over and inner is torch.default_generator):
            begun = "" if over else self._inner_rng or self._given_rng
            state["inner_rng"] = begun or encode_state(state_of(inner))
        return state


def inner_generator(loader: DataLoader[object], sampler: object) -> torch.Generator | None:
    """Return what one of torch's samplers inside a custom one draws from; None if none does.

    None also for the loader's generator, which is saved for every order.
    """
    inner = attribute(sampler, "sampler")
    for _ in range(_DEEPEST):
        if type(inner) in {RandomSampler, SubsetRandomSampler, WeightedRandomSampler}:
            own: torch.Generator | None = inner.generator
            if own is not None and own is loader.generator:
                return None
            return torch.default_generator if own is None else own
        inner = attribute(inner, "sampler")
    return None


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
