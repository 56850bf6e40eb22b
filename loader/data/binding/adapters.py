"""Leaves for datasets that are not creel's: torchvision's folders, and declared reads."""

from __future__ import annotations

import inspect
import logging
import operator
import os
import sys
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from itertools import compress
from typing import Any, Protocol, TypeGuard, cast

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from creel.cache.storage.manifest import Manifest
from creel.cache.storage.stores.access import Options
from creel.cache.storage.uris import absolute, addresses
from creel.errors import ConfigError
from creel.loader.data.binding.fetch_limit import FetchLimit
from creel.loader.data.datasets.base import CreelDataset
from creel.loader.data.files.opened import open_as_python
from creel.loader.data.reading.lease import FileInBlocks
from creel.policies.arrays import Ids, Ints

_log = logging.getLogger("creel.loader")


def cacheable(dataset: object) -> bool:
    """Whether this dataset's objects are known and read through creel; cheap for any length."""
    if isinstance(dataset, CreelDataset):
        return dataset.cacheable
    if _declares(dataset):
        return True
    if not _is_folder(dataset):
        return False
    folder = cast(Folder, dataset)
    return bool(folder.samples) and _loads_by_pillow(folder.loader)


def leaf_of(dataset: object) -> CreelDataset | None:
    """Return the leaf of a `cacheable` dataset; None if a folder has unusable file names."""
    if isinstance(dataset, CreelDataset):
        return dataset
    if _declares(dataset):
        return Declared(dataset)
    try:
        return FolderLeaf(cast(Folder, dataset))
    except ConfigError as e:  # torchvision opens a file of any name
        _warn_of_folder(str(e))
        return None


@cache
def _warn_of_folder(why: str) -> None:
    _log.warning("creel reads a torchvision folder directly, without a cache: %s", why)


# --- files by address -------------------------------------------------------------------------


class Addressed(CreelDataset):
    """Whole-file objects, found by address when user code reads them."""

    volatile = (*CreelDataset.volatile, "_index", "limit")
    whole_files = True
    #: Whether a local file is served only in the version that it has when a sample opens it. Not if
    #: the files were declared.
    checked = False
    #: How many of these files may be fetched ahead; None: all.
    limit: FetchLimit | None = None

    def __init__(self, uris: Sequence[str | os.PathLike[str]]) -> None:
        self._uris = addresses(uris)

    @property
    def object_count(self) -> int:
        return len(self._uris)

    def addresses(self, ids: NDArray[np.integer]) -> list[str]:
        """Return the addresses of (k,) objects, in the form of `absolute`."""
        return [self._uris[i].as_py() for i in ids.tolist()]  # `take` imports pyarrow.compute

    def in_blocks(self, ids: NDArray[np.integer]) -> list[FileInBlocks]:  # noqa: ARG002
        """Return the files of (k,) objects that are blocks of files: here none is."""
        return []

    def find(self, address: str) -> int | None:
        """Return the object number of an address (in the form of `absolute`), or None."""
        return self._index.find(address)

    @cached_property
    def _index(self) -> _StringIndex:
        return _StringIndex(self._uris)

    def _build_manifest(self) -> Manifest:
        return Manifest.of_files(self._uris)


