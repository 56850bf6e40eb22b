"""ImageFolder: torchvision's attributes, order and errors, with files read through the cache."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from creel.cache.storage.lookup import Listing, read_all, walk
from creel.cache.storage.manifest import UNKNOWN
from creel.cache.storage.stores.access import Options
from creel.cache.storage.stores.retry import public
from creel.cache.storage.uris import absolute, addresses, escape, scheme_of, strings, unescape
from creel.errors import ConfigError, NotFoundError
from creel.loader.data.datasets.base import Sample, check_callable, each, position
from creel.loader.data.datasets.columns import LazySequence, Names
from creel.loader.data.datasets.files import WholeFiles
from creel.loader.data.decoded.limit import Decoded
from creel.loader.data.decoded.objects import sole
from creel.loader.data.files.opened import read as read_address
from creel.loader.data.reading.listing import files_below, parse_index, write_index

if TYPE_CHECKING:
    from PIL import Image

IMG_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
Loader: TypeAlias = Callable[[str], Sample]


def decode_image(data: bytes) -> Image.Image:
    """Decode an RGB image exactly as torchvision's `pil_loader` does from a file."""
    try:
        from PIL import Image
    except ImportError as e:
        raise ConfigError("decoding images needs Pillow: pip install 'creel-data[images]'") from e
    with Image.open(io.BytesIO(data)) as image:
        return image.convert("RGB")


def pil_loader(path: str) -> Image.Image:
    return decode_image(read_address(path))


