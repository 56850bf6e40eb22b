"""Logs: stdlib logging to standard error, with priorities under journald."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

#: Limit for the standard error that an embedded daemon gets, which is a file in memory.
_MAX_NBYTES = 1 << 20
_PRIORITY = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3}


class _LogHandler(logging.Handler):
    """Writes lines to a descriptor; to a file in memory, at most _MAX_NBYTES bytes."""

    def __init__(self, fd: int, *, as_json: bool) -> None:
        super().__init__()
        self._fd = fd
        self._json = as_json
        self._priorities = bool(os.environ.get("JOURNAL_STREAM"))
        self._left = _MAX_NBYTES if _is_memory(fd) else None

    def emit(self, record: logging.LogRecord) -> None:
        line = (_json(record) if self._json else self._line(record)).encode(errors="replace")
        if self._left is not None:
            if self._left < len(line):
                return
            self._left -= len(line)
        try:
            os.write(self._fd, line + b"\n")
        except OSError:
            return  # a closed terminal must not end the daemon

    def _line(self, record: logging.LogRecord) -> str:
        text = f"{record.name}: {record.getMessage()}"
        if record.exc_info:
            text += "\n" + logging.Formatter().formatException(record.exc_info)
        if self._priorities:  # journald takes a priority for each line and adds the time
            mark = f"<{_PRIORITY.get(record.levelno, 3)}>"
            return mark + text.replace("\n", f"\n{mark}")
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        return f"{clock} {record.levelname.lower()} {text}"


def _is_memory(fd: int) -> bool:
    with suppress(OSError):  # closed, or there is no /proc
        return os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:")  # noqa: PTH115  no path
    return False


def _json(record: logging.LogRecord) -> str:
    fields: dict[str, object] = {
        "time": record.created,
        "level": record.levelname.lower(),
        "logger": record.name,
        "message": record.getMessage(),
    }
    if record.exc_info:
        fields["exception"] = logging.Formatter().formatException(record.exc_info)
    return json.dumps(fields)


def open_standard_files() -> None:
    """Open /dev/null in place of closed ones (`2>&-`), whose numbers the next files would get."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # by their numbers
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115  it stays


def set_up_logging(level: str, *, as_json: bool) -> None:
    """Send the logs of `creel.*` to standard error, in place of earlier handlers."""
    logger = logging.getLogger("creel")
    for old in list(logger.handlers):
        logger.removeHandler(old)
    logger.addHandler(
        _LogHandler(sys.__stderr__.fileno() if sys.__stderr__ else 2, as_json=as_json)
    )
    logger.setLevel(level.upper())
    logger.propagate = False
