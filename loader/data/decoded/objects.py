"""ObjectKeeping: keeps what a creel dataset decodes of each object, in the version of its file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from creel.cache.storage.manifest import Manifest
from creel.cache.storage.stores.store import version_at
from creel.cache.storage.uris import is_local
from creel.cache.storage.version import of_stat
from creel.loader.data.decoded.keeping import Keeping
from creel.loader.data.decoded.stores.store import DecodedStore, Stamp
from creel.loader.data.interception.intercept import Intercepted, replace_imported
from creel.loader.data.reading.inputs import Inputs, SampleInputs, are_current
from creel.loader.data.reading.lease import Leaf
from creel.loader.data.reading.this_thread import this_thread

Decode = Callable[[bytes], Any]
#: The stamp of bytes that are not checked.
_UNCHECKED = 0


class DecodedLeaf(Leaf, Protocol):
    """A dataset that has objects and decodes them (`creel.loader.data.datasets`)."""

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
        return (owner.layout, *(part for pair in owner.decoders.items() for part in pair))

    def samples(self, owner: DecodedLeaf) -> int:
        return owner.object_count

    def settings(self, owner: DecodedLeaf) -> object:
        return dict(owner.decoders)

    def about(self, owner: DecodedLeaf) -> str:
        return f"{owner.manifest.key} {owner.indexed} {sorted(owner.decoders)}"

    def contents(self, owner: DecodedLeaf) -> str:
        return self.about(owner)

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
        given = self.take(store, object_id, partial(self._current, path, unchecked))
        if given is not None:
            outer = this_thread.observed  # an outer `creel.kept` or `creel.wrap`
            if outer is not None:
                version, inputs = given.stamp
                if path is None:
                    outer.add(address or (id(dataset), object_id))
                else:
                    inputs = [[path, version], *inputs]
                outer.inherit(inputs, id(dataset), object_id)
            return self.checked(store, given, lambda: fresh(decode))
        if not store.open:
            return fresh(decode)
        call = _WatchedCall(self, dataset, store, object_id, decode)
        if path is not None:
            return self._of_file(path, call, lambda: fresh(call))
        sample = fresh(call)
        if call.inputs is not None:
            self.keep(store, object_id, [unchecked, call.inputs], sample, call.nbytes, call.ns)
        return sample

    def _current(self, path: str | None, unchecked: int, stamp: Stamp) -> bool:
        """Whether the file, and what `decode` itself opened, are as they were."""
        version, inputs = stamp
        now = version_at(path) if path else unchecked
        return version == now and (self.recheck == "never" or are_current(inputs, self.loaders))

    def _unchecked(self, dataset: DecodedLeaf, address: str | None) -> int:
        """Return the stamp of bytes whose version cannot be asked for here.

        Remote files are those that a loader first found: another loader decodes them again. A local
        tar that was written since its index was made raises an error.
        """
        remote = dataset.remote if address is None else not is_local(address)
        return self.loaders if remote and self.recheck != "never" else _UNCHECKED

    def _of_file(self, path: str, call: _WatchedCall, fresh: Callable[[], Any]) -> Any:
        """Decode a local file, and keep the result if it is certain of which version it is."""
        status, lease, now_ns = None, this_thread.lease, time.time_ns()
        with suppress(OSError, ValueError):
            status = os.stat(path)  # noqa: PTH116  a third of the time of Path.stat
        reads = 0 if lease is None else lease.direct_reads
        sample = fresh()
        # The daemon has read the file at some time since the loader was made, not just now.
        direct = lease is None or call.direct_reads > reads
        if call.inputs is not None and status is not None:
            version = of_stat(status, now_ns if direct else min(now_ns, self.made_ns))
            if version == version_at(path) > 0:
                stamp = [version, call.inputs]
                self.keep(call.store, call.number, stamp, sample, call.nbytes, call.ns)
        return sample


class _WatchedCall:
    """One call of `decode`: what it draws, what it opens, whether it returns the same again."""

    def __init__(
        self,
        keeping: ObjectKeeping,
        dataset: DecodedLeaf,
        store: DecodedStore,
        number: int,
        decode: Decode,
    ) -> None:
        self.keeping, self.dataset = keeping, dataset
        self.store, self.number, self.decode = store, number, decode
        self.nbytes = self.ns = 0  # that were decoded, and how long that took
        self.direct_reads = 0  # of the thread's lease, before the call
        #: What `decode` itself opened; None: the sample must not be kept.
        self.inputs: Inputs | None = None

    def __call__(self, data: bytes) -> Any:
        keeping, lease = self.keeping, this_thread.lease
        self.nbytes, self.direct_reads = len(data), 0 if lease is None else lease.direct_reads
        draws = keeping.draws(self.dataset)
        with SampleInputs() as opened, Intercepted():
            replace_imported()  # the last call may have imported a library to read with
            began = time.monotonic_ns()
            sample = self.decode(data)
            self.ns = time.monotonic_ns() - began
            if keeping.drew(self.store, draws):
                return sample
            again = partial(self.decode, data)
            if not (
                opened.doubt or keeping.same_again(self.store, self.number, sample, opened, again)
            ):
                return sample
        self.inputs = keeping.inputs(self.store, opened)
        return sample


def sole(decode: Decode | None) -> Mapping[str, Decode]:
    """Return the decoders of a dataset that has one, or none."""
    return {} if decode is None else {"": decode}
