"""creel.kept: any dataset, whose samples are read and decoded once in a job on a node."""

from __future__ import annotations

import hashlib
import operator
import os
import pickle
import time
from collections.abc import Sequence
from typing import Any, TypeVar

from torch.utils.data import Dataset, IterableDataset

from creel.cache.storage.version import of_stat
from creel.errors import ConfigError
from creel.loader.cluster.ranks import rank_and_world
from creel.loader.decoded.draws import Draws
from creel.loader.decoded.kept import KeepingSamples, KeptDataset
from creel.loader.decoded.store import DecodedStore, Stamp
from creel.loader.reading.storage import is_local, version_at
from creel.loader.reading.this_thread import this_thread
from creel.loader.tracing.intercept import Intercepted, look_again
from creel.loader.tracing.observed import FoundVersions, ObservedReads

T_co = TypeVar("T_co", covariant=True)

#: A larger pickle of a dataset is not compared with those of other ranks.
_MAX_PICKLE_NBYTES = 1 << 28
#: In a stamp, in place of the address of remote files.
_REMOTE = ""


class SampleKeeping(KeepingSamples):
    """Keeps samples of a `KeptDataset`, with the versions of the local files they opened."""

    def identity(self, owner: KeptDataset[Any]) -> tuple[object, ...]:
        return (owner.dataset,)

    def samples(self, owner: KeptDataset[Any]) -> int:
        return len(owner)

    def what(self, owner: KeptDataset[Any]) -> str | None:
        """Describe the dataset by its pickle: equal pickles are read by the same code.

        It takes a second for a million paths, so it is made only where there are other ranks.
        """
        if rank_and_world()[1] == 1:
            return None
        digest = _Digest()
        try:
            pickle.Pickler(digest, 5).dump(owner.dataset)
        except Exception:  # noqa: BLE001  a user's object raises anything
            return None
        return f"pickle {digest.hexdigest()}"

    def sample(self, owner: KeptDataset[Any], index: Any) -> Any:
        """Return a sample: kept, or read from the dataset, and then kept."""
        store, number = self.usable(owner), _number(index)
        if store is None or not 0 <= number < store.samples:
            return owner.dataset[index]
        given = self.take(store, number, self._current)
        if given is not None:
            if this_thread.observed is not None:  # an outer `kept` or `creel.wrap`
                for address, _ in given.stamp:
                    this_thread.observed.add(address or (id(owner), number))
            return given.sample
        return self._read(owner, store, number, index) if store.open else owner.dataset[index]

    def _current(self, stamp: Stamp) -> bool:
        return self.recheck == "never" or all(
            version == (self.loaders if address == _REMOTE else version_at(address))
            for address, version in stamp
        )

    def _read(self, owner: KeptDataset[Any], store: DecodedStore, number: int, index: Any) -> Any:
        outer, lease, versions = this_thread.observed, this_thread.lease, FoundVersions()
        observed = ObservedReads(whole=True, versions=versions)
        reads = 0 if lease is None else lease.direct_reads
        draws = Draws()
        with observed, Intercepted():
            look_again()  # the last sample may have imported a library to read with
            sample = owner.dataset[index]
        drew, asked = draws.any(), observed.end_sample()
        if outer is not None:  # creel.wrap records them, too
            for one in asked:
                outer.add(one)
        if drew:
            self.refuse(store)
            return sample
        direct = lease is None or lease.direct_reads - reads >= len(asked)
        stamp = self._stamp(store, asked, versions, direct=direct)
        if stamp is not None:
            self.keep(store, number, stamp, sample)
        return sample

    def _stamp(
        self, store: DecodedStore, asked: Sequence[Any], versions: FoundVersions, *, direct: bool
    ) -> Stamp | None:
        """Return (address, version) of each file that a sample read; None if one is not certain.

        `direct`: whether all were read now, none from the arena.
        """
        stamp: list[tuple[str, int]] = []
        for one in asked:
            address = one if isinstance(one, str) else one[0]
            if not isinstance(address, str):
                self._say(store, "it reads records or tars, whose files are not checked here")
                return None
            if not is_local(address):
                stamp.append((_REMOTE, self.loaders))
                continue
            version = versions.take(address)
            if version <= 0 or version != version_at(address):
                return None
            if not (direct or self._settled(address)):
                return None
            stamp.append((address, version))
        return stamp

    def _settled(self, path: str) -> bool:
        """Whether a file has not changed since this was made: the daemon has read it later."""
        try:
            return of_stat(os.stat(path), min(self.made_ns, time.time_ns())) > 0  # noqa: PTH116
        except (OSError, ValueError):
            return False


class _Digest:
    """A file for a pickle, of which only a digest is kept."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)
        self._nbytes = 0

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self._nbytes += view.nbytes
        if self._nbytes > _MAX_PICKLE_NBYTES:
            raise ValueError("a dataset too large to be compared")
        self._digest.update(view)
        return view.nbytes

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def _number(index: Any) -> int:
    """Return the number of a sample; a very negative one for any other key."""
    try:
        return operator.index(index)
    except TypeError:
        return -(1 << 62)


def kept(dataset: Dataset[T_co], limit: str | int = "auto") -> KeptDataset[T_co]:
    """Return a dataset with the same samples, which are kept in the node's memory once made.

    Below a random transform (`creel.datasets.Transformed(creel.kept(dataset), transform)`) each
    sample is read and decoded once in a job, by the first rank that needs it, and copied from then
    on, until a local file that it opened changes. docs/datasets.md says what can be kept.

    Args:
        dataset: a map-style dataset whose samples draw no random numbers, and are equal in all
            epochs. Not one that `creel.wrap` returned: wrap the result.
        limit: most bytes of memory: "64GiB", a number, or "auto", what others do not need.

    Raises:
        ConfigError: an iterable or wrapped dataset, or `limit` is not a size.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise ConfigError("creel.kept takes a map-style dataset")
    if hasattr(type(dataset), "_creel_begin"):  # `binding` imports this module
        raise ConfigError("creel.kept takes the dataset itself: give its result to creel.wrap")
    return KeptDataset(dataset, SampleKeeping(limit))
