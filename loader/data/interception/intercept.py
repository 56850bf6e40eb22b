"""Serve files from the cache that a user's dataset opens itself.

While a thread reads samples below `creel.wrap`, the functions of `_NAMES` are replaced in their
modules. A file opened for reading then becomes what `creel.open` would return: a copy in memory if
this thread's lease covers the file, a file that asks for its blocks at each read, or the file that
the original function opens. Every other call gets the original function, and so does every other
thread, unless a library has started it in a worker that reads one sample (`only_sample`). The
originals are put back once no thread reads samples any more.

Only names that Python looks up at each use can be replaced. Of libraries in C that open files
themselves, the functions that `libraries` knows are replaced.
"""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec, SourceFileLoader
from stat import S_ISREG
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any, TypeVar

from torch.utils.data import get_worker_info

from creel.cache.storage.stores.store import read_ahead
from creel.loader.data.files.file_objects import in_memory, memory_file
from creel.loader.data.files.opened import (
    NO_FILES,
    SMALL,
    dated_stat,
    local_address,
    observed_file,
    open_in_blocks,
)
from creel.loader.data.interception import libraries, tensor_files
from creel.loader.data.reading.inputs import records
from creel.loader.data.reading.observer import (
    Intercepting,
    copy_at,
    open_source,
    passes_on,
    timed,
)
from creel.loader.data.reading.this_thread import (
    AT_CWD,
    only_sample,
    reads_for_nobody,
    this_thread,
)
from creel.system.forks import at_fork

if TYPE_CHECKING:
    from creel.loader.data.reading.lease import Lease
    from creel.loader.data.reading.this_thread import ReadRecord

T = TypeVar("T")

_READING = frozenset({"r", "rb", "rt", "br", "tr"})
#: Flags of os.open that do not change which bytes are read.
_READ_FLAGS = os.O_RDONLY | sum(
    getattr(os, name, 0) for name in ("O_CLOEXEC", "O_DIRECT", "O_NOATIME", "O_NOCTTY")
)
_PYTHONS = io.BufferedReader, io.FileIO


# --- Python's own -------------------------------------------------------------------------------


