"""Replacements for functions of libraries that open files in C, where `open` does not see them.

While a user's dataset is read, each replacement gives the library the bytes of a cached file, in a
form that the library accepts as a file. For other files it calls the original.
"""

from __future__ import annotations

import io
import itertools
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, wraps
from typing import Any, TypeVar

from creel.loader.data.files.block_files import read_by_methods
from creel.loader.data.files.file_objects import in_memory, memory_file
from creel.loader.data.files.opened import (
    SMALL,
    DatedStat,
    dated_stat,
    local_address,
    open_served,
    opened_part,
)
from creel.loader.data.page_cache import in_page_cache, local
from creel.loader.data.reading.observer import announce, copy_at, passes_on, timed
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
        content = original(path)
        if address is not None:
            read_whole(address)
        return content

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
        content = original(*args, **more)
        read_whole(address)
        return content

    return reading


def numpy_isfileobj(original: Call) -> Call:
    """Replace the function by which numpy.load and numpy.save ask whether to use a descriptor."""
    return wraps(original)(lambda file: not read_by_methods(file) and original(file))


def numpy_fromfile(original: Call) -> Call:
    """Replace numpy.fromfile, which reads by the descriptor of a file, where methods are served."""
    import numpy as np

    @wraps(original)
    def reading(file: Any, *args: Any, **more: Any) -> Any:
        names = dict(zip(("dtype", "count", "sep", "offset"), args, strict=False)) | more
        binary = not names.get("sep") and not names.keys() - {"dtype", "count", "sep", "offset"}
        dtype = np.dtype(names.get("dtype", float)) if binary else np.dtype(object)
        if dtype.hasobject or not dtype.itemsize:
            return original(file, *args, **more)
        given = read_by_methods(file)
        opened = file if given else file_of(file)
        if opened is None:
            return original(file, *args, **more)
        try:
            opened.seek(names.get("offset", 0), os.SEEK_CUR)
            count = names.get("count", -1)
            data = opened.read(count * dtype.itemsize if count >= 0 else -1)
            return np.frombuffer(bytearray(data), dtype, len(data) // dtype.itemsize)
        finally:
            if not given:
                opened.close()

    return reading


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
        stat = None if address is None else dated_stat(address)
        mapped = original(path, mode)
        if address is not None:
            opened_part(stat, address)
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
        file = open_served(address, buffering=1)
        if file is None:
            return original(*args, **more)
        if not at:
            with file:
                return original(file, **more)
        weakref.finalize(args[0], file.close).atexit = False  # as a file of pyarrow's own is
        return original(*args[:at], file, **more)

    return reading


def takes_file(original: Call, path_as: str = "") -> Call:
    """Replace av.open, or soundfile.SoundFile.__init__ (with `self`), which take a file object too.

    path_as: the attribute of `self` that has the path.
    """
    method = bool(path_as)

    @wraps(original)
    def opening(*args: Any, **more: Any) -> Any:
        path, mode = [*args[method:], None, None][:2]
        reads = more.get("mode", mode) in {None, "r"}
        file = file_of(path) if reads and len(args) > method else None
        if file is None:
            return original(*args, **more)
        opened = original(*args[:method], file, *args[method + 1 :], **more)
        if method:
            setattr(args[0], path_as, path)
        return opened

    return opening


def decord_reader(original: Call) -> Call:
    """Replace decord.VideoReader.__init__, which reads a file object whole, and a path in C."""

    @wraps(original)
    def opening(self: Any, uri: Any, *args: Any, **more: Any) -> None:
        announce(uri)
        address = local_address(uri) if this_thread.intercepts else None
        data = None if address is None else copy_at(address, bytes)
        if address is None or data is not None:
            original(self, uri if data is None else io.BytesIO(data), *args, **more)
            return
        stat = dated_stat(address)
        _, waited_ns = timed(lambda: original(self, uri, *args, **more))
        read_in_c(stat, address, waited_ns=waited_ns)

    return opening


def loads_bytes(original: Call) -> Call:
    """Replace load_file of safetensors.torch or safetensors.numpy, which map the file."""
    load = sys.modules[original.__module__].load

    @wraps(original)
    def loading(filename: Any, *args: Any, **more: Any) -> Any:
        file = None if args or more else file_of(filename)
        if file is None:
            return original(filename, *args, **more)
        with file:
            return load(file.read())

    return loading


def arrow_dataset(original: Call) -> Call:
    """Replace pyarrow.dataset.dataset, for a path on storage whose reads are slow."""

    @wraps(original)
    def opening(source: Any, *args: Any, **more: Any) -> Any:
        announce(source)
        address = local_address(source) if this_thread.intercepts and not passes_on() else None
        if address == source and not args and more.get("filesystem") is None:
            with suppress(ImportError):  # of fsspec
                from creel.loader.data.files.chained import CreelFileSystem

                if not local(os.path.dirname(source)):  # noqa: PTH120  text
                    more["filesystem"] = CreelFileSystem()
        return original(source, *args, **more)

    return opening


def without_mapping(original: Call) -> Call:
    """Replace nibabel.arrayproxy.array_from_file, which maps files where it may."""

    @wraps(original)
    def reading(*args: Any, **more: Any) -> Any:
        if this_thread.intercepts and "mmap" in more:
            more["mmap"] = False
        return original(*args, **more)

    return reading


def file_of(path: Any) -> Any:
    """Return a file object for a path that a library would open itself; None to let it do so."""
    announce(path)
    address = local_address(path) if this_thread.intercepts else None
    if address is None:
        return None
    data = copy_at(address, bytes)
    if data is not None:
        return io.BufferedReader(in_memory(data, os.fspath(path)))
    return open_served(address, buffering=1)


#: Ends the path in the name of a served HDF5 file (see `hdf5`).
_IN_MEMORY = "\1creel"
#: HDF5 refuses a name under which it could open a file, so names are longer than any path.
_LONGER = 4200
_opens = itertools.count()
#: Arguments that size the cache of chunks, in HDF5's order, and others that change nothing of how
#: a file is read: `swmr` and `locking` concern writers, whose writes give a file another version.
_CHUNK_CACHE = ("rdcc_nslots", "rdcc_nbytes", "rdcc_w0")
_OF_READING = {"mode", "libver", "swmr", "locking", "track_order", *_CHUNK_CACHE}


def hdf5(original: Call) -> Call:
    """Replace h5py.File.__init__ for a path that is opened for reading with usual options.

    HDF5 reads a served file through a file object (an image in HDF5's own memory takes twice as
    long: 0.9 ms for 150 KB in place of 0.45, 2026-11-28). Its name begins with the path, because
    HDF5 looks for linked files and virtual datasets in the folder of that path. The rest of the
    name makes it differ from the file on disk and from all others.
    """

    @wraps(original)
    def opening(self: Any, name: Any, *args: Any, **more: Any) -> None:
        if isinstance(name, (str, bytes, os.PathLike)):  # else the file is open: h5py wraps its id
            announce(name)
        address = local_address(name) if this_thread.intercepts else None
        reads = (args[0] if args else more.get("mode", "r")) == "r"
        unusual = {key for key, value in more.items() if value is not None} - _OF_READING
        if address is None or not reads or len(args) > 1 or unusual:
            original(self, name, *args, **more)
            return
        data, stat = copy_at(address, bytes), None
        file: Any = None if data is None else io.BytesIO(data)
        if file is None:
            stat = dated_stat(address)
            small = stat is not None and stat[0].st_size <= SMALL
            # HDF5 itself reads a file in the page cache sooner.
            by_itself = small or (stat is not None and in_page_cache([address]))
            file = None if by_itself else open_served(address)
        opened = None if file is None else _opened(file, name, more)
        if opened is not None:
            original(self, opened)
            return
        _, waited_ns = timed(lambda: original(self, name, *args, **more))
        read_in_c(stat, address, waited_ns=waited_ns)

    return opening


def _opened(file: Any, path: Any, options: dict[str, Any]) -> Any:
    """Open a file object in HDF5; None if it is no HDF5 file, or one with such options."""
    h5py = sys.modules["h5py"]
    name = f"{os.fsdecode(path)}{_IN_MEMORY}{next(_opens)}".ljust(_LONGER, "\1")
    with suppress(Exception):  # reading the file itself then shows the error
        access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
        access.set_libver_bounds(h5py.h5f.LIBVER_EARLIEST, h5py.h5f.LIBVER_LATEST)
        first, *sizes = access.get_cache()
        given = [options.get(key) for key in _CHUNK_CACHE]
        access.set_cache(first, *(b if a is None else a for a, b in zip(given, sizes, strict=True)))
        access.set_fileobj_driver(h5py.h5fd.fileobj_driver, file)
        _leave_file_objects()
        return h5py.h5f.open(os.fsencode(name), h5py.h5f.ACC_RDONLY, fapl=access)
    return None


@cache
def _leave_file_objects() -> None:
    """Have HDF5 open what a served file refers to by path, from now on.

    It opens external links, and the sources of virtual datasets, as it has opened the file: it
    would read the same file object. For all other files nothing changes.
    """
    h5py = sys.modules["h5py"]
    shared: Any = next(kind for kind in h5py.Group.__mro__ if "_lapl" in vars(kind))
    link, begin = shared._lapl.fget, h5py.Dataset.__init__  # noqa: SLF001
    driver = h5py.h5fd.fileobj_driver
    access = h5py.h5p.create(h5py.h5p.LINK_ACCESS)
    access.set_elink_fapl(h5py.h5p.create(h5py.h5p.FILE_ACCESS))

    def path_of(handle: Any) -> bytes:
        file = h5py.h5i.get_file_id(handle)
        if file.get_access_plist().get_driver() != driver:
            return b""
        path, ours, _ = h5py.h5f.get_name(file).partition(_IN_MEMORY.encode())
        return path if ours else b""

    def opening(self: Any, bind: Any, *args: Any, **more: Any) -> None:
        plain = not isinstance(bind, h5py.h5d.DatasetID)
        if not plain and bind.get_create_plist().get_layout() == h5py.h5d.VIRTUAL and path_of(bind):
            file = h5py.h5f.open(path_of(bind), h5py.h5f.ACC_RDONLY)
            bind = h5py.h5d.open(file, h5py.h5i.get_name(bind))
        begin(self, bind, *args, **more)

    shared._lapl = property(lambda self: access if path_of(self.id) else link(self))  # noqa: SLF001
    h5py.Dataset.__init__ = wraps(begin)(opening)


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


def read_in_c(stat: DatedStat | None, address: str, *, waited_ns: int) -> None:
    """Record a file that was opened, but is not read through a Python file object.

    Args:
        stat: the result of `dated_stat` for the file.
        waited_ns: how long the storage made the thread wait. If it did not, only a small file is
            worth caching: the library spends more on a copy of a large one than on the page cache.
    """
    part, observed = opened_part(stat, address), this_thread.observed
    if part is not None and observed is not None and waited_ns:
        part.count_thread(observed.thread)


def read_whole(address: str) -> None:
    """Record that C code has read a whole file."""
    if this_thread.observed is not None:
        this_thread.observed.add(address)
