"""CreelDataset: a torch Dataset that knows which objects each sample consists of."""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, SupportsIndex, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from creel.cache.storage.lookup import stores
from creel.cache.storage.manifest import Manifest
from creel.cache.storage.source import Source
from creel.cache.storage.stores.access import Options, StorageOptions
from creel.cache.storage.stores.requests import in_threads
from creel.cache.storage.stores.retry import public
from creel.errors import ConfigError, SourceError
from creel.loader.data.decoded.decode_benefit import measuring
from creel.loader.data.decoded.keeping import Keeping
from creel.loader.data.decoded.limit import Decoded
from creel.loader.data.decoded.objects import ObjectKeeping
from creel.loader.data.reading.observer import take
from creel.loader.data.reading.this_thread import this_thread, thread_use
from creel.policies.arrays import Ids, Ints

#: `each` uses threads once this many jobs have slept, and at least one in this many of all.
_SLEEPS = 4
#: A sample is whatever the user's transform returns.
Sample: TypeAlias = Any
T = TypeVar("T")
R = TypeVar("R")


def position(index: SupportsIndex, size: int) -> int:
    """Return a sample's number in [0, size); a negative index counts from the end, as in a list.

    Raises:
        IndexError: outside the dataset.
    """
    i = operator.index(index)
    if not -size <= i < size:
        raise IndexError(f"sample {i} is outside a dataset of {size} samples")
    return i + size if i < 0 else i


def positions(indices: NDArray[np.integer[Any]], size: int) -> Ints:
    """Apply `position` to (n,) indices."""
    wide = np.asarray(indices, np.int64)
    if wide.size and not (-size <= wide.min() and wide.max() < size):
        raise IndexError(f"samples {wide.min()} to {wide.max()} are not all in a dataset of {size}")
    return np.where(wide < 0, wide + size, wide)


@dataclass(frozen=True)
class Raw:
    """How samples of one leaf are made from their bytes alone, for `Gather`.

    Attributes:
        nbytes: size of an object.
        dtype, shape: of a record in it.
        labels: how labels are collated (equal values collate alike), None for no labels.
        to: the dtype that numbers are cast to.
        transform: the user's function of a record.
        batch_transform: the user's function of a batch of records.
        splits: `batch_transform` is creel's own, and takes a batch apart into fields.
    """

    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    labels: tuple[object, ...] | None
    to: torch.dtype | None = None
    transform: Callable[[Sample], Sample] | None = None
    batch_transform: Callable[[torch.Tensor], Any] | None = None
    splits: bool = False

    def same(self, other: Raw | None) -> bool:
        """Whether `other` describes the same samples. Functions are compared by identity."""
        return (
            other is not None
            and other.transform is self.transform
            and other.batch_transform is self.batch_transform
            and (other.nbytes, other.dtype, other.shape, other.labels, other.to)
            == (self.nbytes, self.dtype, self.shape, self.labels, self.to)
        )


class BatchBuilder(Protocol):
    """Makes batches from files in the page cache; for one thread."""

    def batch(self, index: object) -> Any:
        """Return a batch; None if torch must make it.

        Raises:
            SourceError: a file could not be read.
        """


