"""Retries: classifies storage errors, repeats reads, and converts errors to SourceError."""

from __future__ import annotations

import errno
import logging
import os
import random
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from creel.cache.storage.stores.access import AZURES, shown
from creel.cache.storage.stores.refusals import may_be_expired, refusal, unreachable
from creel.errors import ConfigError, CreelError, SourceError, SourceNotFoundError
from creel.settings import FetchSettings

T = TypeVar("T")

log = logging.getLogger("creel.source")

_TRANSIENT = frozenset(
    {
        errno.EIO, errno.EAGAIN, errno.EBUSY, errno.ETIMEDOUT, errno.ECONNRESET, errno.EPIPE,
        errno.ECONNABORTED, errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH,
        errno.ENETDOWN, errno.ENETRESET, errno.ESTALE, errno.ESHUTDOWN, errno.EREMOTEIO,
    }
)  # fmt: skip
#: Words for transient errors in the AWS SDK behind pyarrow, which gives no errno.
_TRANSIENT_WORDS = (
    "SLOW_DOWN", "SLOWDOWN", "THROTTL", "TIMEOUT", "NETWORK_CONNECTION", "UNAVAILABLE", "INTERNAL_",
)  # fmt: skip
#: Words for credentials that are wrong, expired or insufficient.
_DENIED = re.compile(
    "ACCESS_DENIED|INVALID_ACCESS_KEY|INVALID_CLIENT_TOKEN|SIGNATURE|EXPIRED"
    r"|Azure Error: \[\w*\] 40[13]\b|Credential: Failed to get token"
)
#: Attempts to reach a server that nothing was read from yet: its address may be wrong.
_FIRST_ATTEMPTS = 2
_QUIET_S = 60.0  # least time between log lines about one storage: all reads of a dead server fail
_SECRET = re.compile(r"(?i)([?&][^=&]*(?:sig|token|secret|key|credential|pass)[^=&]*=)[^&\s'\"]*")
#: An invalid port, which is part of a password with a slash in it.
_INVALID_PORT = re.compile(r":(?!\d*$)[^\]]*$")
#: The repr of bytes, perhaps inside the repr of a text; then newlines and escapes of such a repr.
_QUOTED_BYTES = re.compile(r"\bb(\\*['\"]).*\1", re.DOTALL)
_NEWLINES = re.compile(r"\\+n")
_ESCAPED = re.compile(r"(?:\\+(?:x[0-9a-f]{2}|u[0-9a-f]{4}))+")
_MAX_TEXT = 300

_random = random.Random()  # noqa: S311  a private one, as the user's generator must not advance
_warned: dict[str, float] = {}  # time of the last log line about each storage


def transient(error: BaseException) -> bool:
    """Return whether the same read may succeed a moment later.

    True for EIO, ESTALE, time-outs, broken connections, HTTP 429 and 5xx. False for a missing
    file, a denied permission, a file that is too short.

    >>> transient(OSError(errno.EIO, "")), transient(FileNotFoundError(errno.ENOENT, ""))
    (True, False)
    """
    if isinstance(error, CreelError):  # judged already
        return False
    status = getattr(error, "status", None)
    if isinstance(status, int) and status:
        return status in {408, 429} or status >= 500
    if isinstance(error, ConnectionError) or _timed_out(type(error)):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _TRANSIENT
    if type(error).__module__.partition(".")[0] == "aiohttp":
        return "Invalid" not in type(error).__name__
    return any(word in str(error).upper() for word in _TRANSIENT_WORDS)


def _unreached(error: Exception) -> bool:
    return isinstance(error, ConnectionRefusedError) or unreachable(str(error)) is not None


def _timed_out(kind: type) -> bool:
    """Return whether a class is a TimeoutError; before Python 3.11, asyncio had its own."""
    return any(base.__name__ == "TimeoutError" for base in kind.__mro__)


def public(uri: str) -> str:
    """Return an address without keys and passwords, for logs.

    >>> public("s3://AKIA:secret@bucket/x"), public("https://h/x?id=1&X-Amz-Signature=f00")
    ('s3://bucket/x', 'https://h/x?id=1&X-Amz-Signature=...')
    >>> public("s3://AKIA:se/cr+et@bucket/x@1"), public("abfs://box:hush@h/x")
    ('s3://bucket/x@1', 'abfs://box@h/x')
    """
    scheme, separator, location = uri.partition("://")
    if not separator:
        return uri
    host, slash, path = location.partition("/")
    if "@" not in host and "@" in path and _INVALID_PORT.search(host):
        host, slash, path = path.partition("@")[2].partition("/")
    user, _, host = host.rpartition("@")
    if scheme.lower() in AZURES and user:  # a container, perhaps with a password
        host = f"{user.partition(':')[0]}@{host}"
    return f"{scheme}://{host}{slash}" + _SECRET.sub(r"\1...", path)


def source_error(
    error: Exception, uri: str, options: Mapping[str, Any] | None = None
) -> SourceError:
    """Convert an exception of a storage to SourceError, the only kind that readers get.

    The result contains no keys or passwords, so it may be shown and logged. A refusal says who was
    refused, by the `options` of the client; a server that is not reached, where it should be.
    """
    if isinstance(error, SourceError):
        address = public(error.uri)
        if address == error.uri:
            return error
        return type(error)(error.errno or 0, error.strerror or "", address)
    number, reason = _reason(error)
    kind = SourceNotFoundError if number == errno.ENOENT else SourceError
    reason = _SECRET.sub(r"\1...", reason.replace(uri, public(uri)))
    if number == errno.EACCES and options is not None:
        reason = f"{reason} ({shown(options)})"
    if number == errno.ECONNREFUSED and options and options.get("endpoint_override"):
        reason = f"{reason} ({options['endpoint_override']})"
    return kind(number, legible(reason), public(uri))


