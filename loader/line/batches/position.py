"""Position: how far a loader has come in training, over all its iterators, and resuming it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from creel.errors import ConfigError
from creel.loader.data.user_code.values import whole, wrong
from creel.loader.line.order.epoch_order import PROGRESS_VERSION, EpochOrder, Progress
from creel.loader.line.order.samplers import resharded, resized, resume, without_batches

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from creel.loader.line.steps.mapped_pages import MappedPages


class LastRun(Protocol):
    """What remains of an iterator's last epoch (`EpochRun`)."""

    finished: bool
    pages: MappedPages

    def progress(self, delivered: int | None) -> Progress:
        """Return the position in training, as `DataLoader.state_dict`."""
        ...


class Position:
    """The position of one loader.

    Attributes:
        epoch: of the last epoch; -1 before the first.
        order: its order.
        run: the iterator that began it.
        resume: the saved epoch that the next one resumes; None: the next one is whole.
        finished_seed: of the samples of a resumed epoch that was finished; None after the next one
            has begun.
    """

    def __init__(self) -> None:
        self.epoch = -1
        self.order: EpochOrder | None = None
        self.run: LastRun | None = None
        self.resume: Progress | None = None
        self.finished_seed: int | None = None

    def take_up(
        self, loader: DataLoader[Any], state: Progress, leave_out: Iterable[int] = ()
    ) -> None:
        """Make the next epoch the one saved in `state`, or the one after it if that is finished.

        leave_out: batches of the saved epoch to skip.

        Raises:
            ConfigError: the state is of another version or kind of loader, or incomplete.
        """
        if not state:
            return
        saved: object = state
        if not isinstance(saved, Mapping) or "version" not in saved:
            raise ConfigError("this is not a state_dict of a creel.DataLoader: start without it")
        if state["version"] != PROGRESS_VERSION:
            raise ConfigError(
                f"this state_dict has version {state['version']}, not {PROGRESS_VERSION}"
            )
        lacks = {"epoch", "batches", "finished"} - state.keys()
        if lacks or ("order" not in state and state["epoch"] >= 0):
            # torch.distributed.checkpoint loses keys: it fills in those that a fresh state has.
            raise ConfigError("this state_dict lacks keys: save and load it as one value (pickle)")
        self.epoch = state["epoch"]
        self.resume = None
        if "order" in state:
            held: Any = weakref.proxy(loader)
            batches, over = state["batches"], state["finished"]
            left = _numbers(leave_out)
            given = without_batches(held, state["order"], batches, left) if left else state["order"]
            given, batches, over = resharded(held, given, batches=batches, over=over)
            given, batches = resized(held, given, batches=batches, over=over)
            order = resume(held, given, over=over, batches=batches, previous=self.order)
            self.order = self.order if order is None else order
            self.finished_seed = state.get("seed") if over else None
            if not over:
                self.resume = Progress(**{**state, "order": given, "batches": batches})


def _numbers(leave_out: Iterable[int]) -> list[int]:
    """Return the numbers of batches to leave out.

    Raises:
        ConfigError: they are no numbers from 0 on.
    """
    if isinstance(leave_out, Iterable):
        numbers = [whole(value) for value in leave_out]
        if all(number is not None and number >= 0 for number in numbers):
            return [number for number in numbers if number is not None]
    raise wrong("leave_out", leave_out, "numbers of batches, from 0 on")
