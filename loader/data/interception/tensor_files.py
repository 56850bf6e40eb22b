"""safetensors.safe_open of a file that the cache serves; the library itself maps a path, in Rust.

A tensor becomes a file of its own in memory, which the library reads: the header says where it
lies. Slices of large ones, and several tensors at once, it takes from the real file, as without
creel.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from functools import wraps
from typing import Any

from creel.cache.memory.memfd import sealed_file
from creel.loader.data.files.file_objects import memory_file
from creel.loader.data.interception.libraries import file_of

Call = Callable[..., Any]
_LENGTH = struct.Struct("<Q")
_AROUND_NBYTES = 128 << 10
#: A larger tensor is not read whole for a slice of it.
_SLICED_NBYTES = 1 << 20


def safe_open(original: Call) -> Call:
    """Replace safetensors.safe_open, where Python looks it up by this name."""

    @wraps(original)
    def opening(filename: Any, *args: Any, **more: Any) -> Any:
        def library(path: Any) -> Any:
            return original(path, *args, **more)

        file = file_of(filename)
        if file is None:
            return library(filename)
        try:
            return TensorFile(library, file, filename)
        except Exception:  # noqa: BLE001  the library then says what is wrong with the file
            file.close()
            return library(filename)

    return opening


class TensorFile:
    """What `safe_open` returns; all that is not here is the library's."""

    def __init__(self, library: Call, file: Any, path: Any) -> None:
        """`file`: the file at `path`, which `library` would open."""
        self._library, self._file, self._path = library, file, path
        self._mapped: Any = None  # the real file, once it is needed
        self._first = b""
        nbytes = file.seek(0, os.SEEK_END)
        #: What a page fault on the header would read, in one read.
        self._first = self._read(0, min(nbytes, _AROUND_NBYTES))
        (length,) = _LENGTH.unpack_from(self._first)
        head = self._read(_LENGTH.size, _LENGTH.size + length)
        self._at = {k: v for k, v in json.loads(head).items() if k != "__metadata__"}
        self._begin = _LENGTH.size + length

        def write(memory: Any) -> None:
            memory.write(_LENGTH.pack(length) + head)
            memory.truncate(nbytes)

        self._header = self._open(sealed_file("creel-tensors", write))  # a hole has the rest

    def _read(self, start: int, stop: int) -> bytes:
        if stop <= len(self._first):
            return self._first[start:stop]
        self._file.seek(start)
        data: bytes = self._file.read(stop - start)
        return data

    def _open(self, fd: int) -> Any:
        try:
            return self._library(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)

    def get_tensor(self, name: str) -> Any:
        if name not in self._at:
            return self._header.get_tensor(name)  # raises
        return self._alone(name).get_tensor(name)

    def _alone(self, name: str) -> Any:
        """Return a file in memory that has just this tensor."""
        about = self._at[name]
        start, stop = about["data_offsets"]
        data = self._read(self._begin + start, self._begin + stop)
        head = json.dumps({name: {**about, "data_offsets": [0, len(data)]}}).encode()
        head += b" " * (-len(head) % _LENGTH.size)
        return self._open(memory_file(_LENGTH.pack(len(head)) + head + data))

    def _real(self) -> Any:
        if self._mapped is None:
            self._mapped = self._library(self._path)
        return self._mapped

    def get_slice(self, name: str) -> Any:
        start, stop = self._at.get(name, {}).get("data_offsets", (0, _SLICED_NBYTES + 1))
        small = stop - start <= _SLICED_NBYTES
        return (self._alone(name) if small else self._real()).get_slice(name)

    def get_tensors(self, *args: Any, **more: Any) -> Any:
        return self._real().get_tensors(*args, **more)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # not made yet
            raise AttributeError(name)
        return getattr(self._header, name)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *error: object) -> None:
        for opened in (self._header, self._mapped):
            if opened is not None:
                opened.__exit__(*error)
        self._file.close()
