"""The limit on memory that clients make a daemon use beside the arena: tables and plans."""

from __future__ import annotations

from collections.abc import Callable

from creel.daemon.core.core import Core
from creel.daemon.service.registry import DatasetRecord, Registry
from creel.errors import UnavailableError
from creel.system import limits
from creel.units import format_size

#: Least limit, whatever the budget: enough for 10 million objects.
MIN_LIMIT_NBYTES = 512 << 20
_SMALL_NBYTES = 16 << 20  # for smaller requests, the machine's free memory is not checked


class Quota:
    """Limits the memory of tables, plans and next uses to half the size of the arena.

    Args:
        budget: bytes of the arena.
        forget: frees the memory of an idle dataset, if possible.
    """

    def __init__(
        self, budget: int, registry: Registry, core: Core, forget: Callable[[DatasetRecord], None]
    ) -> None:
        self.limit = max(MIN_LIMIT_NBYTES, budget // 2)
        self.coming: dict[str, int] = {}  # token -> bytes of tables being made
        self._registry = registry
        self._core = core
        self._forget = forget

    def used(self) -> int:
        """Return the bytes in use or reserved."""
        known = sum(d.tables_nbytes for d in self._registry.datasets.values())
        known += self._registry.samples_nbytes()
        return known + sum(self.coming.values()) + self._core.plans_nbytes()

    def fits(self, nbytes: int) -> bool:
        """Return whether `nbytes` more fit; forget idle datasets to make room, largest first."""
        if nbytes > _SMALL_NBYTES and nbytes > limits.memory().available // 2:
            return False
        idle = sorted(self._registry.idle(), key=lambda d: d.tables_nbytes)
        while self.limit - self.used() < nbytes:
            if not idle:
                return False
            self._forget(idle.pop())
        return True

    def check(self, nbytes: int, subject: str) -> None:
        """Make sure that `nbytes` more are allowed.

        Raises:
            UnavailableError: they are not.
        """
        if not self.fits(nbytes):
            raise UnavailableError(
                f"{subject} need {format_size(nbytes)} of memory for tables and plans,"
                f" {format_size(self.used())} of {format_size(self.limit)} are taken: raise"
                " memory.budget (half of it may go to them), make records longer, or split the"
                " dataset"
            )
