"""FileDataset: each file is one sample; and WholeFiles, the base of all datasets of whole files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from creel.cache.storage.lookup import check_installed, is_folder, nbytes_of
from creel.cache.storage.manifest import UNKNOWN, Manifest
from creel.cache.storage.stores.access import Options
from creel.cache.storage.stores.retry import public
from creel.cache.storage.stores.store import read_file
from creel.cache.storage.uris import absolute, addresses, escape, several, strings
from creel.errors import ConfigError, NotFoundError
from creel.loader.data.datasets.base import (
    CreelDataset,
    Raw,
    Sample,
    check_callable,
    each,
    position,
)
from creel.loader.data.datasets.columns import Labelled, Names
from creel.loader.data.decoded.limit import Decoded
from creel.loader.data.decoded.objects import sole
from creel.loader.data.reading.listing import files_below, glob_pattern

Paths = Sequence[str | os.PathLike[str]]


class WholeFiles(CreelDataset):
    """Object i is the i-th of the files named below a root; without a root, names are addresses."""

    whole_files = True
    _root: str
    _names: pa.Array
    _nbytes: NDArray[np.int64] | None  # sizes of the files, if known

    def __len__(self) -> int:
        return len(self._names)

    def address(self, object_id: int) -> str:
        """Return the address without a manifest, which each worker would have to make."""
        return self._prefix + str(self._names[object_id].as_py())

    @property
    def _prefix(self) -> str:
        return f"{self._root.rstrip('/')}/" if self._root else ""

    def _read_direct(self, object_id: int) -> bytes:
        """Read a local file with few system calls; remote files and failures as in the base."""
        path = self.address(object_id)
        if "://" not in path:
            try:
                data = read_file(path)
            except (OSError, ValueError):
                return super()._read_direct(object_id)
            if self._nbytes is None or self._nbytes[object_id] in {len(data), UNKNOWN}:
                return data
        return super()._read_direct(object_id)

    def _build_manifest(self) -> Manifest:
        return Manifest.of_files(self._names, root=self._root, lengths=self._nbytes)


class FileDataset(WholeFiles, Labelled):
    """Each file is one sample: its bytes as a 1-D uint8 tensor, or the result of `decode`.

    Args:
        paths: the files (paths or URIs; the storage is not accessed), or one root folder whose
            files are taken in order of their names.
        glob: which files below the root, as in the `glob` module ("**" spans folders).
        decode: from the file's bytes to a sample.
        labels: one per file, copied; samples are then (sample, label). Assign `dataset.labels` to
            change them.
        transform: from a sample (without its label) to another.
        marker: an object, by its name below a remote root or its address, that whoever adds,
            removes or replaces files writes again afterwards ("_SUCCESS"). While its version is the
            same, the next job of this user on this machine takes the listing that was kept, for one
            request. Without it a remote root is listed each time, as no store says if it changed.
        nbytes: sizes of the files, or True to ask the storage for each; batches of undecoded files
            of one known size are built without a Python call per sample.
        storage_options: of the client that reads remote files, in fsspec's convention (`key`,
            `secret`, `endpoint_url`, ...); what they leave open, the environment decides.
        keep_decoded: memory of the node for what `decode` returned (docs/decode-once.md): a size
            ("64GiB" or bytes), "auto", or `creel.Decoded`. Each file is then decoded once
            in a job on a node. `decode` must draw no random numbers.
        shared_as: a name under which other processes share what is kept; see `creel.kept`.

    Raises:
        ConfigError: no files, or labels or sizes whose number or type does not fit; `keep_decoded`
            without `decode`.
        NotFoundError: a missing root, or no file below it that matches.
    """

    def __init__(
        self,
        paths: Paths | str | os.PathLike[str],
        glob: str = "**/*",
        *,
        decode: Callable[[bytes], Sample] | None = None,
        labels: object = None,
        transform: Callable[[Sample], Sample] | None = None,
        nbytes: Sequence[int] | bool = False,
        marker: str | None = None,
        storage_options: Options = None,
        keep_decoded: str | int | Decoded | None = None,
        shared_as: str | None = None,
    ) -> None:
        self.storage_options = storage_options
        if isinstance(paths, (str, os.PathLike)):
            root = absolute(paths)
            self._root, self._names, known = _below(root, glob, storage_options, marker)
        elif marker is not None:
            raise ConfigError("marker keeps the listing of a root, and a list of files has none")
        else:
            self._root, self._names, known = "", _each(paths), None
        check_callable(decode=decode, transform=transform)
        self.decode = decode
        self._keep_decoded(keep_decoded, shared_as)
        self.transform = transform
        self.labels = labels
        sizes = self._nbytes = self._sizes(nbytes, known)
        #: Bytes of each file, or -1 if sizes differ or are unknown.
        self._each_nbytes = -1 if sizes is None or (sizes != sizes[0]).any() else int(sizes[0])

    @property
    def paths(self) -> Sequence[str]:
        """Address of every sample's file; made at each access."""
        return Names(self._prefix, self._names)

    def __getitem__(self, index: int) -> Sample:
        i = position(index, len(self))
        sample = self._tensor(i) if self.decode is None else self.decoded(i, self.decode)
        if self.transform is not None:
            sample = self.transform(sample)
        return sample if self.labels is None else (sample, self.labels[i])

    @property
    def decoders(self) -> Mapping[str, Callable[[bytes], Sample]]:
        return sole(self.decode)

    def _sizes(
        self, given: Sequence[int] | bool, known: list[int] | None
    ) -> NDArray[np.int64] | None:
        if given is True:
            given = known or each(lambda p: nbytes_of(p, self.storage_options), self.paths)
        if given is False:
            return None if known is None else np.array(known, np.int64)
        sizes = np.asarray(given)
        if sizes.dtype.kind not in "iu":
            raise ConfigError(f"nbytes are whole numbers of bytes, one per file, not {given!r:.60}")
        sizes = sizes.astype(np.int64)
        if sizes.shape != (len(self),):
            raise ConfigError(f"nbytes has shape {sizes.shape} for {len(self)} files")
        if (sizes < UNKNOWN).any():
            raise ConfigError(f"a file cannot have {sizes.min()} bytes")
        return sizes

    def raw(self) -> Raw | None:
        """Undecoded files of one known size are rows of a matrix."""
        if type(self) is not FileDataset or self.decode is not None or self.transform is not None:
            return None
        size = self._each_nbytes
        if size <= 0 or (self.labels is not None and self.labels.kind is None):
            return None
        return Raw(size, torch.uint8, (size,), None if self.labels is None else self.labels.kind)


