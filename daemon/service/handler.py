"""The interface that the control and request sockets call; `Node` implements it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from creel.cache.storage.manifest import Manifest
from creel.daemon.service.registry import SessionRecord
from creel.messages import Command, Extend, Open, Opened, Refused, Registered, Welcome


@dataclass(frozen=True)
class Answer:
    """An answer over the control socket: a message and descriptors, which the sender keeps open."""

    message: Welcome | Registered | Opened | Refused
    fds: tuple[int, ...] = ()


class RequestHandler(Protocol):
    """Requests of clients. Refusals are UnavailableError or ConfigError."""

    def welcome(self, token: str) -> tuple[Welcome, int]:
        """Return the greeting and the arena's descriptor."""

    def register(
        self, token: str, read: Callable[[], Manifest], reply: Callable[[Answer], None]
    ) -> None:
        """Read and check a manifest in another thread; the loop calls `reply` later."""

    def afford(self, nbytes: int, what: str) -> None:
        """Raise UnavailableError unless `nbytes` may be taken for what a client sends."""

    def open(self, token: str, request: Open) -> SessionRecord:
        """Open a session."""

    def session(self, token: str, session_id: int) -> SessionRecord:
        """Return a session that this token owns."""

    def close_session(self, session: SessionRecord) -> None:
        """Close a session."""

    def left(self, token: str) -> None:
        """Handle the end of this token's owner."""

    def extended(self, session: SessionRecord, message: Extend, arrays: list[NDArray[Any]]) -> None:
        """Append to a session's plan; the arrays are checked."""

    def begun(self, session: SessionRecord, epoch: int) -> None:
        """Begin an epoch of a session."""

    def truncated(self, session: SessionRecord, step: int) -> None:
        """Truncate a session's plan."""

    def waiting(self, session: SessionRecord) -> None:
        """Handle a reader that waits for this session."""

    def answer(self, ask: Command) -> dict[str, Any]:
        """Return the answer to a command."""