class Blocks(Addressed):
    """Blocks of files, of one size in each but for its last block."""

    whole_files = False

    def __init__(self, uris: Sequence[str], nbytes: Ints, size: Ints) -> None:
        """`nbytes`: (n,) of each file, not 0; `size`: (n,) of its blocks."""
        super().__init__(uris)
        self._nbytes, self._size = nbytes, size
        #: (n + 1,) the first block of each file, and how many there are.
        self.firsts: Ints = np.append(0, np.cumsum(-(-nbytes // size)))

    @property
    def object_count(self) -> int:
        return int(self.firsts[-1])

    def in_blocks(self, ids: NDArray[np.integer]) -> list[FileInBlocks]:
        files = np.unique(np.searchsorted(self.firsts, ids, side="right") - 1)
        columns = self.firsts[files], self._size[files], self._nbytes[files]
        return list(map(FileInBlocks, self.addresses(files), *(c.tolist() for c in columns)))

    def _build_manifest(self) -> Manifest:
        nbytes, size = self._nbytes, self._size
        full, last = np.divmod(nbytes, size)
        offset = np.stack([np.zeros_like(full), full * size], 1).ravel()
        length = np.stack([size, last], 1).ravel()
        count = np.stack([full, last > 0], 1).ravel()
        there = count > 0
        uris = [uri for uri in self._uris.to_pylist() for _ in range(2)]
        return Manifest.of_runs(
            list(compress(uris, there.tolist())), offset[there], length[there], count[there]
        )


class _StringIndex:
    """Index from strings to rows of a column: sorted hashes, 12 bytes each, no Python objects."""

    def __init__(self, column: pa.Array) -> None:
        self._column = column
        hashes = np.fromiter(
            (xxhash.xxh3_64_intdigest(text.encode()) for text in column.to_pylist()),
            np.uint64,
            len(column),
        )
        order = np.argsort(hashes, kind="stable")
        # Memory views: reading single entries is 3 times as fast as from arrays.
        self._hashes: memoryview[int] = memoryview(hashes[order])  # type: ignore[arg-type]  # numpy's
        self._order: memoryview[int] = memoryview(order.astype(np.int32))  # type: ignore[arg-type]

    def find(self, text: str) -> int | None:
        """Return the first row with `text`, or None."""
        # `text` may be any path; those in the column are all UTF-8.
        wanted = xxhash.xxh3_64_intdigest(text.encode(errors="surrogatepass"))
        at = bisect_left(self._hashes, wanted)
        while at < len(self._hashes) and self._hashes[at] == wanted:
            place = self._order[at]
            if self._column[place].as_py() == text:
                return place
            at += 1
        return None


# --- torchvision's folders --------------------------------------------------------------------


class Folder(Protocol):
    """The part of torchvision.datasets.DatasetFolder that is used here."""

    samples: list[tuple[str, int]]
    loader: Any
    transform: Any
    target_transform: Any


def _torchvision() -> Any:
    """Return torchvision's folder module if the user imported it; creel never imports it."""
    return sys.modules.get("torchvision.datasets.folder")


def _is_folder(dataset: object) -> bool:
    """Whether this is torchvision's own class. A subclass may read differently."""
    module = _torchvision()
    return module is not None and type(dataset) in {module.DatasetFolder, module.ImageFolder}


def _loads_by_pillow(loader: object) -> bool:
    module = _torchvision()
    if loader is module.pil_loader:
        return True
    backend = sys.modules["torchvision"].get_image_backend()
    return loader is module.default_loader and backend == "PIL"


class FolderLeaf(Addressed):
    """The objects of a torchvision folder: sample i is file i of its `samples` at this time.

    torchvision's loader opens the files; its module gets an `open` that asks the lease first.
    """

    def __init__(self, folder: Folder) -> None:
        super().__init__([path for path, _ in folder.samples])
        self.folder = folder
        serve_torchvision()

    def __len__(self) -> int:
        return self.object_count

    @property
    def layout(self) -> object:
        return self.folder.samples

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        serve_torchvision()


def serve_torchvision() -> None:
    """Let torchvision's loaders open files through creel during a lease or record."""
    module = _torchvision()
    if module is not None:
        module.open = open_as_python


# --- declared reads ---------------------------------------------------------------------------


class Declares(Protocol):
    """A dataset that declares what it reads."""

    creel_uris: Sequence[str]
    #: The `storage_options` with which it reads remote addresses; a dataset may lack it.
    creel_storage_options: Options

    def objects(self, index: int, /) -> int | str | Iterable[int | str]:
        """Return positions in `creel_uris` (or addresses from it) that sample `index` reads."""
        ...


def _declares(dataset: object) -> TypeGuard[Declares]:
    """Whether it defines both attributes: a `__getattr__` may answer to any name, or fail."""
    names = "creel_uris", "objects"
    return all(inspect.getattr_static(dataset, name, None) is not None for name in names)


class Declared(Addressed):
    """The objects of a dataset that declares them."""

    def __init__(self, dataset: Declares) -> None:
        uris = dataset.creel_uris
        values = uris.to_pylist() if isinstance(uris, pa.Array) else uris
        if any(not isinstance(uri, str) for uri in values):
            raise ConfigError("creel_uris is a sequence of strings")
        super().__init__(values)
        if inspect.getattr_static(dataset, "creel_storage_options", None) is not None:
            self.storage_options = dataset.creel_storage_options
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]  # map-style datasets have a length

    def objects(self, indices: Ints) -> tuple[Ids, Ints]:
        """Call the dataset's `objects` once per sample, with the index as given."""
        given = (self._dataset.objects(i) for i in indices.tolist())
        # Lazily, one at a time: the user's `objects` may reuse one list.
        objects = [item if type(item) is int else self._of(item) for item in given]
        if all(type(item) is int for item in objects):  # the usual case
            counts, flat = np.ones(len(objects), np.int64), np.array(objects, np.int64)
        else:
            several = [item if isinstance(item, list) else [item] for item in objects]
            counts = np.array([len(ids) for ids in several], np.int64)
            flat = np.array([i for ids in several for i in ids], np.int64)
        if flat.size and (flat.min() < 0 or flat.max() >= self.object_count):
            raise ConfigError(
                f"objects() gave {flat.min()} to {flat.max()}, creel_uris has {self.object_count}"
            )
        return flat.astype(np.int32), counts

    def _of(self, declared: int | str | Iterable[int | str]) -> list[int]:
        if isinstance(declared, (str, int, np.integer)):
            return [self._number(declared)]
        return [self._number(item) for item in declared]

    def _number(self, item: int | str) -> int:
        if not isinstance(item, str):
            return operator.index(item)
        number = self.find(absolute(item))
        if number is None:
            raise ConfigError(f"objects() gave {item!r}, which is not in creel_uris")
        return number
