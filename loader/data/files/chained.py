"""The file system `creel` for fsspec: `creel::s3://bucket/key` is that object, read through creel.

Whatever takes an fsspec address or file system (pandas, pyarrow, zarr, xarray, ...) so reads large
files in blocks that the cache serves to the samples of a wrapped dataset. Only whole reads and
`open(path, "rb")` go through creel; all else is what the file system below does.
"""

from __future__ import annotations

from typing import Any, ClassVar

import fsspec

from creel.cache.storage.lookup import status_of
from creel.cache.storage.uris import absolute, scheme_of
from creel.loader.data.files.block_files import RemoteFile, buffered
from creel.loader.data.files.opened import open_blocks, read

try:
    from fsspec.implementations.chained import ChainedFileSystem
except ImportError:  # before 2025.10, which takes no others into its addresses
    from fsspec import AbstractFileSystem as ChainedFileSystem

#: Bytes of the buffer of a remote file: each request takes some milliseconds.
_BUFFER_NBYTES = 64 << 10


class CreelFileSystem(ChainedFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Reads the files of another file system through creel.

    Args:
        target_protocol: of the other file system.
        target_options: of its client: `storage_options` of `creel.read` and of `creel.wrap`.
        fs: the other file system itself, in place of the two.
        fo: ignored; fsspec gives the address.
    """

    protocol: ClassVar[str] = "creel"

    def __init__(
        self,
        target_protocol: str | None = None,
        target_options: dict[str, Any] | None = None,
        fs: Any = None,
        fo: Any = None,  # noqa: ARG002
        **more: Any,
    ) -> None:
        super().__init__(**more)
        self.fs = fs or fsspec.filesystem(target_protocol or "file", **(target_options or {}))
        self._options = target_options or None

    def _below(self, path: str) -> str:
        """Return a path as the file system below has it."""
        stripped: str = self.fs._strip_protocol(self._strip_protocol(path))  # noqa: SLF001  fsspec's
        return stripped

    def _address(self, path: str) -> str:
        return absolute(self.fs.unstrip_protocol(self._below(path)))

    def _open(self, path: str, mode: str = "rb", **more: Any) -> Any:
        if mode != "rb":
            return self.fs.open(self._below(path), mode, **more)
        address = self._address(path)
        if not scheme_of(address):
            return open_blocks(address)
        nbytes, version = status_of(address, self._options)
        return buffered(RemoteFile(address, nbytes, version, self._options), _BUFFER_NBYTES)

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **more: Any
    ) -> bytes:
        if start is None and end is None:
            return read(self._address(path), storage_options=self._options)
        data: bytes = super().cat_file(path, start, end, **more)
        return data

    def ls(self, path: str, detail: bool = True, **more: Any) -> Any:
        return self.fs.ls(self._below(path), detail, **more)

    def info(self, path: str, **more: Any) -> Any:
        return self.fs.info(self._below(path), **more)

    def created(self, path: str) -> Any:
        return self.fs.created(self._below(path))

    def modified(self, path: str) -> Any:
        return self.fs.modified(self._below(path))

    def ukey(self, path: str) -> Any:
        return self.fs.ukey(self._below(path))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.fs.makedirs(self._below(path), exist_ok)

    def mkdir(self, path: str, create_parents: bool = True, **more: Any) -> None:
        self.fs.mkdir(self._below(path), create_parents, **more)

    def _rm(self, path: str) -> None:
        self.fs.rm_file(self._below(path))

    def cp_file(self, path1: str, path2: str, **more: Any) -> None:
        self.fs.cp_file(self._below(path1), self._below(path2), **more)
