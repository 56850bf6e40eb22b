"""The disk tier's shell: opens the store, executes the core's actions, and reads objects.

The store is opened when the first dataset is registered, in the thread that reads manifests, as
loading its index takes a second per million objects. One thread writes, in the order of the core's
actions; reads have a queue of the fetcher. After any failure there is one warning and no disk tier.
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

#: Longest time, in s, for the last writes at the daemon's end. Slurm kills 30 s after SIGTERM,
#: systemd 20 s after it (deploy/creeld.service).
_LAST_WRITES_S = 5.0
#: Longest wait, in s, for pending writes (64 MiB at most) before a dataset is looked up.
_WAIT_S = 10.0

log = logging.getLogger("creel.disk")


class Disk:
    """The node's disk tier; without a folder in the settings, it does nothing.

    Args:
        settings: folder and size.
        arena: holds the objects to write.
        post: gives an event to the loop; may be called from any thread.
    """

    def __init__(
        self, settings: DiskSettings, arena: Arena, post: Callable[[DiskOpened | Spilled], None]
    ) -> None:
        self._settings = settings
        self._arena = arena
        self._post = post
        self._store: DiskStore | None = None
        self._opened = not settings.path  # whether opening it was tried
        self._lost = False  # whether the core knows that the disk is lost
        self._unusable = ""  # why the store could not be opened
        self._on_disk: dict[str, FoundOnDisk] = {}  # by dataset: what the store had of it
        self._writer = BackgroundThread("creel-disk")
        self._until = float("inf")  # time after which nothing more is written
        self._late = 0  # objects that were not written because of that

    @property
    def failure(self) -> str:
        """Why there is no disk tier, although one is set; "": it works, or none is set."""
        return self._unusable or (self._store.failure if self._store else "")

    # --- in the node's background thread ---------------------------------------------------------

    def attach(self, dataset: str, objects: int) -> None:
        """Look up the objects on disk of a dataset that is about to be added."""
        if not self._opened:
            self._opened = True
            self._open()
        if self._store is not None and self._idle():
            ids, nbytes = self._store.attach(dataset, objects)
            if len(ids):
                self._on_disk[dataset] = FoundOnDisk(dataset, ids, nbytes)

    def _idle(self) -> bool:
        """Wait for the writer, which may have to detach the same dataset first; return success."""
        done = threading.Event()
        self._writer.put(done.set)
        return done.wait(_WAIT_S)

    def _open(self) -> None:
        path = self._settings.path
        try:
            budget = disk_budget(self._settings)
            self._store = DiskStore(path, budget, self._settings.keep_free)
        except (OSError, ConfigError) as e:
            self._unusable = str(e)
            log.warning("there is no disk tier in %s: %s", path, e)
        else:
            self._post(DiskOpened(self._store.nbytes, self._store.unit))

    # --- in the loop thread ----------------------------------------------------------------------

    def stored_before(self, dataset: str) -> FoundOnDisk | None:
        """Return the objects on disk of a dataset that was just added, or None."""
        return self._on_disk.pop(dataset, None)

    def detach(self, dataset: str, length: Ints) -> None:
        """Stop using a dataset that was removed, or not added; its objects stay on disk.

        length: (n,) bytes of each object.
        """
        self._on_disk.pop(dataset, None)
        if self._store is not None:
            self._order(partial(self._store.detach, dataset, _copied(length)))

    def spill(self, action: SpillObjects) -> None:
        """Write objects; `Spilled` is always posted."""
        self._writer.put(partial(self._write, action))

    def drop(self, action: DropFromDisk) -> None:
        """Remove objects, after all earlier actions."""
        if self._store is not None:
            self._order(partial(self._store.drop, action.dataset, action.ids))

    def remove(self, dataset: str) -> None:
        if self._store is not None:
            self._order(partial(self._store.remove, dataset))

    def source(self, dataset: str) -> DiskSource:
        """Return a reader of a dataset's objects on disk, for a queue of the fetcher."""
        return DiskSource(self._store, dataset)

    def close(self, last: Callable[[], Sequence[Action]]) -> None:
        """Execute the remaining actions, end the writer, and release the folder.

        Takes at most `_LAST_WRITES_S` and a second. If the disk hangs, writer and folder remain in
        use until the process ends.

        Args:
            last: returns the last actions (`Core.end`).
        """
        self._until = time.monotonic() + _LAST_WRITES_S
        if self._store is not None:
            self._store.leave()
            try:
                actions = last()
            except Exception:  # a bug of ours: objects that are only in memory are lost
                log.exception("the last objects in memory could not be chosen for the disk")
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
        """Have the writer do `work` after all earlier work."""

        def guarded() -> None:
            try:
                work()
            except Exception:  # a bug of ours: objects missing on disk will be misses
                log.exception("the disk tier failed")

        self._writer.put(guarded)

    # --- in the writer's thread ------------------------------------------------------------------

    def _write(self, action: SpillObjects) -> None:
        stored, full = np.zeros(len(action.ids), np.bool_), False
        late = time.monotonic() > self._until
        self._late += late * len(action.ids)
        try:
            if self._store is not None and not late:
                parts = self._arena.parts(action.place, action.nbytes)
                stored, full = self._store.write(action.dataset, action.ids, parts, action.version)
        except Exception:  # a bug of ours: the objects are not on disk
            log.exception("objects of %s could not be written to disk", action.dataset)
        self._post(Spilled(action.spill, stored, full))
        if self._store is not None and not self._store.nbytes and not self._lost:
            self._lost = True
            self._post(DiskOpened(0, self._store.unit))


def _copied(length: Ints) -> Ints:
    """Copy the lengths, as the table may be unmapped; equal ones of records take no memory."""
    if len(length) and length.strides == (0,):
        return np.broadcast_to(length[:1].copy(), len(length))
    return length.copy()


class DiskSource:
    """Reads the objects of one dataset from disk; the interface of `cache/storage/source.Source`.

    It never raises: objects that are missing or damaged get -1 bytes.
    """

    def __init__(self, store: DiskStore | None, dataset: str) -> None:
        self._store = store
        self._dataset = dataset

    def read_parts(self, ids: NDArray[np.integer], length: Ints, parts: Sequence[Part]) -> Read:
        """Fill each of `parts` with an object."""
        read = Read.failed(len(ids))
        wanted = zip(ids.tolist(), length.tolist(), parts, strict=True)
        for i, (object_id, nbytes, part) in enumerate(wanted):
            record = self._store and self._store.read(self._dataset, object_id, nbytes, part)
            if record:
                read.nbytes[i], read.version[i] = record
        return read

    def read_whole(self, ids: NDArray[np.integer]) -> list[WholeObject | None]:
        """Return None for each object: the lengths of objects on disk are always known."""
        return [None] * len(ids)

    def close(self) -> None:
        """Do nothing: all datasets share the store."""
