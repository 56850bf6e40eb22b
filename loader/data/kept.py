"""creel.kept: any dataset, whose samples are read and decoded once in a job on a node."""

from __future__ import annotations

import operator
import time
from typing import Any, TypeVar

from torch.utils.data import Dataset, IterableDataset

from creel.errors import ConfigError
from creel.loader.data.decoded.identity import pickled
from creel.loader.data.decoded.kept import KeepingSamples, KeptDataset
from creel.loader.data.decoded.limit import Decoded
from creel.loader.data.decoded.stores.store import DecodedStore, Stamp
from creel.loader.data.interception.intercept import Intercepted, replace_imported
from creel.loader.data.reading.inputs import SampleInputs, are_current
from creel.loader.data.reading.this_thread import this_thread
from creel.loader.data.user_code.dataset_fingerprint import likeness

T_co = TypeVar("T_co", covariant=True)


class SampleKeeping(KeepingSamples):
    """Keeps samples of a `KeptDataset`, with the versions of what they opened or looked for."""

    def identity(self, owner: KeptDataset[Any]) -> tuple[object, ...]:
        return (owner.dataset,)

    def samples(self, owner: KeptDataset[Any]) -> int:
        return len(owner)

    def settings(self, owner: KeptDataset[Any]) -> object:
        return owner.dataset

    def about(self, owner: KeptDataset[Any]) -> str:
        return likeness(owner.dataset)

    def contents(self, owner: KeptDataset[Any]) -> str:
        return pickled(owner.dataset)

    def sample(self, owner: KeptDataset[Any], index: Any) -> Any:
        """Return a sample: kept, or read from the dataset, and then kept."""
        store, number = self.usable(owner), _number(index)
        if store is None or not 0 <= number < store.samples:
            return owner.dataset[index]
        given = self.take(store, number, self._current)
        if given is not None:
            if this_thread.observed is not None:  # an outer `kept` or `creel.wrap`
                this_thread.observed.inherit(given.stamp, id(owner), number)
            return self.checked(store, given, lambda: owner.dataset[index])
        return self._read(owner, store, number, index) if store.open else owner.dataset[index]

    def _current(self, stamp: Stamp) -> bool:
        return self.recheck == "never" or are_current(stamp, self.loaders)

    def _read(self, owner: KeptDataset[Any], store: DecodedStore, number: int, index: Any) -> Any:
        draws = self.draws(owner)
        with SampleInputs() as opened, Intercepted():
            replace_imported()  # the last sample may have imported a library to read with
            began = time.monotonic_ns()
            sample = owner.dataset[index]
            ns = time.monotonic_ns() - began
            if self.drew(store, draws):
                return sample
            if not opened.doubt and not self.same_again(
                store, number, sample, opened, lambda: owner.dataset[index]
            ):
                return sample
        inputs = self.inputs(store, opened)
        if inputs is not None:
            self.keep(store, number, inputs, sample, ns=ns)
        return sample


def _number(index: Any) -> int:
    """Return the number of a sample; a very negative one for any other key."""
    try:
        return operator.index(index)
    except TypeError:
        return -(1 << 62)


def kept(
    dataset: Dataset[T_co], limit: str | int | Decoded = "auto", *, shared_as: str | None = None
) -> KeptDataset[T_co]:
    """Return a dataset with the same samples, which are kept in the node's memory once made.

    Below a random transform (`creel.datasets.Transformed(creel.kept(dataset), transform)`) each
    sample is read and decoded once in a job, and copied from then on, until a local file that it
    opened (or looked for) changes. The ranks of a process group share what they make.
    docs/decode-once.md says what can be kept.

    Args:
        dataset: a map-style dataset whose samples draw no random numbers, and are equal in all
            epochs. Not one that `creel.wrap` returned: wrap the result.
        limit: most bytes of memory: "64GiB", a number, or "auto", what others do not need; or
            `creel.Decoded("1TiB", name=...)`, to find them again in later jobs.
        shared_as: a name under which all processes of this user on this node that give it share
            the samples: they must make the same ones.

    Raises:
        ConfigError: an iterable or wrapped dataset, `limit` is not a size, or `shared_as` no text.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise ConfigError("creel.kept takes a map-style dataset")
    if hasattr(type(dataset), "_creel_begin"):  # `binding` imports this module
        raise ConfigError("creel.kept takes the dataset itself: give its result to creel.wrap")
    return KeptDataset(dataset, SampleKeeping(limit, shared_as))
