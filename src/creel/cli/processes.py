"""Processes: which are daemons, and what daemon and training take of this machine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from creel.units import format_size


def daemon_pids() -> Iterator[int]:
    """Yield the pids of this user's daemons."""
    for process in psutil.process_iter(["cmdline", "uids"]):
        words, uids = (
            (process.info["cmdline"] or [])[:5],
            process.info["uids"],
        )  # None: not to be seen
        ours = any(word == "creel.daemon" or Path(word).name == "creeld" for word in words)
        if ours and uids is not None and uids.effective == os.getuid():
            yield process.pid


class Usage:
    """Processor time and memory of a daemon, and of the trainers that it serves."""

    def __init__(self) -> None:
        self._known: dict[int, psutil.Process] = {}

    def rows(self, daemon: int, trainers: Iterable[int]) -> list[tuple[str, str]]:
        """Return names and values for `creel top`; processor time is that since the last call.

        Args:
            daemon, trainers: process ids. Workers are the processes below the trainers.
        """
        groups = {"daemon": {daemon}, "trainers": set(trainers), "workers": set[int]()}
        for pid in groups["trainers"]:
            with suppress(psutil.Error):
                groups["workers"] |= {
                    child.pid for child in psutil.Process(pid).children(recursive=True)
                }
        groups["workers"] -= groups["trainers"] | {daemon}
        self._sample(set[int]().union(*groups.values()))
        return [(name, self._of(pids)) for name, pids in groups.items() if pids & set(self._known)]

    def _sample(self, pids: set[int]) -> None:
        """Keep these processes: psutil measures from one call of the same object to the next."""
        self._known = {pid: process for pid, process in self._known.items() if pid in pids}
        for pid in pids - set(self._known):
            with suppress(psutil.Error):  # it has just ended
                self._known[pid] = psutil.Process(pid)

    def _of(self, pids: set[int]) -> str:
        """Return, for example, "2: 183 % of a core, 812 MiB not shared"."""
        percent, nbytes, count = 0.0, 0, 0
        for pid in pids & set(self._known):
            with suppress(psutil.Error):  # it has just ended
                memory = self._known[pid].memory_info()
                nbytes += memory.rss - memory.shared  # the arena and libraries belong to all
                percent += self._known[pid].cpu_percent()
                count += 1
        return f"{count}: {percent:.0f} % of a core, {format_size(nbytes)} not shared"
