"""Stage: what an option does around the making of batches, wherever they are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from creel.loader.data.reading.bad_samples import Tolerance, Tolerant, without_skipped

if TYPE_CHECKING:
    from creel.loader.client.session import Session
    from creel.loader.data.binding.bind import Gather
    from creel.loader.making.task import Task

#: Makes the batch of a task, through a session if there is one.
Make: TypeAlias = "Callable[[Task, Session | None], Any]"
Collate: TypeAlias = "Callable[[Any], Any]"


class Stage:
    """One option, for one maker of batches; workers get a copy. This one changes nothing.

    `inside` is nearest to the person's code. What both do counts as reading or as collation.

    Attributes:
        in_parts: whether a batch may be made in parts, by several workers.
    """

    in_parts = False

    def inside(self, dataset: Any, collate: Collate) -> tuple[Any, Collate]:
        """Return what samples are read from, and what collates them, around those given."""
        return dataset, collate

    def outside(
        self, own: Any, dataset: Any, collate: Collate, *, batched: bool
    ) -> tuple[Any, Collate]:
        """Do the same around the `inside` of all stages.

        Args:
            own: the person's dataset.
            batched: whether a batch is made of several samples.
        """
        del own, batched
        return dataset, collate

    def begin(self, task: Task) -> None:
        """Begin a batch that has `seeds`."""

    def gathers(self, gather: Gather) -> bool:  # noqa: ARG002  a subclass needs it
        """Whether batches may be built from bytes, without the dataset's code."""
        return False

    def in_trainer(self, make: Make) -> Make:
        """Return what makes batches in the training thread, where `make` does."""
        return make


class Tolerating(Stage):
    """Leaves out bad samples, or replaces them."""

    def __init__(self, tolerance: Tolerance) -> None:
        self._tolerance = tolerance

    def outside(
        self, own: Any, dataset: Any, collate: Collate, *, batched: bool
    ) -> tuple[Any, Collate]:
        tolerant = Tolerant(own, self._tolerance, dataset)
        return tolerant, without_skipped(collate) if batched else collate