def _below(
    root: str, glob: str, options: Options, marker: str | None
) -> tuple[str, pa.Array, list[int] | None]:
    """Return (root, names below it, their sizes if listed)."""
    if not is_folder(root):
        raise NotFoundError(f"there is no folder {root}; files are given as a list")
    listed = files_below(root, options, marker)
    if not isinstance(glob, str):
        raise ConfigError(f"glob is a pattern of names, as '**/*.jpg', not {glob!r}")
    wanted = glob_pattern(glob).fullmatch
    keep = [i for i, name in enumerate(listed.names) if wanted(name)]
    if not keep:
        raise NotFoundError(f"no file below {public(root)} matches {glob!r}")
    keep.sort(key=listed.names.__getitem__)
    names = [escape(root, listed.names[i]) for i in keep]
    sizes = None if listed.nbytes is None else [listed.nbytes[i] for i in keep]
    return root, strings(names), sizes


def _each(paths: Paths | pa.Array) -> pa.Array:
    if isinstance(paths, pa.Array):
        paths = paths.to_pylist()
    elif not isinstance(paths, Sequence):
        paths = several(paths)
    if not len(paths):
        raise ConfigError("a FileDataset needs at least one file")
    names = addresses(paths)
    check_installed(str(names[0].as_py()))  # here, not at the first read
    return names
