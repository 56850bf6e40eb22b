"""Datasets of a node: registered with the core and in its tables, and forgotten again.

Manifests are read, checked and prepared in a thread of their own; all else runs on the loop thread.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from creel.cache.memory.shared_words import LocationTable
from creel.cache.storage.manifest import Manifest
from creel.cache.storage.source import Source
from creel.cache.storage.stores.access import check_grants
from creel.config import Config
from creel.daemon.core import events
from creel.daemon.core.restart.objects import RestartObjects, Restored
from creel.daemon.service.background import BackgroundThread
from creel.daemon.service.core_shell import CoreShell, Loop
from creel.daemon.service.memory.quota import Quota
from creel.daemon.service.registry import DatasetRecord, Registry, tables_nbytes
from creel.daemon.service.storage.disk import Disk
from creel.daemon.service.storage.fetcher import Fetcher
from creel.errors import CreelError, UnavailableError
from creel.messages import Grants, Refused, Registered

T = TypeVar("T")

log = logging.getLogger("creel.node")

#: Files kept open per dataset with many objects per file (the default soft limit is 1024).
_KEPT_FILES = 128


class Datasets:
    """Registers datasets, and forgets those that nobody uses.

    Args:
        arena_nbytes: size of the arena.
        config: returns the settings.
    """

    def __init__(
        self,
        arena_nbytes: int,
        registry: Registry,
        shell: CoreShell,
        loop: Loop,
        disk: Disk,
        fetcher: Fetcher,
        *,
        config: Callable[[], Config],
    ) -> None:
        self._arena_nbytes = arena_nbytes
        self._registry, self._shell, self._loop = registry, shell, loop
        self._disk, self._fetcher, self._config = disk, fetcher, config
        self.quota = Quota(arena_nbytes, registry, shell.core, self._remove)
        self._background = BackgroundThread("creel-register")

    def expect(self) -> None:
        """Import pyarrow in the background, as a client is about to register a dataset."""

        def load() -> None:
            with contextlib.suppress(ImportError, MemoryError):  # `register` reports the failure
                import pyarrow as pa

                del pa

        self._background.put(load)

    def register(
        self,
        token: str,
        read: Callable[[], Manifest],
        grants: Grants,
        reply: Callable[[Registered | Refused], None],
    ) -> None:
        """Read and check a manifest in the background, then register it on the loop thread.

        grants: how its remote addresses are reached.
        """

        def read_with_key() -> Manifest:
            manifest = read()
            check_grants(grants, len(manifest.access))
            _ = manifest.key, manifest.summed  # cached here, as the loop must not compute them
            return manifest

        def enter(dataset: DatasetRecord) -> None:
            self.quota.coming.pop(token, None)
            reply(self._add(token, dataset))

        def enter_manifest(manifest: Manifest) -> None:
            known = self._registry.datasets.get(manifest.key)
            if known is not None:
                known.source.grants = grants
                enter(known)
                return
            record = LocationTable.record_of(manifest.summed, self._arena_nbytes)
            nbytes = tables_nbytes(manifest, record, disk=bool(self._config().disk.path))
            try:
                self.quota.check(nbytes, f"{len(manifest)} objects")
            except UnavailableError as e:
                refuse(Refused(str(e)))
                return
            self.quota.coming[token] = nbytes
            others = [dataset.manifest for dataset in self._registry.datasets.values()]
            self._in_background(
                lambda: self._prepare(manifest, grants, record, nbytes, others), enter, refuse
            )

        def refuse(answer: Registered | Refused) -> None:
            self.quota.coming.pop(token, None)
            reply(answer)

        self._in_background(read_with_key, enter_manifest, reply)

    def _in_background(
        self,
        work: Callable[[], T],
        then: Callable[[T], None],
        reply: Callable[[Registered | Refused], None],
    ) -> None:
        """Run `work` in the background, then `then(result)` here; `reply` if `work` fails."""

        def attempt() -> None:
            try:
                call = partial(then, work())
            except CreelError as e:
                call = partial(reply, Refused(str(e)))
            except Exception:
                log.exception("a manifest could not be read")
                call = partial(reply, Refused("the manifest cannot be read"))
            self._loop.call_soon(call)

        self._background.put(attempt)

    def _prepare(
        self,
        manifest: Manifest,
        grants: Grants,
        record: int,
        tables_nbytes: int,
        others: list[Manifest],
    ) -> DatasetRecord:
        """Do all work proportional to the number of objects, in the background thread."""
        settings = self._config().fetch
        source = Source(manifest, settings, files=_KEPT_FILES, relative=False, grants=grants)
        dataset = DatasetRecord.create(manifest, source, record, tables_nbytes)
        self._disk.attach(manifest.key, len(manifest))
        heads = sorted(filter(manifest.begins_with, others), key=len, reverse=True)
        dataset.begins_with = tuple(head.key for head in heads)
        return dataset

    def restore(self, manifest: bytes, key: str, objects: RestartObjects) -> None:
        """Register a dataset of the last daemon with its residents.

        Clients' datasets are prepared in the same thread after it, so that nothing moves before.
        """
        self._background.put(partial(self._restore, manifest, key, objects))

    def _restore(self, data: bytes, key: str, objects: RestartObjects) -> None:
        """Prepare it, in the background thread."""
        dataset = None
        try:
            manifest = Manifest.from_arrow(data)
            record = LocationTable.record_of(manifest.summed, self._arena_nbytes)
            nbytes = tables_nbytes(manifest, record, disk=bool(self._config().disk.path))
            grants: Grants = [{} for _ in manifest.access]  # until a client gives its own
            if manifest.key == key:
                dataset = self._prepare(manifest, grants, record, nbytes, [])
        except Exception:
            log.exception("a dataset of the last daemon cannot be used")

        def enter() -> None:
            if dataset is not None:
                self._add("", dataset, objects.page)
            known = self._registry.datasets.get(key)
            kept = objects if known is not None and known is dataset else None
            done = self._shell.handle(Restored(key, kept))
            if kept is not None and done and not self._shell.core.resident(key):
                log.warning("what the last daemon held of %s is of no use: damaged", key)

        self._loop.call_soon(enter)

    def _add(self, token: str, dataset: DatasetRecord, page: int = 0) -> Registered | Refused:
        """Register a dataset that is ready for it; `page`: as in `DatasetAdded`."""
        known = self._registry.datasets.get(dataset.key)
        if known is None:
            try:
                self._shell.check_serving()
                self.remove_idle(room=1)
                self._registry.check_room()
            except UnavailableError as e:
                self._close(dataset)
                return Refused(str(e))
            table, lengths = dataset.table, dataset.manifest.summed
            head = dataset.begins_with[0] if dataset.begins_with else ""
            if not self._shell.handle(
                events.DatasetAdded(
                    dataset.key,
                    table.offset.view(),
                    table.length,
                    lengths,
                    dataset.versions,
                    head,
                    page,
                )
            ):
                self._close(dataset)
                return Refused("this daemon has no memory for another dataset")
            self._registry.add(dataset)
            self._fetcher.add(dataset.key, dataset.source)
            on_disk = self._disk.stored_before(dataset.key)
            if on_disk is not None:
                self._shell.handle(on_disk)
        elif known is not dataset:  # two clients registered the same dataset at once
            dataset.close()
            dataset = known
        dataset.claim(token)
        if token not in self._loop.pids():  # the client left meanwhile
            dataset.unclaim(token)
        return Registered(dataset.key)

    def renew(self, key: str, grants: Grants) -> None:
        """Read a dataset with these grants from now on.

        Raises:
            UnavailableError: no such dataset, or this daemon cannot read so.
            MalformedError: grants for another number of accesses.
        """
        known = self._registry.datasets.get(key)
        if known is None:
            raise UnavailableError(f"dataset {key!r} is not registered here")
        check_grants(grants, len(known.manifest.access))
        known.source.grants = grants

    def _close(self, dataset: DatasetRecord) -> None:
        """Close a dataset that was not added."""
        self._disk.detach(dataset.key, dataset.table.length)
        dataset.close()

    def grow(self) -> None:
        """Let datasets of jobs that rehearse take over the residents of idle ones.

        Tasks in folders of their own are such datasets: each begins with those before it.
        """
        heads = {
            s.dataset: s.dataset.begins_with
            for s in self._registry.sessions.values()
            if s.rehearses
        }
        for dataset, keys in heads.items():
            for old in self._registry.idle() if keys else []:
                if old.key in keys and not old.drained:
                    old.drained = not self._shell.core.busy(old.key)
                    self._shell.handle(events.DatasetGrew(dataset.key, old.key))

    def remove_idle(self, *, room: int = 0) -> None:
        """Forget idle datasets beyond the time and number in the settings.

        Args:
            room: number of further datasets that must fit within `daemon.max_datasets`.
        """
        limits_ = self._config().daemon
        expired = self._registry.expired(
            time.monotonic(),
            limits_.idle_s,
            limits_.max_idle_datasets,
            tables_limit=self.quota.limit,
            room=room,
        )
        for dataset in expired:
            self._remove(dataset)

    def _remove(self, dataset: DatasetRecord) -> None:
        """Forget an idle dataset and free its memory, unless it has fetches in flight."""
        if not self._shell.core.busy(dataset.key):
            self._shell.handle(events.Unregistered(dataset.key))
            self._fetcher.remove(dataset.key)
            self._disk.detach(dataset.key, dataset.table.length)
            self._registry.remove_dataset(dataset)

    def close(self) -> None:
        self._background.close()