def legible(text: str) -> str:
    """Return a text as one printable line of at most 300 characters: libraries quote servers.

    >>> legible("Bad status line:\\n\\n  b'\\\\xff\\\\x00binary'\\n  ^"), legible("caf\\udce9")
    ('Bad status line: ... ^', 'caf?')
    """
    text = _ESCAPED.sub("?", _NEWLINES.sub(" ", _QUOTED_BYTES.sub("...", text)))
    plain = "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text)
    line = " ".join(plain.split())
    return line if len(line) <= _MAX_TEXT else f"{line[: _MAX_TEXT - 3]}..."


def _reason(error: Exception) -> tuple[int, str]:
    """Return (errno or 0, reason); pyarrow's object stores give only a text."""
    text = str(error)
    if "NO_SUCH_BUCKET" in text or ("NO_SUCH_KEY" in text and "ListObjects" in text):
        return errno.ENOENT, "there is no such bucket"
    number = getattr(error, "errno", None) or 0
    if number == errno.EACCES and isinstance(error, OSError):
        return number, error.strerror or "access denied"
    if meaning := refusal(text):
        return errno.EACCES, f"access denied: {meaning}"
    if _DENIED.search(text) or getattr(error, "status", 0) in {401, 403}:
        return errno.EACCES, "access denied: check the credentials"
    absent = os.strerror(errno.ENOENT)
    if number == errno.ENOENT or isinstance(error, FileNotFoundError) or text.startswith(absent):
        return errno.ENOENT, absent
    if why := unreachable(text):
        return errno.ECONNREFUSED, why
    if not text and _timed_out(type(error)):
        return errno.ETIMEDOUT, "no answer in time (fetch.deadline_s)"
    return number, getattr(error, "strerror", None) or text or type(error).__name__


def pause_s(settings: FetchSettings, tries: int, elapsed_s: float, jitter: float) -> float | None:
    """Return the seconds to wait before the next attempt; None if the last error is final. Pure.

    Args:
        tries: number of attempts that have failed, at least 1.
        elapsed_s: seconds since the first of them began.
        jitter: a random number in [0, 1), so that readers do not retry at the same time.

    >>> [pause_s(FetchSettings(attempts=4), tries, 0.5, 0.5) for tries in (1, 2, 3, 4)]
    [0.15000000000000002, 0.25, 0.45, None]
    """
    doubled: float = 2.0 ** (tries - 1)
    pause = min(settings.backoff_s * (doubled + jitter), settings.backoff_max_s)
    over = tries >= settings.attempts or elapsed_s + pause > settings.deadline_s
    return None if over else pause


def retried(
    settings: FetchSettings,
    job: Callable[[], T],
    uri: str,
    *,
    options: Callable[[], Mapping[str, Any] | None] = lambda: None,
    error: Exception | None = None,
    began: float | None = None,
    on_retry: Callable[[], None] = lambda: None,
    reached: bool = True,
) -> T:
    """Return `job()`, repeating it after transient errors: the only place with retries of reads.

    Args:
        uri: the address that is read, for logs and errors.
        options: returns those of the client, which say who reads from which server.
        error, began: error of a first attempt, if it has failed, and its start (`time.monotonic`).
        on_retry: called before each further attempt.
        reached: whether the storage has answered before; if not, it is soon given up.

    Raises:
        ConfigError: there is no such client.
        SourceError: any other exception of the last attempt (`source_error`).
    """
    try:
        return _retried(settings, job, uri, error, began, on_retry, reached)
    except ConfigError:
        raise
    except Exception as e:  # noqa: BLE001  stores raise what they like
        # The sentence alone: a library's frames would bury it.
        raise source_error(e, uri, options()) from None


def _retried(
    settings: FetchSettings,
    job: Callable[[], T],
    uri: str,
    error: Exception | None,
    began: float | None,
    on_retry: Callable[[], None],
    reached: bool,
) -> T:
    began = time.monotonic() if began is None else began
    tries, renewed = 0, False
    try:
        while True:
            if error is None:
                try:
                    return job()
                except Exception as e:  # noqa: BLE001  stores raise what they like
                    error = e
            if not renewed and may_be_expired(str(error)):
                renewed, error = True, None  # once, at once: there may be new keys by now
                on_retry()
                continue
            tries += 1
            elapsed_s = time.monotonic() - began
            pause = pause_s(settings, tries, elapsed_s, _random.random())
            lost = not reached and tries >= _FIRST_ATTEMPTS and _unreached(error)
            if pause is None or lost or not transient(error):
                raise error
            _warn(error, uri, settings)
            time.sleep(pause)
            on_retry()
            error = None
    finally:
        del error  # breaks a cycle: its traceback refers to this frame


def _warn(error: Exception, uri: str, settings: FetchSettings) -> None:
    """Log a retry; a warning only once in _QUIET_S for each storage."""
    now, storage = time.monotonic(), "/".join(uri.split("/", 3)[:3]) if "://" in uri else ""
    level = logging.DEBUG
    if now - _warned.get(storage, -_QUIET_S) >= _QUIET_S:
        _warned[storage], level = now, logging.WARNING
    reported = source_error(error, uri)
    log.log(
        level,
        "%s: %s: trying again, at most %d times and for at most %g s",
        reported.uri,
        reported.strerror,
        settings.attempts - 1,
        settings.deadline_s,
    )
