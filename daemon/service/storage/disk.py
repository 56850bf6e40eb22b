"""The disk tier's shell: opens the store, carries out what the core says, and reads.

Opened when the first dataset comes, in the thread that reads manifests, as finding what is there
takes a second for each million objects. One thread writes, in the order in which the core said;
reads are a queue of the fetcher. Whatever fails is no disk tier, and one warning.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from creel.cache.disk.store import DiskStore
from creel.cache.disk.traces import drop_traces
from creel.cache.memory.arena import Arena
from creel.cache.memory.buffers import Part
from creel.cache.storage.reads import Read, WholeObject
from creel.config import disk_budget
from creel.daemon.core.events import (
    Action,
    DiskOpened,
    DropFromDisk,
    FoundOnDisk,
    Spilled,
    SpillObjects,
)
from creel.daemon.service.background import BackgroundThread
from creel.errors import ConfigError
from creel.policies.arrays import Ints
from creel.settings import DiskSettings

#: Longest delay of the daemon's end, in s, to write what is in memory alone. Slurm
#: kills 30 s after SIGTERM, systemd 20 s after it (deploy/creeld.service).
_LAST_WRITES_S = 5.0
#: A disk that has not written 64 MiB by then is of no use.
_WAIT_S = 10.0

log = logging.getLogger("creel.disk")


class Disk:
    """The node's disk tier, or none.

    Args:
        settings: where, and how much.
        arena: what is written is there.
        post: hands an event to the loop, from any thread.
    """

    def __init__(
        self, settings: DiskSettings, arena: Arena, post: Callable[[DiskOpened | Spilled], None]
    ) -> None:
        self._settings = settings
        self._arena = arena
        self._post = post
        self._store: DiskStore | None = None
        self._opened = not settings.path
        self._lost = False  # whether the core knows that it is off
        self._found: dict[str, FoundOnDisk] = {}
        self._writer = BackgroundThread("creel-disk")
        self._until = float("inf")  # when nothing more is written
        self._late = 0  # objects that were to be written then

    # --- in the node's background thread ---------------------------------------------------------

    def attach(self, dataset: str, objects: int) -> None:
        """Look for a dataset that is about to be added."""
        if not self._opened:
            self._opened = True
            self._open()
        if self._store is not None and self._idle():
            ids, nbytes = self._store.attach(dataset, objects)
            if len(ids):
                self._found[dataset] = FoundOnDisk(dataset, ids, nbytes)

    def _idle(self) -> bool:
        """Wait for the writer, which may have yet to detach this very dataset."""
        done = threading.Event()
        self._writer.put(done.set)
        return done.wait(_WAIT_S)

    def _open(self) -> None:
        path = self._settings.path
        try:
            budget = disk_budget(self._settings)
            self._store = DiskStore(path, budget, self._settings.keep_free)
        except (OSError, ConfigError) as e:
            log.warning("there is no disk tier in %s: %s", path, e)
        else:
            self._post(DiskOpened(self._store.nbytes, self._store.unit))

    # --- in the loop's ---------------------------------------------------------------------------

    def found(self, dataset: str) -> FoundOnDisk | None:
        """What there is of a dataset that was added just now."""
        return self._found.pop(dataset, None)

    def detach(self, dataset: str, length: Ints) -> None:
        """A dataset is removed, or was not added after all; what is on disk stays there.

        length: (n,) bytes of each object.
        """
        self._found.pop(dataset, None)
        if self._store is not None:
            self._order(partial(self._store.detach, dataset, _copied(length)))

    def spill(self, action: SpillObjects) -> None:
        """Write objects; `Spilled` is always posted."""
        self._writer.put(partial(self._write, action))

    def drop(self, action: DropFromDisk) -> None:
        """Remove objects, after all that was ordered before."""
        if self._store is not None:
            self._order(partial(self._store.drop, action.dataset, action.ids))

    def forget(self, dataset: str) -> None:
        if self._store is not None:
            self._order(partial(self._store.forget, dataset))
            self._order(partial(self._drop_traces, dataset))

    def source(self, dataset: str) -> DiskSource:
        """What reads a dataset from disk, in a queue of the fetcher."""
        return DiskSource(self._store, dataset)

    def close(self, last: Callable[[], Sequence[Action]]) -> None:
        """Carry out what is left to do, end the writer, and let the folder go.

        Takes `_LAST_WRITES_S` and a second at most; a disk that hangs keeps writer and folder until
        the process ends.

        Args:
            last: says what is to be written and removed (`Core.end`).
        """
        self._until = time.monotonic() + _LAST_WRITES_S
        if self._store is not None:
            self._store.leave()
            try:
                actions = last()
            except Exception:  # our bug: what is in memory alone is lost
                log.exception("what is in memory cannot be written to disk")
                actions = []
            for action in actions:
                if isinstance(action, SpillObjects):
                    self.spill(action)
                elif isinstance(action, DropFromDisk):
                    self.drop(action)
        if self._writer.close(_LAST_WRITES_S + 1.0) and self._store is not None:
            self._store.close()
        if self._late:
            log.info("%d objects were not written to disk within %g s", self._late, _LAST_WRITES_S)

    def _order(self, work: Callable[[], None]) -> None:
        """Have the writer do something after all that was ordered before."""

        def guarded() -> None:
            try:
                work()
            except Exception:  # our bug: what is not on disk as thought is a miss
                log.exception("the disk tier failed")

        self._writer.put(guarded)

    # --- in the writer's thread ------------------------------------------------------------------

    def _drop_traces(self, dataset: str) -> None:
        try:
            drop_traces(self._settings.path, dataset)
        except OSError as e:
            log.warning("what samples of a dataset read is not forgotten: %s", e)

    def _write(self, action: SpillObjects) -> None:
        stored, full = np.zeros(len(action.ids), np.bool_), False
        late = time.monotonic() > self._until
        self._late += late * len(action.ids)
        try:
            if self._store is not None and not late:
                parts = self._arena.parts(action.place, action.nbytes)
                what = action.dataset, action.ids, parts, action.version
                stored, full = self._store.write(*what)
        except Exception:  # our bug: they are not on disk
            log.exception("objects of %s could not be written to disk", action.dataset)
        self._post(Spilled(action.spill, stored, full))
        if self._store is not None and not self._store.nbytes and not self._lost:
            self._lost = True
            self._post(DiskOpened(0, self._store.unit))


def _copied(length: Ints) -> Ints:
    """The same lengths, when the table is gone; all of one length take no memory."""
    if len(length) and length.strides == (0,):
        return np.broadcast_to(length[:1].copy(), len(length))
    return length.copy()


class DiskSource:
    """Reads the objects of one dataset from disk, as `cache/storage/source.Source` does.

    It never raises: what is not there as it was written is -1.
    """

    def __init__(self, store: DiskStore | None, dataset: str) -> None:
        self._store = store
        self._dataset = dataset

    def read_parts(self, ids: NDArray[np.integer], length: Ints, parts: Sequence[Part]) -> Read:
        """Fill each of `parts` with an object."""
        read = Read.failed(len(ids))
        wanted = zip(ids.tolist(), length.tolist(), parts, strict=True)
        for i, (object_id, nbytes, part) in enumerate(wanted):
            found = self._store and self._store.read(self._dataset, object_id, nbytes, part)
            if found:
                read.nbytes[i], read.version[i] = found
        return read

    def read_whole(self, ids: NDArray[np.integer]) -> list[WholeObject | None]:
        """None for each: of what is on disk the length is known."""
        return [None] * len(ids)

    def close(self) -> None:
        """Nothing to close: the store is all datasets'."""