class CreelDataset(Dataset[Sample]):
    """Base of creel's datasets: samples consist of *objects*, byte ranges of the storage.

    A subclass defines `_build_manifest`, `__len__` and `__getitem__`, which reads with `self.read`.
    It also defines `objects`, unless sample i is object i.
    """

    #: Attributes left out of a pickle, because they can be made again.
    volatile: ClassVar[tuple[str, ...]] = ("_manifest", "_opened")
    _given: StorageOptions | None = None
    #: Whether every object is a whole file, so that its address alone identifies it.
    whole_files: ClassVar[bool] = False
    #: Whether `batch_builder` makes whole batches of files in the page cache.
    builds_batches: ClassVar[bool] = False
    _manifest: Manifest | None = None
    _opened: tuple[int, Source] | None = None
    _keeping: ObjectKeeping | None = None  # where decoded objects are kept, if the user wants that

    def __len__(self) -> int:
        raise NotImplementedError

    def _build_manifest(self) -> Manifest:
        raise NotImplementedError

    def batch_builder(
        self, gather: Any, memory: Callable[[int], torch.Tensor], frozen: bool
    ) -> BatchBuilder:
        """Return what makes batches in the training process, as torch would, in fewer steps.

        Args:
            gather: of the dataset, without user code.
            memory: returns (nbytes,) uint8 for a batch.
            frozen: whether later changes to the dataset are ignored, as a worker would.
        """
        raise NotImplementedError

    @property
    def manifest(self) -> Manifest:
        """The table of all objects; built at first use, never sent to a worker."""
        if self._manifest is None:
            given = self._given = self._given or StorageOptions()
            self._manifest = self._build_manifest().reached(given)
        return self._manifest

    @property
    def storage_options(self) -> Options:
        """Options of the clients that read remote addresses; assign others to renew credentials.

        The daemon takes new ones when an epoch begins. Another server is another dataset: make a
        new one.
        """
        return None if self._given is None else self._given.options

    @storage_options.setter
    def storage_options(self, options: Options) -> None:
        if options is not None and not isinstance(options, Mapping):
            raise ConfigError(f"storage_options is a dict of a client's options, not {options!r}")
        self._given = self._given or StorageOptions()
        self._given.options = options

    @property
    def read_once(self) -> bool:
        """Whether each reader reads an object once, from this machine's memory or page cache.

        A further copy of it then costs more than it saves.
        """
        return False

    @property
    def object_count(self) -> int:
        """Number of objects, known without building the manifest."""
        return len(self)

    @property
    def layout(self) -> object:
        """An object that is replaced whenever samples consist of other objects than before."""
        return None

    @property
    def cacheable(self) -> bool:
        """Whether samples are read through `read`, so that caching their objects is useful."""
        return True

    def objects(self, indices: Ints) -> tuple[Ids, Ints]:
        """Return the objects that samples consist of.

        Args:
            indices: (n,) numbers of samples; negative ones count from the end.

        Returns:
            (k,) object ids, sample by sample, in order of reading; (n,) number of ids per sample.

        Raises:
            IndexError: outside the dataset.
        """
        ids = positions(indices, len(self))
        return ids.astype(np.int32), np.ones(len(ids), np.int64)

    def read(self, object_id: int) -> bytes:
        """Return the bytes of one object: from the cache inside a lease, else from the source.

        Raises:
            SourceError: the storage failed, also after retries.
        """
        return take(self, object_id, self._read_direct, bytes)

    def address(self, object_id: int) -> str | None:
        """Return the address of an object that is a whole file, None for a part of a file."""
        return self.manifest.location(object_id)[0] if self.whole_files else None

    @property
    def decoders(self) -> Mapping[str, Callable[[bytes], Sample]]:
        """The functions that `decoded` is called with, by name."""
        return {}

    @property
    def remote(self) -> bool:
        """Whether objects that are parts of files may lie in remote storage."""
        return True

    @property
    def indexed(self) -> str:
        """Describes the state of the files in which the objects were found; "" if none is known."""
        return ""

    def _keep_decoded(self, limit: str | int | Decoded | None, shared_as: str | None) -> None:
        """Keep what `decoded` returns, in `limit` bytes of the node's memory; None: do not.

        `shared_as`: as for `creel.kept`.

        Raises:
            ConfigError: one is not what it should be, or there is no decoder.
        """
        if limit is None and shared_as is not None:
            raise ConfigError("shared_as names what keep_decoded= keeps: give that, too")
        if limit is not None and not self.decoders:
            raise ConfigError("keep_decoded keeps what decode= returns: give decode=")
        self._keeping = None if limit is None else ObjectKeeping(limit, shared_as).of(self)

    @property
    def keeping(self) -> Keeping | None:
        """Where decoded objects are kept; None if the user does not want that."""
        if self._keeping is not None:
            self._keeping = self._keeping.of(self)
        return self._keeping

    def decoded(self, object_id: int, decode: Callable[[bytes], Sample]) -> Sample:
        """`decode` an object's bytes, or return a copy of what was kept of that."""
        if self._keeping is None:
            lease = this_thread.lease
            if lease is not None:
                lease.decodes += 1
                if lease.decodes == 1:
                    decode = measuring(lease, decode)
            return self._decoded(object_id, decode)
        return self._keeping.sample(
            self, object_id, decode, lambda decode: self._decoded(object_id, decode)
        )

    def _decoded(self, object_id: int, decode: Callable[[bytes], Sample]) -> Sample:
        """`decode` an object's bytes; a note on an error names the file and object."""
        data = self.read(object_id)
        try:
            return decode(data)
        except Exception as e:
            if sys.version_info >= (3, 11):
                place = public(self.manifest.location(object_id)[0])
                e.add_note(f"while decoding {place} (object {object_id} of {type(self).__name__})")
            raise

    def _read_direct(self, object_id: int) -> bytes:
        try:
            return self._source().read(object_id)
        except SourceError as e:
            # The error has the path; the number finds the sample among a million files.
            reason = f"{e.strerror} (object {object_id} of this {type(self).__name__})"
            raise type(e)(e.errno or 0, reason, e.uri) from None

    def _tensor(self, object_id: int) -> torch.Tensor:
        """Return the bytes of one object as (nbytes,) uint8, in memory of its own."""
        data = take(self, object_id, self._read_direct, bytearray)
        if not data:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(data, dtype=torch.uint8)

    def _source(self) -> Source:
        # Opened per process: descriptors and clients are not shared with a forked worker.
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = os.getpid(), Source(self.manifest, stores=stores())
        return self._opened[1]

    def raw(self) -> Raw | None:
        """Return how samples are made from their bytes alone; None if user code runs per sample.

        None for a subclass of a creel dataset, which may have changed `__getitem__`.
        """
        return None

    def collated_labels(self) -> Callable[[Ints], torch.Tensor]:
        """Return a function from (n,) sample numbers to labels, collated as by default_collate.

        Requires that `raw` has labels. Labels assigned later do not change the function.
        """
        raise NotImplementedError

    def __getstate__(self) -> dict[str, object]:
        return {k: v for k, v in self.__dict__.items() if k not in self.volatile}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        _ = self.keeping  # which belongs to the copy from now on


