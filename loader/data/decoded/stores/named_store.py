"""NamedStore: decoded samples that a person gave a name, in a file on local disk, for later jobs.

The file has what the memfd of a `DecodedStore` has, and a digest before each sample: after a loss
of power the index may name samples that never reached the disk. Its memory is the system's page
cache. Nothing is mapped: where a disk fails, a mapping would end the process, a call returns an
error, and the sample is made anew.
"""

from __future__ import annotations

import os
import struct
import time
import weakref
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from creel.cache.disk import named
from creel.cache.memory.memfd import Descriptor
from creel.loader.data.decoded.stores.memory import (
    END,
    USED,
    WORDS_NBYTES,
    Extent,
    Words,
    first_words,
    index_nbytes,
    transfer,
)
from creel.loader.data.decoded.stores.store import (
    CLOSED_NS,
    FAILED,
    FIRST_SLOT,
    OPENERS,
    SAMPLES,
    SLOTS,
    UNIT,
    DecodedStore,
    Stamp,
    places_of,
)

_WORD, _DIGEST = struct.Struct("<q"), struct.Struct("<Q")
#: After a write that took longer than this, none is tried for so many times as long: a disk that is
#: slower than decoding costs a worker at most 5 % of its time.
_SLOW_NS, _PAUSES = 50_000_000, 20


class NamedFile(NamedTuple):
    """Where a store lies: the folder of a disk tier, its key, and bytes to leave free there."""

    path: str
    key: str
    keep_free: int


class NamedStore(DecodedStore):
    """Samples by number, for all processes of this node, now and later, that have its key."""

    def __init__(
        self,
        own: Extent,
        samples: int,
        limit: int | None,
        file: NamedFile,
        opener: int = 0,
        looks: int | None = None,
    ) -> None:
        """Use the file `own`; `limit`: most bytes of the disk, None: all but what stays free."""
        self.file = file
        super().__init__(own, samples, limit, joint=True, opener=opener, looks=looks)
        self.mine = named.claim(own.fd)

    def __reduce__(self) -> tuple[object, ...]:
        make = partial(NamedStore, file=self.file, opener=self.opener, looks=self.looks)
        return make, (self.own, self.samples, self.limit)

    @property
    def index_words(self) -> None:
        return None

    def _open_words(self) -> tuple[Words, Words]:
        return _FileWords(self.own, 0), _FileWords(self.own, WORDS_NBYTES)

    def _new_opener(self) -> int:
        """Return this job's number; make the words agree with the index, whatever happened."""
        words = self._words
        with self._locked():
            number = words[OPENERS] = words[OPENERS] + 1
            words[FIRST_SLOT + number % SLOTS] = words[CLOSED_NS] = words[FAILED] = 0
            first, end = places_of(index := self._index)
            words[END] = max(words[END], int(end.max(initial=index_nbytes(self.samples))))
            words[USED] = index_nbytes(self.samples) + int((end - first).sum())
            words[SAMPLES] = int(np.count_nonzero(index))
        return number

    @property
    def _index(self) -> NDArray[np.int64]:
        data = np.zeros(self.samples, np.int64)
        with suppress(OSError):
            transfer(os.preadv, self.own, [data], WORDS_NBYTES)
        return data

    def _bytes(self, place: int, nbytes: int) -> memoryview:
        data = np.empty(nbytes, np.uint8)
        transfer(os.preadv, self.own, [data], place)
        (digest,) = _DIGEST.unpack_from(data.data)
        sample = data.data[_DIGEST.size :]
        if digest != xxhash.xxh3_64_intdigest(sample):
            raise OSError("the disk does not have what was written")
        return sample

    def _sealed(self, parts: list[Any]) -> list[Any]:
        nbytes = _DIGEST.size + sum(len(memoryview(part).cast("B")) for part in parts)
        parts = [*parts, bytes(-nbytes % UNIT)]
        digest = xxhash.xxh3_64()
        for part in parts:
            digest.update(part)
        return [_DIGEST.pack(digest.intdigest()), *parts]

    def put(
        self, number: int, stamp: Stamp, sample: object, encoded_nbytes: int = 0, ns: int = 0
    ) -> int:
        began = time.monotonic_ns()
        nbytes = super().put(number, stamp, sample, encoded_nbytes, ns)
        now = time.monotonic_ns()
        if now - began > _SLOW_NS:
            self._words[CLOSED_NS] = max(self._words[CLOSED_NS], now + _PAUSES * (now - began))
        return nbytes

    def _room(self) -> int:
        disk = os.fstatvfs(self.own.fd)
        free = disk.f_bavail * disk.f_frsize - self.file.keep_free
        return free if self.limit is None else min(free, self.limit - self._words[USED])

    def _poll_memory(self) -> None:
        """Do nothing: the system takes the page cache back by itself."""

    def _clear(self) -> None:
        named.drop(self.file.path, self.file.key)
        self._words[SAMPLES] = 0
        os.ftruncate(self.own.fd, index_nbytes(self.samples))  # other jobs may have it open


class _FileWords:
    """Words of a file; 0 where the disk fails: then nothing is there, nor open."""

    def __init__(self, own: Extent, at: int) -> None:
        self._own, self._at = own, at

    def __getitem__(self, number: int, /) -> int:
        with suppress(OSError, struct.error):
            data = os.pread(self._own.fd, _WORD.size, self._at + _WORD.size * number)
            return int(_WORD.unpack(data)[0])
        return 0

    def __setitem__(self, number: int, word: int, /) -> None:
        with suppress(OSError):
            os.pwrite(self._own.fd, _WORD.pack(word), self._at + _WORD.size * number)


#: Stores of this process by (device, inode): locks of a file end when any descriptor of it closes.
_stores: weakref.WeakValueDictionary[tuple[int, int], NamedStore] = weakref.WeakValueDictionary()


def open_named(
    file: NamedFile, about: dict[str, Any], samples: int, limit: int | None
) -> NamedStore:
    """Return the store of a file, which is made if there is none.

    Args:
        about: see `named.open_samples`.

    Raises:
        OSError: it cannot be opened.
    """
    nbytes = index_nbytes(samples)
    own = Descriptor(named.open_samples(file.path, file.key, about, first_words(samples), nbytes))
    status = os.fstat(own.fd)
    store = _stores.get((status.st_dev, status.st_ino))
    if store is None:
        store = NamedStore(Extent(own), samples, limit, file)
        _stores[status.st_dev, status.st_ino] = store
    else:  # of another dataset, whose samples this one compares with its own
        store.opener = store._new_opener()  # noqa: SLF001  its own class
    return store