class Samples(LazySequence[tuple[str, int]]):
    """(path, label) of every sample; equal to torchvision's list, without an object per sample."""

    def __init__(self, paths: Names, labels: NDArray[np.int64]) -> None:
        self.paths = paths
        self.labels = labels

    def __len__(self) -> int:
        return len(self.paths)

    def _item(self, i: int) -> tuple[str, int]:
        return self.paths[i], int(self.labels[i])

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return zip(self.paths, self.labels.tolist(), strict=True)

    def __add__(self, other: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        return [*self, *other]

    def __repr__(self) -> str:
        return f"<{len(self)} (path, label) pairs; list(...) for a list>"


class ImageFolder(WholeFiles):
    """Images in one folder per class: samples, order and errors as torchvision's.

    Args:
        root: a folder, a URI whose storage can list (s3://...), or an http(s) URL with listings or
            an index in it.
        transform: from the RGB image to a sample.
        target_transform: from the label to a target.
        loader: from a path to an image, as torchvision's. It opens the file itself, so nothing is
            cached: give `decode` instead. Default: Pillow, cached.
        is_valid_file: whether a path is a sample; default: by its extension.
        allow_empty: whether classes without files are allowed.
        decode: from the file's bytes to an image, instead of Pillow.
        index: a file that names the images below the root (`save_index`), so that nothing is
            listed.
        marker: as for `FileDataset`: keeps the listing of a remote root for the next job.
        storage_options: of the client that reads remote files, in fsspec's convention (`key`,
            `secret`, `endpoint_url`, ...); what they leave open, the environment decides.
        keep_decoded: memory of the node for what `decode` returned (docs/decode-once.md): a size
            ("64GiB" or bytes), "auto", or `creel.Decoded`. Each image is then decoded once
            in a job on a node. `decode` must draw no random numbers.
        shared_as: a name under which other processes share what is kept; see `creel.kept`.

    Raises:
        NotFoundError: (a FileNotFoundError) no folder, no class, or a class without files.
        ConfigError: both `loader` and `decode` or `keep_decoded`, or something that cannot be
            called.
    """

    volatile = (*WholeFiles.volatile, "_targets", "_imgs")
    _targets: list[int] | None = None  # what a person has assigned to `targets`
    _imgs: Sequence[tuple[str, int]] | None = None  # and to `imgs`

    def __init__(
        self,
        root: str | os.PathLike[str],
        transform: Callable[[Sample], Sample] | None = None,
        target_transform: Callable[[int], Sample] | None = None,
        loader: Loader | None = None,
        is_valid_file: Callable[[str], bool] | None = None,
        allow_empty: bool = False,
        *,
        decode: Callable[[bytes], Sample] | None = None,
        index: str | os.PathLike[str] | None = None,
        marker: str | None = None,
        storage_options: Options = None,
        keep_decoded: str | int | Decoded | None = None,
        shared_as: str | None = None,
    ) -> None:
        self.storage_options = storage_options
        if loader is not None and decode is not None:
            raise ConfigError("give loader= (takes a path) or decode= (takes bytes), not both")
        # As torchvision's VisionDataset: a string is expanded, a Path is kept.
        self.root = os.path.expanduser(root) if isinstance(root, str) else root  # noqa: PTH111
        self.transform = transform
        self.target_transform = target_transform
        self.loader = pil_loader if loader is None else loader
        self.decode = decode_image if decode is None else decode
        check_callable(decode=decode, loader=loader, is_valid_file=is_valid_file)
        self._keep_decoded(keep_decoded, shared_as)
        self.extensions = IMG_EXTENSIONS if is_valid_file is None else None  # as torchvision's
        self._root = absolute(root)
        #: The root as a person gave it.
        self._shown = self._root if scheme_of(os.fspath(root)) else os.fspath(self.root)
        listed = None
        if index is not None:
            address = absolute(index)
            listed = parse_index(read_all(address, storage_options), address)
        elif scheme_of(self._root) or marker is not None:
            listed = files_below(self._root, storage_options, marker)
        self._listed = _by_class(listed) if listed is not None else None
        #: torchvision's attributes.
        self.classes, self.class_to_idx = self.find_classes(self._shown)
        valid = is_valid_file or (lambda path: path.lower().endswith(IMG_EXTENSIONS))
        #: Of each sample: its name below the root, its label, its size if a listing says it.
        self._names, self._labels, self._nbytes = self._collect(valid, allow_empty)
        self._listed = None

    def save_index(self, path: str | os.PathLike[str]) -> None:
        """Write an index of all samples (.arrow or .json), to be placed in the root."""
        names = [unescape(self._root, name) for name in self._names.to_pylist()]
        write_index(Path(path), names, self._nbytes)

    def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
        """Return (class names in order, number of each); a subclass may override it.

        Raises:
            NotFoundError: no such folder, or no folder in it.
        """
        listed = self._listed
        classes = _subfolders(directory) if listed is None else sorted(listed)
        if not classes:
            raise NotFoundError(
                f"Couldn't find any class folder in {public(directory)}. An ImageFolder has a"
                " folder for each class; a folder of files is creel.FileDataset(folder, decode=...)"
            )
        return classes, {name: i for i, name in enumerate(classes)}

    @property
    def samples(self) -> Sequence[tuple[str, int]]:
        """(path, label) of every sample; may be assigned."""
        prefix = os.path.join(self._shown, "") if self._shown else ""  # noqa: PTH118
        return Samples(Names(prefix, self._names), self._labels)

    @samples.setter
    def samples(self, samples: Sequence[tuple[str, int]]) -> None:
        try:
            labels = np.array([label for _, label in samples], np.int64)
            names = addresses([path for path, _ in samples])
        except (TypeError, ValueError) as e:
            raise ConfigError("samples is a sequence of (path, number of the class)") from e
        self._root = self._shown = ""
        self._names, self._labels, self._nbytes = names, labels, None
        self._manifest = self._opened = None  # of the samples before

    @property
    def imgs(self) -> Sequence[tuple[str, int]]:
        """`samples` by torchvision's older name."""
        return self.samples if self._imgs is None else self._imgs

    @imgs.setter
    def imgs(self, imgs: Sequence[tuple[str, int]]) -> None:
        self._imgs = imgs

    @property
    def targets(self) -> list[int]:
        """Label of every sample, a list made at first use; changing it does not change samples."""
        if self._targets is None:
            self._targets = self._labels.tolist()
        return self._targets

    @targets.setter
    def targets(self, targets: list[int]) -> None:
        self._targets = targets

    def __getitem__(self, index: int) -> tuple[Sample, Sample]:
        """Return (image, label), each after its transform."""
        i = position(index, len(self))
        if self.loader is pil_loader:
            sample = self.decoded(i, self.decode)
        else:
            sample = self.loader(self.samples[i][0])
        target: Sample = int(self._labels[i])
        if self.transform is not None:
            sample = self.transform(sample)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return sample, target

    def __repr__(self) -> str:
        below = public(self._shown) or "many roots"
        return f"{type(self).__name__}({len(self)} samples below {below!r})"

    @property
    def layout(self) -> object:
        return self._names

    @property
    def decoders(self) -> Mapping[str, Callable[[bytes], Sample]]:
        return sole(self.decode if self.loader is pil_loader else None)

    @property
    def cacheable(self) -> bool:
        """Whether creel reads the files, not the user's `loader`."""
        return self.loader is pil_loader

    def _collect(
        self, valid: Callable[[str], bool], allow_empty: bool
    ) -> tuple[pa.Array, NDArray[np.int64], NDArray[np.int64] | None]:
        """Return names, labels and sizes of the valid files in order; no sizes unless all known."""
        if not self.class_to_idx:
            raise ConfigError(
                "'class_to_index' must have at least one entry to collect any samples."
            )
        wanted = sorted(self.class_to_idx)
        names, labels, sizes, empty = [], [], [], []
        for name, listing in zip(wanted, self._files_of(wanted), strict=True):
            prefix = os.path.join(self._shown, name, "")  # noqa: PTH118  as torchvision joins
            keep = [i for i, inner in enumerate(listing.names) if valid(prefix + inner)]
            if not keep:
                empty.append(name)
            inner = [f"{name}/{listing.names[i]}" for i in keep]
            names.append(strings([escape(self._root, n) for n in inner]))
            labels.append(np.full(len(keep), self.class_to_idx[name], np.int64))
            sizes += (
                [UNKNOWN] * len(keep)
                if listing.nbytes is None
                else [listing.nbytes[i] for i in keep]
            )
        if empty and not allow_empty:
            why = f"Found no valid file for the classes {', '.join(sorted(empty))}. "
            if self.extensions is not None:
                why += f"Supported extensions are: {', '.join(self.extensions)}"
            raise NotFoundError(why)
        known = None if not sizes or UNKNOWN in sizes else np.array(sizes, np.int64)
        return pa.concat_arrays(names), np.concatenate(labels), known

    def _files_of(self, classes: list[str]) -> list[Listing]:
        if self._listed is not None:
            return [self._listed.get(name, Listing([])) for name in classes]
        root = self._shown
        return each(walk, [os.path.join(root, name) for name in classes])  # noqa: PTH118


def _subfolders(directory: str) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir())
    except (FileNotFoundError, NotADirectoryError) as e:
        raise NotFoundError(f"there is no folder {directory}") from e


def _by_class(listed: Listing) -> dict[str, Listing]:
    """Group files by their first folder, with names relative to it."""
    groups: dict[str, list[int]] = {}
    for i, name in enumerate(listed.names):
        folder, separator, _ = name.partition("/")
        if separator:
            groups.setdefault(folder, []).append(i)
    return {
        folder: Listing(
            [listed.names[i][len(folder) + 1 :] for i in rows],
            None if listed.nbytes is None else [listed.nbytes[i] for i in rows],
        )
        for folder, rows in groups.items()
    }
