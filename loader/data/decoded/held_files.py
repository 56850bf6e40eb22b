"""HeldFiles: files that a dataset opened for an earlier sample, or when it was made, and may hold.

Many datasets open a file for the first sample that a worker reads, and read later samples from the
handle, or from what they have parsed: these samples open nothing, and depend on that file all the
same. So a sample is made again if it opens a number of files that no sample has opened twice. If it
opens fewer then, the process holds the others: they count for all samples that open fewer files
than some other. If it opens more, it had read them before, and depends on them, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from creel.cache.storage.stores.store import version_at
from creel.loader.data.user_code.attributes import open_files

if TYPE_CHECKING:
    from creel.loader.data.reading.inputs import SampleInputs

#: Most files that a sample is checked for besides its own: each takes 2 us at each use.
_MOST = 256


class HeldFiles:
    """Those of one dataset in this process; a forked child begins with its parent's."""

    def __init__(self) -> None:
        self._open: dict[str, int] = {}  # by path: version when it was opened
        self._held: dict[str, int] = {}  # the same of those opened for a sample
        self._most = 0  # files that one sample has opened
        self._reopened: set[int] = set()  # numbers of files that were opened twice

    def begin(self, settings: object) -> None:
        """Note the files that the dataset holds open before it has made any sample."""
        self._open = {path: version_at(path) for path in open_files(settings)}

    def is_doubtful(self, opened: SampleInputs) -> bool:
        """Whether to make a sample again, to see which of its files the dataset holds."""
        files = len(opened.versions)
        self._most = max(self._most, files)
        return self._most > 0 and files not in self._reopened

    def compare(self, opened: Mapping[str, int], again: SampleInputs) -> None:
        """Learn from what a sample opened at first, and when it was made again."""
        held = opened.keys() - again.versions.keys()
        if held:
            self._held.update((path, opened[path]) for path in held)
        elif len(opened) == len(again.versions):
            self._reopened.add(len(opened))

    def of(self, opened: SampleInputs) -> Mapping[str, int] | None:
        """Return what a sample may depend on besides what it has opened itself.

        None: it is not known, or too much.
        """
        fewer = len(opened.versions) < self._most
        held = {**self._open, **self._held} if fewer else self._open
        unknown = fewer and not (held or opened.versions)
        return None if unknown or len(held) > _MOST else held
