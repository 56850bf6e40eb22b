"""ReaderNotes: what one rank of a reader with a name tells the producers of its stream."""

from __future__ import annotations

import logging
import time

from creel.streams import cursors, memories
from creel.streams.cursors import Cursor
from creel.streams.log import Log, Medium
from creel.streams.memories import Needed

_log = logging.getLogger("creel.stream")

#: Seconds between updates of the cursor, 20 us each; it is also written before each wait.
_CURSOR_S = 0.02


class ReaderNotes:
    """The rank's cursor, and what its memory needs.

    A rank that cannot write them any more reads on: what producers know lets them keep more.
    """

    def __init__(self, log: Log, name: str, rank: int, cursor: Cursor) -> None:
        """Make notes of a rank that begins at a cursor; none is written yet."""
        self._log, self._name, self._rank, self._cursor = log, name, rank, cursor
        self._written, self._written_at = Cursor(-1, 0, 0), 0.0
        self._warned = False

    def begin(self, needed: Needed | None) -> None:
        """Write both, so that producers wait for this reader from now on; None: it has no memory.

        Raises:
            SourceError: the log cannot be written to.
        """
        memories.write(self._log.medium, self._name, self._rank, needed)  # first
        self.write()

    def moved(self, chunk: int, record: int, *, at_once: bool) -> None:
        """Note that the rank has yet to read a record of a chunk, and those after it."""
        self._cursor = self._cursor._replace(chunk=chunk, record=record)
        if at_once or time.monotonic() - self._written_at >= _CURSOR_S:
            self.write()

    def write(self) -> None:
        """Write the cursor, unless it is written.

        Raises:
            SourceError: it cannot be, and never was: producers would not wait for this reader.
        """
        if self._cursor == self._written:
            return
        try:
            cursors.write(self._log.medium, self._name, self._rank, self._cursor)
        except OSError as e:
            if self._written.chunk < 0:
                raise
            self._warn(e)
        else:
            self._written = self._cursor
        self._written_at = time.monotonic()

    def keep(self, needed: Needed | None) -> None:
        """Write what the memory needs; None: nothing else than before."""
        if needed is None:
            return
        try:
            memories.write(self._log.medium, self._name, self._rank, needed)
        except OSError as e:
            self._warn(e)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            text = "%s: producers are not told how far this reader is: %s"
            _log.warning(text, self._log.path, error)


def known_needs(medium: Medium, name: str) -> Needed:
    """Return what producers keep for the memory of this reader's name."""
    cursors_by_rank = cursors.read(medium).get(name)
    return memories.read(medium, {} if cursors_by_rank is None else {name: cursors_by_rank})
