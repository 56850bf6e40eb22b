"""CustomOrder: the order of a user's own sampler, which only torch's iterator runs."""

from __future__ import annotations

import logging

from torch.utils.data import DataLoader

from creel.loader.order.epoch_order import EpochOrder, IteratorStart, OrderState, kind_of
from creel.loader.order.epoch_plan import EpochPlan
from creel.loader.order.generators import encode_state, state_of

_log = logging.getLogger("creel.loader")


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
        self._copy = begun.before.copied
        self._plans: list[EpochPlan] = []  # of this epoch and later ones
        #: A persistent iterator that begins another epoch draws no base seed.
        kept = previous is not None and previous.base_seed == begun.base_seed
        self._anew = not (kept and self._keeps_seed())
        self.unpredictable = previous is not None and previous.unpredictable

    def record_outcome(self, *, wrong: bool) -> None:
        if wrong:
            self.unpredictable = True
            _log.warning(
                "a copy of %s yielded other samples than the sampler itself: creel no longer runs"
                " copies of it, and only reads ahead what torch has pulled from it",
                kind_of(self._sampler),
            )

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
        while self._copy and len(self._plans) <= epochs_ahead and not self.unpredictable:
            anew = not self._keeps_seed() if self._plans else self._anew
            plan = self._copy.run(anew=anew)
            if plan is None:
                self.unpredictable = True
            else:
                self._plans.append(plan)
        return self._plans[epochs_ahead] if epochs_ahead < len(self._plans) else None

    def state(self, *, over: bool = False) -> OrderState:
        state = super().state(over=over)
        if over and self._loader.generator is not None:
            state["loader_rng"] = encode_state(state_of(self._loader.generator))
        return state
