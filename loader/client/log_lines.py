"""The log lines of training processes: which rank a line is of, and where it is shown."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator


class LogLines(logging.NullHandler):
    """Puts the rank into each line, for this handler and those of the program.

    Warnings go to standard error where the program has set up no logging, as logging does for a
    library without any handler: they say what to mend.
    """

    def handle(self, record: logging.LogRecord) -> bool:
        record.msg = with_rank(str(record.msg))
        shown = logging.lastResort
        if shown is not None and record.levelno >= shown.level and not _handled(record.name, self):
            shown.handle(record)
        return True


def install() -> None:
    """Add the handler to creel's logger, once."""
    logger = logging.getLogger("creel")
    if not any(isinstance(handler, LogLines) for handler in logger.handlers):
        logger.addHandler(LogLines())


def with_rank(text: str) -> str:
    """Return a sentence that names this rank, if the job has several.

    >>> with_rank("no batch for 10 s")
    'no batch for 10 s'
    """
    rank, world = _rank_and_world()
    return f"[rank {rank}] {text}" if world > 1 else text


def _rank_and_world() -> tuple[int, int]:
    from creel.loader.client.cluster import ranks

    if "torch.distributed" in sys.modules:  # the command line has no torch, and needs none
        return ranks.rank_and_world()
    return ranks.launched(os.environ)


def _handled(name: str, by: logging.Handler) -> bool:
    """Whether another handler than `by` gets the records of this logger."""
    return any(handler is not by for logger in _upwards(name) for handler in logger.handlers)


def _upwards(name: str) -> Iterator[logging.Logger]:
    """Yield a logger and those that its records go on to."""
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        yield logger
        logger = logger.parent if logger.propagate else None
