"""ObservedReads: records what a sample reads, and the versions of the files."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from creel.cache.storage.stores.access import Options
from creel.cache.storage.stores.store import version_at
from creel.cache.storage.uris import is_local
from creel.cache.storage.version import CHANGING, MISSING, UNKNOWN, of_stat
from creel.loader.data.files.opened import (
    QUICK_OPEN_NS,
    SMALL,
    cacheable,
    dated_stat,
    local_address,
)
from creel.loader.data.reading.bad_samples import note_path
from creel.loader.data.reading.inputs import ITSELF
from creel.loader.data.reading.read_counts import UNIT, PartialRead, ThreadReads
from creel.loader.data.reading.this_thread import Asked, this_thread, usage

if TYPE_CHECKING:
    from creel.loader.data.reading.this_thread import ReadRecord

#: A file is cached whole if a sample read at least 1/4 of it, or it is `SMALL`; else in the blocks
#: that samples read.
WORTH = 4
_samples = itertools.count(1)


class FoundVersions:
    """Versions in which samples found local files, by address; MISSING if two versions were found.

    >>> versions = FoundVersions()
    >>> for address, of in [("/a", CHANGING), ("/a", 5), ("/a", CHANGING), ("/b", 5), ("/b", 6)]:
    ...     versions.enter(address, of)
    >>> versions.take("/a"), versions.take("/b") == MISSING, versions.take("/a") == UNKNOWN
    (5, True, True)
    """

    def __init__(self) -> None:
        self._versions: dict[str, int] = {}
        #: (address, status, time) as for `of_stat`. Their versions are computed later, many at
        #: once: between reads from a disk, each line of code takes several times as long.
        self.statuses: deque[tuple[str, os.stat_result, int]] = deque()

    def enter(self, address: str, of: int) -> None:
        """Enter the version in which a sample found a file."""
        known = self._versions.setdefault(address, of)
        if known == CHANGING:
            self._versions[address] = of
        elif of not in {known, CHANGING}:
            self._versions[address] = MISSING

    def take(self, address: str) -> int:
        """Remove and return the version of a file; UNKNOWN if none was entered."""
        while self.statuses:
            path, status, now_ns = self.statuses.popleft()
            self.enter(path, of_stat(status, now_ns))
        return self._versions.pop(address, UNKNOWN)

    def clear(self) -> None:
        self.statuses.clear()
        self._versions.clear()


class ObservedReads:
    """Inside the `with`, records what this thread reads, sample by sample."""

    def __init__(
        self,
        whole: bool = False,
        options: Options = None,
        *,
        versions: FoundVersions | None = None,
    ) -> None:
        """Make a record.

        Args:
            whole: whether every file is worth caching, however few of its bytes are read.
            versions: where to enter the versions of local files.
            options: of remote stores; reads with other ones are not recorded.
        """
        self._whole = whole
        self.options = options
        self._versions = FoundVersions() if versions is None else versions
        self._asked: dict[Asked, PartialRead | None] = {}  # None: cached whatever was read
        self._sleeps = usage().ru_nvcsw  # of this thread at the last call of `waited`
        self._outer: ReadRecord | None = None
        self.thread = ThreadReads()  # counts while this record is active
        self.sample = next(_samples)

    def waited(self, took: int) -> bool:
        """Whether the storage made this thread wait in an open of `took` ns.

        True if the open was long, and the thread has slept since the last call.
        """
        if took <= QUICK_OPEN_NS:
            return False
        before, self._sleeps = self._sleeps, usage().ru_nvcsw
        return self._sleeps > before

    def end_sample(self) -> list[Asked]:
        """Return what the sample read, each once and in order, and begin the next sample."""
        asked, self._asked = self._asked, {}
        self.sample = next(_samples)
        this_thread.latest = ""
        reads: list[Asked] = []
        for read, part in asked.items():
            if part is None or self._whole or part.got() * WORTH >= part.nbytes:
                reads.append(read)
            elif isinstance(read, str):
                sign = 1 if part.opened else -1
                reads += [(read, a, sign * (b - a), part.nbytes) for a, b in part.parts(UNIT)]
        return reads

    def add(self, asked: Asked) -> None:
        """Record a successful read. The daemon would only repeat a failed one."""
        self._asked[asked] = None
        if isinstance(asked, str):
            this_thread.latest = asked
            if is_local(asked):
                self._versions.enter(asked, version_at(asked))

    def opened(
        self, path: str, status: os.stat_result, now_ns: int, *, again: bool = False
    ) -> PartialRead | None:
        """Record a file that the sample has opened, or reads though an earlier one has opened it.

        Args:
            status, now_ns: as for `of_stat`.
            again: whether an earlier one has.

        Returns:
            Where reads of the file are recorded, the same for all its file objects; None if it is
                worth caching however few bytes are read.
        """
        self._versions.statuses.append((path, status, now_ns))
        if status.st_size <= SMALL:
            self._asked[path] = None
            return None
        return self._part_of(path, status.st_size, again=again)

    def _part_of(self, address: str, nbytes: int, *, again: bool) -> PartialRead | None:
        part = self._asked.setdefault(address, PartialRead(nbytes))
        if part is not None:
            part.opened |= not again
        return part

    def opened_remote(
        self, address: str, nbytes: int, options: Options, *, again: bool
    ) -> PartialRead | None:
        """`opened`, if the file is read with this record's options."""
        if self.options != options:
            return None
        if nbytes <= SMALL:
            self._asked[address] = None
            return None
        return self._part_of(address, nbytes, again=again)

    def add_address(self, address: str, options: Options) -> None:
        """`add`, if it was read with this record's options."""
        if is_local(address) or self.options == options:
            self.add(address)

    def opens(self, path: Any) -> None:
        """Do nothing: files are recorded once they are open."""

    opens_in_c = opens

    def looks_for(self, path: Any, folder_fd: int | None, *, follows: bool) -> None:
        """Do nothing: a status is not cached."""

    def inherit(self, inputs: Sequence[Sequence[Any]], owner: int, number: int) -> None:
        """Record the files of a kept sample; remote ones are unknown by now."""
        for path, _ in inputs:
            if path.endswith(ITSELF):
                continue  # a link
            address = local_address(path)
            status = None if address is None else dated_stat(address)
            if address is None:
                self.add((owner, number))
            elif status is not None and cacheable(status[0], address):
                self.add(address)

    def __enter__(self) -> ObservedReads:
        self._outer, this_thread.observed = this_thread.observed, self
        this_thread.latest = ""
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        this_thread.observed = self._outer
        self.thread.close()
        if error is not None:
            note_path(error, this_thread.latest)
