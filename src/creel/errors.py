"""Every error that creel raises on purpose.

CreelError
├── ConfigError             for the user to fix: a bad value, an unknown key, a missing path
│   └── NotFoundError       no data where the user said it is; also a FileNotFoundError
├── ProtocolError
│   ├── MalformedError      the other side sent bytes that are no message of this version
│   └── IllegalEventError   a bug of creel: an event that cannot happen in this state
├── SourceError             the dataset's storage failed; `uri` and `errno` are kept
│   └── SourceNotFoundError     the object does not exist; also a FileNotFoundError
├── TooManyBadSamplesError  more samples cannot be read than `max_bad_samples`; also a RuntimeError
└── UnavailableError        not now; a later attempt may succeed
    ├── NoDaemonError       no daemon listens at the address
    └── DaemonLostError     the daemon ended or stopped answering
"""

from __future__ import annotations


class CreelError(Exception):
    """Base of all errors below."""


class ConfigError(CreelError, ValueError):
    """A value from the user cannot be used; the message says what to do instead."""


class NotFoundError(ConfigError, FileNotFoundError):
    """No data where the user said it is; also the error that torchvision would have raised."""


class ProtocolError(CreelError):
    """The two sides disagree about the protocol."""


class MalformedError(ProtocolError):
    """The other side sent bytes that are no message of this version."""


class IllegalEventError(ProtocolError):
    """An event that cannot happen in this state: a bug of creel."""


class SourceError(CreelError, OSError):
    """Storage failed for good (after retries).

    Args:
        errno: the operating system's number, or 0 if the store has none.
        reason: one sentence about what went wrong.
        uri: the object's address.

    A single argument is a message, as for every exception, so that torch can raise the same class
    in another process.
    """

    def __init__(self, errno: int | str, reason: str = "", uri: str = "") -> None:
        if isinstance(errno, str):
            super().__init__(errno)
        else:
            super().__init__(errno, reason, uri)
        self.uri = uri

    def __str__(self) -> str:
        if self.errno == 0:  # Python would write "[Errno 0]"
            reason = str(self.strerror)  # it may name the address already
            return reason if self.uri in reason else f"{reason}: {self.uri!r}"
        return super().__str__()


class SourceNotFoundError(SourceError, FileNotFoundError):
    """The object does not exist (any more)."""


class UnavailableError(CreelError):
    """Not now; a later attempt may succeed."""


class NoDaemonError(UnavailableError):
    """No daemon listens at the address."""


class DaemonLostError(UnavailableError):
    """The daemon ended or stopped answering."""


class TooManyBadSamplesError(CreelError, RuntimeError):
    """More samples of a dataset cannot be read than its loader's `max_bad_samples` permits."""
