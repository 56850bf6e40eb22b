"""CustomOrder: the order of a user's own sampler, which only torch's iterator runs."""

from __future__ import annotations

from torch.utils.data import DataLoader

from creel.loader.order.epoch_order import EpochOrder, IteratorStart, OrderState
from creel.loader.order.epoch_plan import EpochPlan
from creel.loader.order.generators import encode_state, state_of


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
        self._step = 0 if self._rehearsed is None else self._rehearsed.next_step

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
        plan = None if self.copied is None else self.copied.plan(epochs_ahead, kept=self._kept)
        replays = self._replays(epochs_ahead)
        return plan if plan is None or replays is None else plan.rehearsed(replays)

    def _first_step(self) -> int:
        return self._step

    def state(self, *, over: bool = False) -> OrderState:
        state = super().state(over=over)
        if over and self._loader.generator is not None:
            state["loader_rng"] = encode_state(state_of(self._loader.generator))
        return state
