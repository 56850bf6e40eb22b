"""Share: which part of a stream a process reads, as a rank of so many.

A launcher's ranks are not always readers of one model: `mpirun -n 4 sim : -n 1 train` starts one
reader, and one job step may train two models. So each rank notes in the log, in
`launched/NAME.RANK`, that it has opened the stream under a reader's name, and the launcher's world
counts only if all of its ranks have.
"""

from __future__ import annotations

import logging
import os
import time

from creel.errors import ConfigError, SourceError
from creel.loader.client.backoff import pauses
from creel.loader.client.cluster.ranks import job_name, launched, of_process_group
from creel.streams.log import Log

_log = logging.getLogger("creel.stream")

_FOLDER = "launched"
#: How long a rank waits for the others of its launcher to open the stream, in seconds; it says so
#: after the first one. Their imports may differ by many on a busy file system. A rank that comes
#: even later is refused.
_MEET_S, _QUIET_S = 20.0, 1.0
_PAUSES_S = 0.02, 0.5
#: Before the note of a rank that reads alone.
_ALONE = b"alone "
#: Ranks in a message.
_SHOWN = 8
#: What a launcher's rank reads, by stream, reader's name, rank and note: decided once a process.
_decided: dict[tuple[str, str, int, bytes], tuple[int, int]] = {}


class Share:
    """A reader's rank and world: as requested, else torch.distributed's, else the launcher's."""

    def __init__(self, log: Log, name: str | None, rank: int | None, world: int | None) -> None:
        """Open a stream under a name.

        Raises:
            ConfigError: rank and world are invalid.
        """
        if (rank is None) != (world is None) or not 0 <= (rank or 0) < (
            1 if world is None else world
        ):
            raise ConfigError(f"rank={rank}, world={world}: give both, with 0 <= rank < world")
        self._log, self._name = log, name
        self._requested = None if rank is None or world is None else (rank, world)
        self._said = False
        self._rank, self._world = launched(os.environ)
        self._note = f"{self._world} {job_name()}".encode()
        if self._requested is None and of_process_group() is None and self._meets:
            self._write(self._note)

    @property
    def _key(self) -> tuple[str, str, int, bytes]:
        return self._log.about.id, self._name or "", self._rank, self._note

    @property
    def _meets(self) -> bool:
        """Whether other ranks of the launcher may read this, too, and it is not decided yet."""
        return self._world > 1 and self._name is not None and self._key not in _decided

    def ranks(self) -> tuple[int, int]:
        """Return (rank, world); waits for the other ranks of a launcher.

        Raises:
            ConfigError: some of these, but not all, have opened the stream under this name.
        """
        known = self._requested or of_process_group()
        if known is None and self._meets:
            _decided[self._key] = self._met()
        share = known or _decided.get(self._key, (0, 1))
        if not self._said:
            self._said = True
            self._say(share, guessed=known is None and self._world > 1)
        return share

    def _say(self, share: tuple[int, int], *, guessed: bool) -> None:
        """Log which part is read; whether it is all, only where a launcher's ranks might share."""
        reader = "a reader without a name" if self._name is None else self._name
        text = "reads all of it" if share[1] == 1 else "reads as rank {} of {}".format(*share)
        if guessed:
            text += (
                f" (the launcher has {self._world} ranks; Stream(rank=, world=) says which share)"
            )
        if guessed or share[1] > 1:
            level = logging.WARNING if guessed else logging.INFO
            _log.log(level, "%s: %s %s", self._log.path, reader, text)

    # --- the ranks of a launcher ----------------------------------------------------------------

    def _met(self) -> tuple[int, int]:
        """Wait for the launcher's ranks; return this one's share."""
        self._write(self._note)
        began, said = time.monotonic(), False
        for pause_s in pauses(*_PAUSES_S):
            missing = self._without(self._note)
            if not missing:
                return self._rank, self._world
            waited_s = time.monotonic() - began
            if waited_s >= _MEET_S:
                break
            if waited_s >= _QUIET_S and not said:
                said = True
                text = (
                    "%s: waiting up to %.0f s for ranks of the launcher to open it as %s, too: %s"
                )
                _log.warning(text, self._log.path, _MEET_S, self._name, _listed(missing))
            time.sleep(pause_s)
        alone = len(missing) == self._world - 1
        if alone:
            self._write(_ALONE + self._note)
        missing = self._without(self._note, _ALONE + self._note)  # another may have come just now
        if alone and len(missing) == self._world - 1:
            return 0, 1
        here = [rank for rank in range(self._world) if rank not in missing]
        but = f"but not {_listed(missing)}" if missing else "but one began to read before"
        raise ConfigError(
            f"{self._log.path}: of the launcher's {self._world} ranks, {_listed(here)} opened it as"
            f" {self._name}, {but}: give Stream(rank=, world=), or call init_process_group first"
        )

    def _without(self, *notes: bytes) -> list[int]:
        """Return the launcher's ranks that have none of these notes."""
        note_texts = self._log.medium.notes(_FOLDER)
        ranks = range(self._world)
        return [rank for rank in ranks if note_texts.get(f"{self._name}.{rank}") not in notes]

    def _write(self, note: bytes) -> None:
        """Write this rank's note.

        Raises:
            ConfigError: the log cannot be written to.
        """
        try:
            self._log.medium.write(f"{_FOLDER}/{self._name}.{self._rank}", note)
        except SourceError as e:
            raise ConfigError(
                f"{self._log.path}: the launcher's ranks cannot meet there, give"
                f" Stream(rank=, world=): {e}"
            ) from e


def _listed(ranks: list[int]) -> str:
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return ", ".join(map(str, ranks[:_SHOWN])) + more
