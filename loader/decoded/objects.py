"""ObjectKeeping: keeps what a creel dataset decodes of each object, in the version of its file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

from creel.cache.storage.manifest import Manifest
from creel.cache.storage.version import of_stat
from creel.loader.decoded.alike import description
from creel.loader.decoded.draws import drawing
from creel.loader.decoded.keeping import Keeping
from creel.loader.decoded.store import DecodedStore
from creel.loader.reading.lease import Leaf
from creel.loader.reading.storage import is_local, version_at
from creel.loader.reading.this_thread import this_thread

Decode = Callable[[bytes], Any]
#: The stamp of bytes that are not checked.
_UNCHECKED = 0


class DecodedLeaf(Leaf, Protocol):
    """A dataset that has objects and decodes them (`creel.loader.datasets`)."""

    @property
    def manifest(self) -> Manifest:
        """Where the objects lie."""
        ...

    @property
    def layout(self) -> object:
        """An object that is replaced whenever the dataset is changed."""
        ...

    @property
    def decoders(self) -> Mapping[str, Decode]:
        """Functions that decode an object's bytes, by the name of what they return."""
        ...

    @property
    def indexed(self) -> str:
        """Describe which object each sample is."""
        ...

    @property
    def remote(self) -> bool:
        """Whether objects that are parts of files may lie in remote storage."""
        ...


class ObjectKeeping(Keeping):
    """Keeps decoded objects of one dataset."""

    def identity(self, owner: DecodedLeaf) -> tuple[object, ...]:
        return (owner.layout, *(one for pair in owner.decoders.items() for one in pair))

    def samples(self, owner: DecodedLeaf) -> int:
        return owner.object_count

    def what(self, owner: DecodedLeaf) -> str | None:
        described = {name: description(decode) for name, decode in owner.decoders.items()}
        if None in described.values():
            return None
        return f"{owner.manifest.key} {owner.indexed} {described}"

    def sample(
        self,
        dataset: DecodedLeaf,
        object_id: int,
        decode: Decode,
        fresh: Callable[[Decode], Any],
    ) -> Any:
        """Return `decode` of an object's bytes: kept, or else `fresh(decode)`, and keep that."""
        store = self.usable(dataset)
        if store is None:
            return fresh(decode)
        address = dataset.address(object_id)
        path = address if address is not None and is_local(address) else None
        if self.recheck == "never":
            path = None
        unchecked = self._unchecked(dataset, address) if path is None else _UNCHECKED
        given = self.take(
            store, object_id, lambda version: version == (version_at(path) if path else unchecked)
        )
        if given is not None:
            if this_thread.observed is not None:  # an outer `creel.kept` or `creel.wrap`
                this_thread.observed.add(address or (id(dataset), object_id))
            return given.sample
        if not store.open:
            return fresh(decode)
        if path is not None:
            return self._of_file(store, object_id, path, decode, fresh)
        sample, nbytes = self._watched(store, decode, fresh)
        if nbytes >= 0:
            self.keep(store, object_id, unchecked, sample, nbytes)
        return sample

    def _unchecked(self, dataset: DecodedLeaf, address: str | None) -> int:
        """Return the stamp of bytes whose version cannot be asked for here.

        Remote files are those that a loader first found: another loader decodes them again. A local
        tar that was written since its index was made raises an error.
        """
        remote = dataset.remote if address is None else not is_local(address)
        return self.loaders if remote and self.recheck != "never" else _UNCHECKED

    def _of_file(
        self,
        store: DecodedStore,
        object_id: int,
        path: str,
        decode: Decode,
        fresh: Callable[[Decode], Any],
    ) -> Any:
        """Decode a local file, and keep the result if it is certain of which version it is."""
        status, lease, now_ns = None, this_thread.lease, time.time_ns()
        with suppress(OSError, ValueError):
            status = os.stat(path)  # noqa: PTH116  a third of the time of Path.stat
        reads = 0 if lease is None else lease.direct_reads
        sample, nbytes = self._watched(store, decode, fresh)
        # The daemon has read the file at some time since the loader was made, not just now.
        direct = lease is None or lease.direct_reads > reads
        if nbytes >= 0 and status is not None:
            version = of_stat(status, now_ns if direct else min(now_ns, self.made_ns))
            if version == version_at(path) > 0:
                self.keep(store, object_id, version, sample, nbytes)
        return sample

    def _watched(
        self, store: DecodedStore, decode: Decode, fresh: Callable[[Decode], Any]
    ) -> tuple[Any, int]:
        """Return a new sample, and the bytes it was decoded from; -1 if it must not be kept."""
        nbytes, drew = 0, False

        def watched(data: bytes) -> Any:
            nonlocal nbytes, drew
            nbytes = len(data)
            sample, drew = drawing(decode, data)
            return sample

        sample = fresh(watched)
        if drew:
            self.refuse(store)
        return sample, -1 if drew else nbytes


def sole(decode: Decode | None) -> Mapping[str, Decode]:
    """Return the decoders of a dataset that has one, or none."""
    return {} if decode is None else {"": decode}
