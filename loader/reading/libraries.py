"""Libraries that open files in C, unseen by `open`: replacements of their functions in Python.

While a person's dataset is read, each gives the library the bytes of a file that is in the cache,
in a form that it takes for the file; else it calls the original.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any

from creel.loader.reading.lease import Buffer
from creel.loader.reading.observer import copy_at, timed
from creel.loader.reading.opened import (
    local_address,
    look,
    memory_file,
    open_local,
    opened_part,
    read_for_c,
    read_in_c,
    whole_in_c,
)
from creel.loader.reading.this_thread import this_thread

Call = Callable[..., Any]


def torchvision_read_file(original: Call) -> Call:
    """torchvision.io.read_file, which its read_image and decode_image call, too."""
    import torch

    @wraps(original)
    def read_file(path: Any) -> Any:
        address = local_address(path) if this_thread.intercepts else None
        data = None
        if address is not None:
            data = copy_at(address, bytearray) or bytearray(read_for_c(address) or b"")
        if data:
            return torch.frombuffer(data, dtype=torch.uint8)
        return original(path) if address is None else whole_in_c(address, lambda: original(path))

    return read_file


def reads_whole(original: Call) -> Call:
    """A function that reads all of the file at its first argument, as cv2.imread does."""

    @wraps(original)
    def reading(*args: Any, **more: Any) -> Any:
        address = local_address(args[0]) if args and this_thread.intercepts else None
        if address is None:
            return original(*args, **more)
        data = copy_at(address, bytes) or read_for_c(address)
        if data is not None:
            with _real_path(data, args[0]) as held:
                return original(held, *args[1:], **more)
        return whole_in_c(address, lambda: original(*args, **more))

    return reading


def maps(original: Call) -> Call:
    """pyarrow.memory_map; how much of the file is read is not seen."""

    @wraps(original)
    def mapping(path: Any, mode: str = "r") -> Any:
        address = local_address(path) if this_thread.intercepts and mode == "r" else None
        data = None if address is None else copy_at(address, bytes)
        if data is not None:
            with _real_path(data, path) as held:
                return original(held, mode)
        found = None if address is None else look(address)
        mapped = original(path, mode)
        if address is not None:
            opened_part(found, address)
        return mapped

    return mapping


def parquet(original: Call, at: int) -> Call:
    """pyarrow.parquet.read_table and ParquetFile; `at`: which argument is the path."""
    import pyarrow as pa

    @wraps(original)
    def reading(*args: Any, **more: Any) -> Any:
        unusual = more.get("filesystem") is not None or more.get("memory_map")
        plain = len(args) == at + 1 and not unusual
        address = local_address(args[at]) if plain and this_thread.intercepts else None
        if address is None:
            return original(*args, **more)
        data = copy_at(address, bytes)
        if data is not None:
            return original(*args[:at], pa.BufferReader(data), **more)
        if this_thread.observed is None or not os.path.isfile(address):  # noqa: PTH113
            return original(*args, **more)
        return original(*args[:at], open_local(address), **more)  # counts what is read

    return reading


#: Follows the path in the name of an HDF5 file that is in memory (see `hdf5`).
_IN_MEMORY = "\1creel"
#: HDF5 refuses a name under which it can open a file: one longer than any path is none.
_LONGER = 4200
_images = itertools.count()


def hdf5(original: Call) -> Call:
    """h5py.File.__init__, where a path is opened for reading and nothing else is said.

    The file is an image in HDF5's memory. Its name begins with the path, by whose folder HDF5 finds
    the files that links and virtual datasets name; the rest makes it another file than the one on
    disk, and than every other image.
    """

    @wraps(original)
    def opening(self: Any, name: Any, *args: Any, **more: Any) -> None:
        address = local_address(name) if this_thread.intercepts else None
        reads = (args[0] if args else more.get("mode", "r")) == "r"
        if address is None or not reads or len(args) + len(more) > 1 or more.keys() - {"mode"}:
            original(self, name, *args, **more)
            return
        access = copy_at(address, _image)
        if access is None and (data := read_for_c(address)) is not None:
            access = _image(data)
        image = None if access is None else _opened(access, name)
        if image is not None:
            original(self, image)
            return
        found = look(address)
        _, waited_ns = timed(lambda: original(self, name, *args, **more))
        read_in_c(found, address, waited_ns=waited_ns)

    return opening


def _image(data: Buffer) -> Any:
    """How HDF5 is to open a copy of these bytes, which it makes here, and another to open it.

    None where it cannot. (A file on a memfd has no path that HDF5 takes.)
    """
    h5py = sys.modules["h5py"]
    with suppress(Exception):  # whatever it is, the file itself shows it
        access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
        access.set_libver_bounds(h5py.h5f.LIBVER_EARLIEST, h5py.h5f.LIBVER_LATEST)
        access.set_fapl_core(backing_store=False)
        access.set_file_image(data)
        return access
    return None


def _opened(access: Any, path: Any) -> Any:
    """The file of HDF5 with the bytes of an `_image`; None where it takes them for no such file."""
    h5py = sys.modules["h5py"]
    name = f"{os.fsdecode(path)}{_IN_MEMORY}{next(_images)}".ljust(_LONGER, "\1")
    with suppress(Exception):  # whatever it is, the file itself shows it
        return h5py.h5f.open(os.fsencode(name), h5py.h5f.ACC_RDONLY, fapl=access)
    return None


def hdf5_name(original: Any) -> property:
    """h5py.File.filename."""
    return property(lambda self: original.fget(self).partition(_IN_MEMORY)[0])


@contextmanager
def _real_path(data: bytes, path: Any) -> Iterator[Any]:
    """A path by which the bytes can be opened, by this process and in the `with` only.

    `path` itself where there is no room for another copy.
    """
    fd = -1
    with suppress(OSError):
        fd = memory_file(data)
    try:
        yield path if fd < 0 else f"/proc/self/fd/{fd}"
    finally:
        if fd >= 0:
            os.close(fd)
