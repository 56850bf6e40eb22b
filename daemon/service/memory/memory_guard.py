"""MemoryGuard: gives memory of the arena back before other processes lack it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from creel.daemon.core import events
from creel.daemon.core.core import Core
from creel.policies.memory import MAX_POLL_S, given_back, next_poll_s
from creel.system import limits
from creel.units import format_size

log = logging.getLogger("creel.memory")


class MemoryGuard:
    """Keeps `reserve` bytes free for other processes: the kernel cannot reclaim the arena."""

    def __init__(self, core: Core, handle: Callable[[events.Event], bool], reserve: int) -> None:
        """`handle` gives the core an event; `reserve` 0: never look."""
        self._core = core
        self._handle = handle
        self._reserve = reserve
        #: Time of the next look, monotonic seconds.
        self.due = 0.0 if reserve else math.inf

    def poll(self, now: float) -> None:
        """Have the core give memory back, or use it again; does nothing until it is due."""
        if now < self.due:
            return
        available = limits.memory(active=True).available
        before = self._core.withheld_nbytes
        change = given_back(available, self._reserve, before)
        if change > 0:
            self._handle(events.MemoryShort(change))
        elif change < 0:
            self._handle(events.MemoryFree(-change))
        after = self._core.withheld_nbytes
        # A cache that has nothing left to give back does not look for more all the time.
        in_vain = change > 0 and after == before
        self.due = now + (MAX_POLL_S if in_vain else next_poll_s(available, self._reserve))
        if after > before == 0:
            log.warning(
                "%s of memory are left for other processes: the cache gives memory back",
                format_size(available),
            )
        elif before > after == 0:
            log.info("the cache uses all of its memory again")
