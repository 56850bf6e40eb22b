"""What desk and line ask of the daemon: the seam between bytes from clients and the node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from creel.cache.manifest import Manifest
from creel.daemon.registry import Session
from creel.messages import Ask, Extend, Open, Opened, Refused, Registered, Welcome


@dataclass(frozen=True)
class Answer:
    """What goes back over the desk: a message and descriptors, which the sender does not keep."""

    message: Welcome | Registered | Opened | Refused
    fds: tuple[int, ...] = ()


class Host(Protocol):
    """What desk and line ask of the daemon. Refusals are UnavailableError or ConfigError."""

    def welcome(self, token: str) -> tuple[Welcome, int]:
        """The greeting and the arena's descriptor."""

    def register(
        self, token: str, read: Callable[[], Manifest], reply: Callable[[Answer], None]
    ) -> None:
        """Have a manifest read and checked elsewhere; `reply` is called by the loop, later."""

    def afford(self, nbytes: int, what: str) -> None:
        """Make sure that so many bytes may be taken for what a client sends."""

    def open(self, token: str, request: Open) -> Session:
        """Begin a session."""

    def session(self, token: str, session_id: int) -> Session:
        """A session that this token owns."""

    def close_session(self, session: Session) -> None:
        """End a session."""

    def left(self, token: str) -> None:
        """The owner of this token is gone."""

    def extended(self, session: Session, message: Extend, arrays: list[NDArray[Any]]) -> None:
        """A session's plan goes on (checked)."""

    def begun(self, session: Session, epoch: int) -> None:
        """An epoch of a session begins."""

    def truncated(self, session: Session, step: int) -> None:
        """A session's plan ends earlier."""

    def waiting(self, session: Session) -> None:
        """Somebody stalls on this session."""

    def answer(self, ask: Ask) -> dict[str, Any]:
        """The answer to a command."""