def _open_over(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `original`, builtins.open, for files that may be in the cache."""

    @wraps(original)
    def opening(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        thread = this_thread
        if not thread.intercepts:
            args = file, mode, buffering, encoding, errors, newline, closefd, opener
            sample = only_sample() if reads_for_nobody() and get_worker_info() else None
            return original(*args) if sample is None else sample.copy().run(opening, *args)
        if (
            mode == "rb"
            and thread.observed is not None
            and (thread.lease is None or not thread.lease.serves)
            and buffering == -1
            and encoding is errors is newline is opener is None
            and closefd
        ):
            return _open_recorded(original, file, thread.observed, thread.lease)
        more = mode, buffering, encoding, errors, newline
        if mode in _READING and passes_on():
            return open_source(original, file, *more, closefd, opener)
        address = local_address(file)
        if address is None or opener is not None or not closefd:
            return original(file, *more, closefd, opener)
        if mode in _READING and "b" in mode:
            if buffering != 1 and encoding is errors is newline is None:
                return _binary(original, address, file, buffering)
        elif mode in _READING and buffering == -1:
            return _text(original, address, file, mode, encoding, errors, newline)
        return original(file, *more)  # unusual arguments are left to Python

    return opening


def _open_recorded(
    original: Callable[..., Any], path: Any, observed: ReadRecord, lease: Lease | None
) -> Any:
    """`open(path, "rb")` while reads are recorded and nothing is served, as in a first epoch.

    It runs before each read from a disk, with cold processor caches. So the usual case, a small
    file, is handled here in one function, although `open_source` and `observed_file` do the same
    (`benchmarks/many_files.py --raw`).
    """
    address = local_address(path)
    if address is None:
        return original(path, "rb")
    began = time.time_ns()
    real = original(path, "rb")
    took = time.time_ns() - began
    if lease is not None:
        lease.direct_reads += 1
        lease.direct_ns += took
    if type(real) is not io.BufferedReader:  # the result of another library's `open` is left alone
        return real
    fd = real.fileno()
    status = os.fstat(fd)
    if (
        not 0 < status.st_size <= SMALL
        or not S_ISREG(status.st_mode)
        or address.startswith(NO_FILES)
    ):
        return observed_file(real, address)
    read_ahead(fd, SMALL, status.st_dev)  # the kernel reads while this is recorded
    this_thread.latest = address
    observed.opened(address, status, began)
    return real


def _binary(original: Callable[..., Any], address: str, file: Any, buffering: int) -> Any:
    data = copy_at(address, bytes)
    if data is not None:
        raw = in_memory(data, os.fspath(file))
        if buffering == 0:
            return raw
        return io.BufferedReader(raw, io.DEFAULT_BUFFER_SIZE if buffering < 0 else buffering)
    opened = open_in_blocks(address, file, buffering)
    if opened is not None:
        return opened
    real = open_source(original, file, "rb", buffering)
    if type(real) not in _PYTHONS:  # the result of another library's `open` is left alone
        return real
    return observed_file(real, address, buffering=buffering)


def _text(original: Callable[..., Any], address: str, file: Any, mode: str, *more: Any) -> Any:
    data = copy_at(address, bytes)
    binary: Any = open_in_blocks(address, file) if data is None else None
    if data is not None:
        binary = io.BufferedReader(in_memory(data, os.fspath(file)))
    elif binary is None:
        real = open_source(original, file, mode, -1, *more)
        if not isinstance(real, io.TextIOWrapper) or this_thread.observed is None:
            return real
        binary = observed_file(real.detach(), address)
    text = io.TextIOWrapper(binary, *more)
    text.mode = mode  # type: ignore[misc]  # as Python does
    return text


def _openers_over(original: dict[Any, Any]) -> dict[Any, Any]:
    """Replace nibabel's table of functions that open files, by suffix; None is for any other."""
    opening, *others = original[None]
    return {**original, None: (_open_over(opening), *others)}


def _os_open_over(original: Callable[..., int]) -> Callable[..., int]:
    """Replace `original`, os.open, for files that may be in the cache."""

    @wraps(original)
    def opening(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        this_thread.folder_fd = AT_CWD if dir_fd is None else dir_fd
        try:
            return opened(path, flags, mode, dir_fd)
        finally:
            this_thread.folder_fd = None

    def opened(path: Any, flags: int, mode: int, dir_fd: int | None) -> int:
        address = local_address(path) if this_thread.intercepts and dir_fd is None else None
        if address is None:
            return original(path, flags, mode, dir_fd=dir_fd)
        if not flags & ~_READ_FLAGS:
            data = copy_at(address, bytes)
            if data is not None:
                with suppress(OSError):  # no memory for the copy
                    return memory_file(data)
            fd, waited_ns = timed(lambda: open_source(original, path, flags, mode))
            libraries.read_in_c(dated_stat(fd), address, waited_ns=waited_ns)
            return fd
        return original(path, flags, mode)

    return opening


def _stat_over(original: Callable[..., T], *, follows: bool = True) -> Callable[..., T]:
    """Replace `original`, which asks whether a path exists, so that the question is recorded."""

    @wraps(original)
    def asking(path: Any, *args: Any, **more: Any) -> T:
        for record in records():
            with suppress(Exception):  # the original then raises what is wrong
                links = more.get("follow_symlinks", True) and follows
                record.looks_for(path, more.get("dir_fd"), follows=links)
        return original(path, *args, **more)

    known = os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks
    for functions in (*known, os.supports_effective_ids):
        if original in functions:  # where `shutil` looks up what it may pass
            functions.add(asking)
    return asking


def _lstat_over(original: Callable[..., T]) -> Callable[..., T]:
    return _stat_over(original, follows=False)


def _static(over: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Adapt `over` to a function that is looked up in a class."""
    return lambda original: staticmethod(over(original))


# --- replacement of the originals ---------------------------------------------------------------

#: Names of Python's own functions that open files.
_OPENS = frozenset({"open", "bltn_open", "_builtin_open"})

#: (module, name in it, maker of the replacement). Modules that are not imported are skipped.
_NAMES: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    ("builtins", "open", _open_over),
    ("io", "open", _open_over),
    ("os", "open", _os_open_over),
    ("os", "stat", _stat_over),
    ("os", "lstat", _lstat_over),
    ("os", "access", _stat_over),
    ("os", "readlink", _lstat_over),
    ("tarfile", "bltn_open", _open_over),
    ("bz2", "_builtin_open", _open_over),
    ("pathlib", "_NormalAccessor.open", _static(_open_over)),  # of Python 3.10
    ("pathlib", "_NormalAccessor.stat", _static(_stat_over)),
    ("numpy", "fromfile", libraries.numpy_fromfile),
    ("numpy.lib.format", "isfileobj", libraries.numpy_isfileobj),
    ("numpy.lib._format_impl", "isfileobj", libraries.numpy_isfileobj),  # from numpy 2.3 on
    ("cv2", "imread", libraries.reads_whole),
    ("torch", "from_file", libraries.announced),
    ("torchvision.io", "read_file", libraries.torchvision_read_file),
    ("torchvision.io.image", "read_file", libraries.torchvision_read_file),
    ("pyarrow", "memory_map", libraries.maps),
    ("pyarrow.parquet", "read_table", lambda original: libraries.parquet(original, 0)),
    ("pyarrow.parquet", "ParquetFile.__init__", lambda original: libraries.parquet(original, 1)),
    ("av", "open", libraries.takes_file),
    ("decord", "VideoReader.__init__", libraries.decord_reader),
    ("soundfile", "SoundFile.__init__", partial(libraries.takes_file, path_as="_name")),
    ("safetensors.torch", "load_file", libraries.loads_bytes),
    ("safetensors.numpy", "load_file", libraries.loads_bytes),
    ("safetensors", "safe_open", tensor_files.safe_open),
    ("pyarrow.dataset", "dataset", libraries.arrow_dataset),
    ("nibabel.openers", "Opener.compress_ext_map", _openers_over),
    ("nibabel.openers", "ImageOpener.compress_ext_map", _openers_over),
    ("nibabel.arrayproxy", "array_from_file", libraries.without_mapping),
    ("h5py", "File.__init__", libraries.hdf5),
    ("h5py", "File.filename", libraries.hdf5_name),
)


_MODULES = tuple(dict.fromkeys(module for module, _, _ in _NAMES))


class Intercepted(Intercepting):
    """Inside the `with`, this thread runs code of a user's dataset.

    Where that is for a sample of a batch, the names stay replaced until the batch is read.
    """

    def __enter__(self) -> None:
        super().__enter__()
        lease = this_thread.lease
        self._lease = None if lease is None or lease.ended else lease
        if not self._outer:
            _replacements.enter(self._lease)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if not self._outer and self._lease is None:
            _replacements.leave()


class _Name:
    """One of `_NAMES` whose module is imported."""

    def __init__(self, owner: Any, name: str, over: Callable[[Any], Any]) -> None:
        self._owner, self._name, self._over = owner, name, over
        self._original: Any = None
        self._replacement: Any = None

    def replace(self) -> None:
        now = vars(self._owner).get(self._name)
        if now is not self._original:
            if now is None or any(now is ours for ours in _wrappers.values()):
                return  # the module bound our replacement, which passes on all other calls
            if not self._may_replace(now):
                return
            self._original = now
            key = self._over, id(now)
            self._replacement = _wrappers.get(key) or _wrappers.setdefault(key, self._over(now))
        if now is not None:
            setattr(self._owner, self._name, self._replacement)

    def _may_replace(self, now: Any) -> bool:
        """Whether `now` opens what it is told to: not a mock, nor an `open` of another library.

        Another library's `open` may read another file than the one named, or take fewer arguments.
        """
        if self._name in _OPENS:
            return isinstance(now, BuiltinFunctionType)
        return isinstance(getattr(now, "__name__", ""), str)  # a mock has no name

    def restore(self) -> None:
        if vars(self._owner).get(self._name) is self._replacement:  # else other code replaced ours
            setattr(self._owner, self._name, self._original)


class _Imports(MetaPathFinder):
    """Replaces the names of a library as soon as a sample has imported it."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name not in _MODULES:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((candidate for candidate in specs if candidate is not None), None)
        loader: Any = None if spec is None else spec.loader
        if isinstance(loader, (SourceFileLoader, ExtensionFileLoader)):
            loader.exec_module = partial(self._exec, loader.exec_module)  # type: ignore[method-assign]
        return spec

    def _exec(self, original: Callable[[Any], None], module: Any) -> None:
        original(module)
        # Those of its names that were not there yet while it imported another such module.
        _replacements.replace_imported(anew=True)


_imports = _Imports()

#: Replacements by (maker, id of the original, which stays referenced). Few; kept for good.
_wrappers: dict[tuple[Any, int], Any] = {}


class _Replacements:
    """The replaced names of this process: all of them while any thread is inside, else none."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, str], _Name] = {}  # by (id of the owner, name)
        self._modules: list[Any] = []  # values of sys.modules at the last look
        self._imported = 0  # number of imported modules at the last look
        self.reset_for_process()

    def reset_for_process(self) -> None:
        """Reset in a forked child, where the threads that were inside do not exist."""
        self._lock = threading.Lock()
        self._inside = 0
        self._restore()

    def enter(self, lease: Lease | None) -> None:
        """Come inside; with a lease, once for all until it ends, as this takes 12 us."""
        if lease is not None and lease.at_end is not None:
            return
        with self._lock:
            if lease is not None:
                if lease.at_end is not None:  # another thread of the sample was first
                    return
                lease.at_end = self.leave
            self._inside += 1
            if self._inside == 1:
                sys.meta_path.insert(0, _imports)
            self._replace(anew=self._inside == 1)

    def replace_imported(self, *, anew: bool = False) -> None:
        if not anew and len(sys.modules) == self._imported:  # cheap: it runs for each sample
            return
        with self._lock:
            if self._inside:
                self._replace(anew=anew)

    def _replace(self, *, anew: bool) -> None:
        self._imported = len(sys.modules)
        modules = [sys.modules.get(module) for module in _MODULES]
        new = modules != self._modules
        if new:
            self._modules = modules
            for owner, name, over in _importable():
                self._names.setdefault((id(owner), name), _Name(owner, name, over))
        if new or anew:
            for replacement in self._names.values():
                replacement.replace()

    def leave(self) -> None:
        with self._lock:
            self._inside = max(self._inside - 1, 0)  # a child forked inside the `with` began at 0
            if not self._inside:
                self._restore()

    def _restore(self) -> None:
        with suppress(ValueError):
            sys.meta_path.remove(_imports)
        for replacement in self._names.values():
            replacement.restore()


def _importable() -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    """Yield owner, name and replacement maker of each name whose module is imported."""
    for module, path, over in _NAMES:
        owner: Any = sys.modules.get(module)
        *outer, name = path.split(".")
        for step in outer:
            owner = getattr(owner, step, None)
        if owner is not None:
            yield owner, name, over


_replacements = _Replacements()


def replace_imported() -> None:
    """Replace names in modules that were imported since a thread came inside."""
    _replacements.replace_imported()


at_fork(after_in_child=_replacements.reset_for_process)