class Transformed(Dataset[Sample]):
    """`fn(sample)` for every sample of another dataset, which is cached as before.

    Args:
        dataset: any map-style dataset.
        fn: takes a sample and returns another.
    """

    def __init__(self, dataset: Dataset[Sample], fn: Callable[[Sample], Sample]) -> None:
        self.dataset = dataset
        self.fn = fn

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # torch's Dataset promises no length

    def __getitem__(self, index: int) -> Sample:
        return self.fn(self.dataset[index])

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        return [self.fn(sample) for sample in fetch_many(self.dataset, indices)]


def fetch_many(dataset: Dataset[Sample], indices: Sequence[int]) -> Iterable[Sample]:
    """Return a batch's samples, by the dataset's `__getitems__` if it has one, as torch does."""
    many: Callable[[Sequence[int]], Iterable[Sample]] | None
    many = getattr(dataset, "__getitems__", None)
    return many(indices) if many else [dataset[i] for i in indices]


def check_callable(**given: object) -> None:
    """Raise ConfigError unless each argument is a function or None."""
    for name, value in given.items():
        if value is not None and not callable(value):
            raise ConfigError(f"{name} is a function of one argument, not {value!r}")


def each(job: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Return [job(item) for item in items], run in several threads once jobs are seen to sleep.

    Threads that only wait for the interpreter's lock are slower than one: to list 1.3 million local
    files on 2 cores took 5 s and 7.5 s of CPU time, not 2.
    """
    done: list[R] = []
    began = thread_use().sleeps
    for item in items:
        done.append(job(item))
        slept = thread_use().sleeps - began
        if slept >= _SLEEPS and slept * _SLEEPS >= len(done):
            break
    return done + in_threads(job, items[len(done) :])
