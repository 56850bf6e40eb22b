"""The versions of a dataset's files, and the generation in which each was last seen. Pure.

A *generation* begins when a session opens or an epoch of it begins: older knowledge of files may
then be out of date. Generations are numbered from 1 over the whole node. Bytes read, or a version
asked for, in generation g or later are valid for every session that wants g or earlier.

An address of remote storage names the same file on every node, so a peer's check is valid, too, if
it was made after the session opened. For these files the time of the latest check is kept, and its
age is sent with the bytes.

A version is one number (`cache/storage/version.py`). If the storage gives none, it is UNKNOWN,
which equals itself, so that no change is noticed. CHANGING differs from every version.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from creel.cache.storage.version import CHANGING, UNKNOWN, differ, shared
from creel.policies.arrays import Floats, Index, Ints, Mask, unique

Files = NDArray[np.int32]


class Versions:
    """The file versions of one dataset.

    Args:
        objects: number of objects.
        bounds: (files + 1,) file f holds the objects bounds[f] ... bounds[f + 1] - 1; None: every
            object is a file of its own.
        remote: (files,) whether a file is remote, and so checked only when a session opens; None:
            no file is.
    """

    def __init__(
        self, objects: int, bounds: Ints | None = None, remote: Mask | None = None
    ) -> None:
        if bounds is not None and len(bounds) == objects + 1 and (np.diff(bounds) == 1).all():
            bounds = None
        files = objects if bounds is None else len(bounds) - 1
        self._bounds = bounds
        self._remote = remote if remote is not None and remote.any() else None
        self.version = np.zeros(files, np.int64)  # version of the residents
        self.seen = np.zeros(files, np.int32)  # generation of the latest answer
        self.asked = np.zeros(files, np.int32)  # generation of the latest check
        # Seconds: the storage gave `version` at that time or later; 0: unknown. None: all local.
        self._since = None if self._remote is None else np.zeros(files)

    def inherit(self, old: Versions) -> Mask:
        """Take over what is known of the first files, which are all those of `old`.

        Returns:
            (files of `old`,) whether the residents there have the version that is known here.
        """
        n = old.number
        fresh = (self.seen[:n] == 0) & (self.version[:n] == UNKNOWN)
        for mine, its in ((self.version, old.version), (self.seen, old.seen)):
            mine[:n][fresh] = its[fresh]
        if self._since is not None and old._since is not None:
            self._since[:n][fresh] = old._since[fresh]
        same: Mask = ~differ(self.version[:n], old.version) & (old.version != CHANGING)
        return same

    def files(self, ids: Index) -> Index:
        """Return (k,) the file of each object."""
        if self._bounds is None:
            return ids
        if len(self._bounds) == 2:
            return np.zeros(len(ids), np.intp)
        return self._bounds.searchsorted(ids, side="right") - 1

    def held(self, ids: Index) -> Ints:
        """Return (k,) the known version of each object's file, or UNKNOWN."""
        return self.version[self.files(ids)]

    @property
    def number(self) -> int:
        return len(self.version)

    def objects(self, file: int) -> tuple[int, int]:
        """Return the (first, last + 1) object of a file."""
        if self._bounds is None:
            return file, file + 1
        return int(self._bounds[file]), int(self._bounds[file + 1])

    def current(self, ids: Index, since: int, since_remote: int) -> Mask:
        """Return (k,) whether the version of each object was seen since these generations."""
        return self._reached(self.seen, self.files(ids), since, since_remote)

    def unasked(self, ids: Index, since: int, since_remote: int) -> Files:
        """Return (k,) distinct files of these objects that need a check for these generations."""
        files = self.files(ids)
        fresh = self._reached(self.seen, files, since, since_remote)
        fresh |= self._reached(self.asked, files, since, since_remote)
        unasked = files if not np.count_nonzero(fresh) else files[~fresh]
        return unique(unasked).astype(np.int32)

    def _reached(
        self, column: NDArray[np.int32], files: Index, since: int, since_remote: int
    ) -> Mask:
        if self._remote is None or since == since_remote:
            return column[files] >= since
        return column[files] >= np.where(self._remote[files], since_remote, since)

    def answered(self, files: Files, version: Ints, generation: int, asked: float) -> Files:
        """Enter the versions (k,) that the storage gave for distinct `files` in `generation`.

        Args:
            asked: time of the request, in seconds; 0: unknown.

        Returns:
            (k,) files whose residents are out of date.
        """
        old = self.version[files]
        changed = differ(old, version) & (self.seen[files] <= generation)
        newer = (old != version) & (self.seen[files] <= generation)
        valid = (old == version) | newer
        self._date(files[valid], newer[valid], asked)
        self.version[files[newer]] = version[newer]
        self.seen[files] = np.maximum(self.seen[files], generation)
        out: Files = files[changed]
        return out

    def read(self, ids: Index, version: Ints, generation: int, asked: Floats) -> tuple[Mask, Files]:
        """Enter the versions (k,) of objects `ids` that were read in `generation`.

        Args:
            asked: (k,) time at which each read began, in seconds; 0: unknown.

        Returns:
            (k,) whether each object is older than the known version, and so of no use; (m,) files
            whose other residents are all out of date.
        """
        files = self.files(ids)
        old = self.version[files]
        other = differ(old, version) | (version == CHANGING)
        late = other & (self.seen[files] > generation)
        good, versions, begun = files, version, asked
        if np.count_nonzero(late):
            good, versions, begun = files[~late], version[~late], asked[~late]
        if np.count_nonzero(other) and self._bounds is not None:
            self._date(good, np.ones(len(good), np.bool_), begun)
            return late, self._replaced(good, versions, generation)
        self._date(good, self.version[good] != versions, begun)
        self.version[good] = versions
        self.seen[good] = np.maximum(self.seen[good], generation)
        return late, np.empty(0, np.int32)

    def _date(self, files: Index | Files, other: Mask, asked: Floats | float) -> None:
        """Enter the times of requests for the versions of files (k,); `other`: changed versions."""
        if self._since is not None:
            self._since[files] = np.where(other, asked, np.maximum(self._since[files], asked))

    def since(self, ids: Index) -> Floats:
        """Return (k,) the time of the latest check of each object's file; 0: unknown, or local."""
        return np.zeros(len(ids)) if self._since is None else self._since[self.files(ids)]

    def received(
        self, ids: Index, version: Ints, asked: Floats, opened: Iterable[tuple[float, int]]
    ) -> Mask:
        """Enter the versions (k,) of objects `ids` that a peer sent and had read earlier.

        They become current only when a check by this node finds the same version. A peer's check of
        a remote file counts for the sessions that opened before it.

        Args:
            asked: (k,) earliest time of the peer's request for that version, by this node's clock.
            opened: times at which sessions opened, and their generations.

        Returns:
            (k,) whether each object differs from the version known here, and so is of no use.
        """
        files = self.files(ids)
        fresh = (self.seen[files] == 0) & (self.version[files] == UNKNOWN)
        self.version[files[fresh]] = shared(version[fresh])
        late: Mask = differ(self.version[files], version) | (version == CHANGING)
        if self._remote is not None and self._since is not None:
            good = ~late & self._remote[files] & (version > 0)
            files, asked = files[good], asked[good]
            self._since[files] = np.maximum(self._since[files], asked)
            for when, generation in opened:
                new = files[asked > when]
                self.seen[new] = np.maximum(self.seen[new], generation)
        return late

    def restore(self, ids: Index, version: Ints) -> None:
        """Enter the versions (k,) of objects that another daemon has read; each needs a check."""
        self.version[self.files(ids)] = version

    def _replaced(self, files: Index, version: Ints, generation: int) -> Files:
        """Enter reads of other or changing versions; return files with outdated residents."""
        which, first, at = np.unique(files, return_index=True, return_inverse=True)
        new = version[first]
        mixed = np.bincount(at, weights=version != new[at]) > 0  # a file changed between two reads
        known, seen = self.version[which], self.seen[which]
        differs = (known != new) | (known == CHANGING) | mixed
        # Objects of this file were read before in this generation: all are valid only for it.
        same = (seen >= generation) & differs & (known != UNKNOWN)
        self.version[which] = np.where(same | mixed, CHANGING, new)
        self.seen[which] = np.maximum(seen, generation)
        out: Files = which[differs & ~same].astype(np.int32)
        return out
