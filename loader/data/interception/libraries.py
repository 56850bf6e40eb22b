"""Replacements for functions of libraries that open files in C, where `open` does not see them.

While a user's dataset is read, each replacement gives the library the bytes of a cached file, in a
form that the library accepts as a file. For other files it calls the original.
"""

from __future__ import annotations

import itertools
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, TypeVar

from creel.loader.data.reading.file_objects import memory_file, read_by_methods
from creel.loader.data.reading.lease import Buffer
from creel.loader.data.reading.observer import announce, copy_at, timed
from creel.loader.data.reading.opened import (
    Look,
    local_address,
    look,
    open_for_library,
    opened_part,
)
from creel.loader.data.reading.this_thread import this_thread

Call = Callable[..., Any]
T = TypeVar("T")


def announced(original: Call) -> Call:
    """Replace a function that maps the file in its first argument, such as torch.from_file."""

    @wraps(original)
    def opening(*args: Any, **more: Any) -> Any:
        announce(args[0] if args else more.get("filename"))
        return original(*args, **more)

    return opening


def torchvision_read_file(original: Call) -> Call:
    """Replace torchvision.io.read_file, which read_image and decode_image call too."""
    import torch

    @wraps(original)
    def read_file(path: Any) -> Any:
        announce(path)
        address = local_address(path) if this_thread.intercepts else None
        data = None if address is None else copy_at(address, bytearray)
        if data:
            return torch.frombuffer(data, dtype=torch.uint8)
        found = original(path)
        if address is not None:
            read_whole(address)
        return found

    return read_file


def reads_whole(original: Call) -> Call:
    """Replace a function that reads all of the file in its first argument, such as cv2.imread."""

    @wraps(original)
    def reading(*args: Any, **more: Any) -> Any:
        announce(args[0] if args else more.get("filename"))
        address = local_address(args[0]) if args and this_thread.intercepts else None
        if address is None:
            return original(*args, **more)
        data = copy_at(address, bytes)
        if data is not None:
            with _real_path(data, args[0]) as held:
                return original(held, *args[1:], **more)
        found = original(*args, **more)
        read_whole(address)
        return found

    return reading


def numpy_isfileobj(original: Call) -> Call:
    """Replace the function by which numpy.load and numpy.save ask whether to use a descriptor."""
    return wraps(original)(lambda file: not read_by_methods(file) and original(file))


def maps(original: Call) -> Call:
    """Replace pyarrow.memory_map. How much of the file is read is unknown."""

    @wraps(original)
    def mapping(path: Any, mode: str = "r") -> Any:
        announce(path)
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
    """Replace pyarrow.parquet.read_table or ParquetFile; argument number `at` is the path."""
    import pyarrow as pa

    @wraps(original)
    def reading(*args: Any, **more: Any) -> Any:
        announce(args[at] if len(args) > at else more.get("source"))
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
        file = open_for_library(address)  # it counts the bytes read
        if not at:
            with file:
                return original(file, **more)
        weakref.finalize(args[0], file.close).atexit = False  # as a file of pyarrow's own is
        return original(*args[:at], file, **more)

    return reading


#: Ends the path in the name of an HDF5 file in memory (see `hdf5`).
_IN_MEMORY = "\1creel"
#: HDF5 refuses a name under which it could open a file, so names are longer than any path.
_LONGER = 4200
_images = itertools.count()


def hdf5(original: Call) -> Call:
    """Replace h5py.File.__init__ for a path that is opened for reading without other options.

    The file is an image in HDF5's memory. Its name begins with the path, because HDF5 looks for
    linked files and virtual datasets in the folder of that path. The rest of the name makes it
    differ from the file on disk and from every other image.
    """

    @wraps(original)
    def opening(self: Any, name: Any, *args: Any, **more: Any) -> None:
        if isinstance(name, (str, bytes, os.PathLike)):  # else the file is open: h5py wraps its id
            announce(name)
        address = local_address(name) if this_thread.intercepts else None
        reads = (args[0] if args else more.get("mode", "r")) == "r"
        if address is None or not reads or len(args) + len(more) > 1 or more.keys() - {"mode"}:
            original(self, name, *args, **more)
            return
        access = copy_at(address, _image)
        image = None if access is None else _opened(access, name)
        if image is not None:
            original(self, image)
            return
        found = look(address)
        _, waited_ns = timed(lambda: original(self, name, *args, **more))
        read_in_c(found, address, waited_ns=waited_ns)

    return opening


def _image(data: Buffer) -> Any:
    """Return HDF5 access properties that open a copy of these bytes; None on failure.

    A memfd would not do: it has no path that HDF5 accepts.
    """
    h5py = sys.modules["h5py"]
    with suppress(Exception):  # reading the file itself then shows the error
        access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
        access.set_libver_bounds(h5py.h5f.LIBVER_EARLIEST, h5py.h5f.LIBVER_LATEST)
        access.set_fapl_core(backing_store=False)
        access.set_file_image(data)
        return access
    return None


def _opened(access: Any, path: Any) -> Any:
    """Open the bytes of an `_image` in HDF5; None if they are no HDF5 file."""
    h5py = sys.modules["h5py"]
    name = f"{os.fsdecode(path)}{_IN_MEMORY}{next(_images)}".ljust(_LONGER, "\1")
    with suppress(Exception):  # reading the file itself then shows the error
        return h5py.h5f.open(os.fsencode(name), h5py.h5f.ACC_RDONLY, fapl=access)
    return None


def hdf5_name(original: Any) -> property:
    """Replace h5py.File.filename."""
    return property(lambda self: original.fget(self).partition(_IN_MEMORY)[0])


@contextmanager
def _real_path(data: bytes, path: Any) -> Iterator[Any]:
    """Yield a path under which this process can open the bytes, inside the `with` only.

    Without memory for another copy, yields `path`.
    """
    fd = -1
    with suppress(OSError):
        fd = memory_file(data)
    try:
        yield path if fd < 0 else f"/proc/self/fd/{fd}"
    finally:
        if fd >= 0:
            os.close(fd)


# --- records of files that C code reads -----------------------------------------------------------


def read_in_c(found: Look | None, address: str, *, waited_ns: int) -> None:
    """Record a file that was opened, but is not read through a Python file object.

    Args:
        found: the result of `look` for the file.
        waited_ns: how long the storage made the thread wait. If it did not, only a small file is
            worth caching: the library spends more on a copy of a large one than on the page cache.
    """
    part, observed = opened_part(found, address, waited_ns), this_thread.observed
    if part is not None and observed is not None and waited_ns:
        part.count_thread(observed.thread)


def read_whole(address: str) -> None:
    """Record that C code has read a whole file."""
    if this_thread.observed is not None:
        this_thread.observed.add(address)
