"""Every error creel raises on purpose.

CreelError
├── ConfigError             the person's to mend: a bad value, an unknown key, a missing path
│   └── NotFoundError       no data where the person said it is; also a FileNotFoundError
├── ProtocolError
│   ├── MalformedError      the other side sent bytes that no message of this version has
│   └── IllegalEventError   our own bug: an event that cannot happen in this state
├── SourceError             the dataset's storage failed; `uri` and `errno` are kept
│   └── SourceNotFoundError     the object is not there; a FileNotFoundError too
└── UnavailableError        not now: carries `retry_after`
    ├── NoDaemonError       nobody listens at the daemon's address
    └── DaemonLostError     the daemon was there and is gone, or stopped answering
"""

from __future__ import annotations


class CreelError(Exception):
    """Base of all errors below; a caller that catches it catches nothing else."""


class ConfigError(CreelError, ValueError):
    """A value the person gave cannot be used; the message says what to do instead."""


class NotFoundError(ConfigError, FileNotFoundError):
    """No data where the person said it is; also what torchvision would have raised."""


class ProtocolError(CreelError):
    """The two sides disagree about what was said."""


class MalformedError(ProtocolError):
    """The other side sent bytes that no message of this version has."""


class IllegalEventError(ProtocolError):
    """An event that cannot happen in this state: our own bug, with its story."""


class SourceError(CreelError, OSError):
    """Storage failed for good (retries included).

    Args:
        errno: the operating system's number, or 0 where the store gives none.
        reason: one sentence of what went wrong.
        uri: the object's address.

    With a single argument it is a message, as every exception is: so torch can raise it again, with
    its class, in another process than the one that failed.
    """

    def __init__(self, errno: int | str, reason: str = "", uri: str = "") -> None:
        if isinstance(errno, str):
            super().__init__(errno)
        else:
            super().__init__(errno, reason, uri)
        self.uri = uri


class SourceNotFoundError(SourceError, FileNotFoundError):
    """The object is not there (any more)."""


class UnavailableError(CreelError):
    """Not now; the caller may retry after `retry_after` seconds."""

    def __init__(self, what: str, *, retry_after: float = 1.0) -> None:
        super().__init__(what)
        self.retry_after = retry_after


class NoDaemonError(UnavailableError):
    """Nobody listens at the daemon's address."""


class DaemonLostError(UnavailableError):
    """The daemon was there and is gone, or stopped answering."""
