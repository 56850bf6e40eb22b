"""The shell around the core: gives it events, and executes the actions that it answers with.

Runs only on the loop thread; other threads deliver their results through `hand_in`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from creel.daemon.core import events
from creel.daemon.core.core import Core
from creel.errors import UnavailableError

log = logging.getLogger("creel.node")

BEAT_S = 0.08  # clients give up on a heartbeat older than 2 s


class Loop(Protocol):
    """What a node needs of the process around it: the loop, and both sockets."""

    @property
    def request_address(self) -> str:
        """Where clients send their requests."""

    def call_soon(self, call: Callable[[], None]) -> None:
        """Run a function on the loop thread, soon; may be called from any thread."""

    def send(self, client: bytes, message: Any) -> None:
        """Send a message over the request socket."""

    def stop(self, now: bool, why: str) -> None:
        """Drain and end: at once (`now`), or when all clients have left."""

    @property
    def clients(self) -> int:
        """How many clients are connected."""

    def pids(self) -> dict[str, int]:
        """Return the process of each connected client, by its token."""


class CoreShell:
    """Gives the core its events and executes its actions; ends the daemon if neither works.

    Args:
        core: decides.
        loop: runs what other threads hand in.
        beat: writes the heartbeat of all sessions.
        lose: ends a session, by number, without the core, which has failed at one of its events.
    """

    def __init__(
        self, core: Core, loop: Loop, beat: Callable[[], None], lose: Callable[[int], None]
    ) -> None:
        self.core = core
        #: "serving", or "draining": no plan changes any more, and no byte moves.
        self.state = "serving"
        #: Whether the core's tables are consistent with the arena.
        self.sound = True
        #: How often the core has failed.
        self.bugs = 0
        #: Executes an action, by its type.
        self.execute: dict[type[events.Action], Callable[[Any], object]] = {}
        self._loop, self._write_beat, self._lose = loop, beat, lose
        self._beaten = time.monotonic()
        self._unsettled = False  # whether the core has not acted on some event yet

    def handle(self, event: events.Event, *, settles: bool = True) -> bool:
        """Handle an event and execute the actions; return False if that failed.

        Does nothing while draining: no byte may move then, as clients that disconnect may keep
        their READY, and the core's tables would not match the shared ones.

        settles: False for an event that comes several times in a turn of the loop; the core then
            acts on it in `settle`, at the end of the turn.
        """
        decide = partial(self.core.handle, event, settles=settles)
        done = self._execute(decide, type(event).__name__, getattr(event, "session", 0))
        self._unsettled = not (done and settles)
        return done

    def hand_in(self, event: events.Event) -> None:
        """Handle an event soon, on the loop thread; may be called from any thread."""

        def handle() -> None:
            self.handle(event)

        self._loop.call_soon(handle)

    def settle(self) -> None:
        """Let the core act on the events of this turn that it has not acted on."""
        if self._unsettled:
            self._unsettled = False
            self._execute(self.core.settle, "settling", 0)

    def beat(self, now: float) -> None:
        """Write the heartbeat of all sessions if it is due."""
        if now - self._beaten >= BEAT_S / 2:
            self._beaten = now
            self._write_beat()

    def check_serving(self) -> None:
        """Raise UnavailableError while the daemon drains."""
        if self.state == "draining":
            raise UnavailableError("this daemon is stopping: connect again to reach the next one")

    def _execute(
        self, decide: Callable[[float], list[events.Action]], event: str, session: int
    ) -> bool:
        """Execute what the core decides, of a session or of none (0); return whether it worked.

        Writes the heartbeat first: with plans for millions of objects an event may take a second,
        and a turn of the loop handles many events.
        """
        if self.state == "draining":
            return True
        now = time.monotonic()
        self.beat(now)
        try:
            actions = decide(now)
        except Exception:
            log.exception("the core failed at %s", event)
            self._recover(session)
            return False
        try:
            for action in actions:
                self.execute[type(action)](action)
        except Exception:
            log.exception("an action of the core after %s failed", event)
            self._give_up()
            return False
        return True

    def _recover(self, session: int) -> None:
        """End the session whose event made the core fail; the other sessions continue.

        The failure is a bug of ours, or a lack of memory. If the core remains inconsistent, the
        daemon ends: its clients read directly, and the next daemon starts with an empty arena.
        """
        self.bugs += 1
        self._lose(session)
        try:
            for action in self.core.recover(session):
                self.execute[type(action)](action)
            self.core.check()
        except Exception:
            log.exception("the core cannot recover")
            self._give_up()

    def _give_up(self) -> None:
        log.error("this daemon ends: its state may be inconsistent")
        self.sound = False
        self._loop.stop(True, "a bug")
