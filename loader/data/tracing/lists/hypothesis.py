"""Hypothesis: the files that all samples are thought to read, until recording proves or refutes it.

What a sample gets is decided by the address that it opens itself, and by that file's version at
that moment: a wrong hypothesis costs reads, never a sample. It may cost few: before 16 samples were
recorded, nothing is fetched beyond the batches that torch itself would request by then, and of
large files nothing at all; later never farther ahead than it was proved.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from creel.cache.storage.stores.access import Options
from creel.loader.data.binding.fetch_limit import FetchLimit
from creel.loader.data.files.opened import SMALL
from creel.loader.data.tracing.journal import (
    ALL,
    DIGEST,
    FILE,
    NUMBER,
    PART,
    RecordedReads,
    digest_of,
)
from creel.loader.data.tracing.lists.file_lists import FileList
from creel.loader.data.tracing.trace import AccessTrace

#: Samples that must all fit before anything is fetched ahead.
LEAST = 16
#: Recent samples, of which at most 1/8 may read other files.
_RECENT, _FEW = 64, 8


class Hypothesis(FetchLimit):
    """A list of files, as a trace, and how far it is proved. Thread-safe for one writer."""

    def __init__(self, files: FileList, size: int, options: Options) -> None:
        """`size`: number of samples; `options`: with which the dataset reads remote addresses.

        Raises:
            ValueError: not the same number of files for each sample.
        """
        items = np.zeros((len(files.addresses), DIGEST + 1), np.int64)
        items[:, PART], items[:, NUMBER] = FILE, ALL
        items[:, DIGEST] = list(map(digest_of, files.addresses))
        samples, counts = np.arange(size), np.full(size, files.files)
        self._digests = items[:, DIGEST].reshape(size, files.files)
        read = RecordedReads(samples, counts, items, files.addresses)
        self.trace = AccessTrace(size, read, [], options, limit=self)
        self._recent: NDArray[np.bool_] = np.ones(0, np.bool_)
        self._large = files.largest > SMALL
        self.proved = 0
        self.refuted = self.settled = False

    def fits(self, read: RecordedReads) -> NDArray[np.bool_]:
        """Return (n,) whether each of these samples has read, whole, all files foreseen for it."""
        inside = read.samples < len(self._digests)
        foreseen = self._digests[np.where(inside, read.samples, 0)]
        of = np.repeat(np.arange(len(read.samples)), read.counts)
        whole = read.files & (read.items[:, NUMBER] == ALL)
        for k in range(foreseen.shape[1]):
            hit = whole & (read.items[:, DIGEST] == foreseen[of, k])
            inside &= np.bincount(of[hit], minlength=len(inside)) > 0
        return inside

    def exact(self, read: RecordedReads) -> NDArray[np.bool_]:
        """Return (n,) whether each of these samples has read just the files foreseen for it."""
        exact: NDArray[np.bool_] = self.fits(read) & (read.counts == self._digests.shape[1])
        return exact

    def judge(self, read: RecordedReads) -> None:
        """Learn from samples in the order in which they were recorded."""
        if self.refuted or not len(read.samples):
            return
        fits = self.fits(read)
        first = max(LEAST - self.proved, 0)
        recent = self._recent = np.concatenate([self._recent, fits])[-_RECENT:]
        others = int(np.count_nonzero(~recent))
        self.refuted = others * _FEW > _RECENT or not bool(fits[:first].all())
        self.proved += int(np.count_nonzero(fits))

    def links(self, *, led: bool) -> bool:
        """Whether a `DaemonLink` may request files; `led`: a loader of creel's does so ahead."""
        return self.settled or self.refuted or (not led and (self.allowed() or 0) >= 0)

    def allowed(self) -> int | None:
        if self.settled:
            return None
        if self.proved < LEAST:
            return -LEAST if self._large else 0
        return 2 * self.proved + _RECENT
