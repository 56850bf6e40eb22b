"""SampleInputs: the files that a sample depends on, with their versions, while it is made.

Python tells its audit hooks of each `open`, however it is spelled, and of each listing of a folder,
in every thread. `interception/intercept` adds what they are not told of: `os.stat`, and the
libraries in C that it knows. An open that was seen but not identified leaves a doubt: the sample is
not kept.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from stat import S_ISDIR, S_ISREG
from typing import TYPE_CHECKING, Any

from creel.cache.storage.uris import is_local
from creel.cache.storage.version import CHANGING, MISSING, UNKNOWN, of_stat
from creel.loader.data.reading.read_counts import PartialRead, ThreadReads, os_stat
from creel.loader.data.reading.this_thread import AT_CWD, Asked, ReadRecord, this_thread
from creel.system.forks import at_fork

if TYPE_CHECKING:
    from creel.cache.storage.stores.access import Options

#: [path or address, version] of each input; values of MessagePack.
Inputs = Sequence[Sequence[Any]]
#: In place of a version: a folder, whatever is in it.
FOLDER = -3
#: In place of the path of remote files, whose version is the number of loaders that have begun.
REMOTE = ""
#: At the end of a path: the link that lies there, not what it leads to.
ITSELF = "\0"
#: Files in these folders have no versions, and are not data.
_NO_DATA = ("/proc/", "/sys/")
_TMPFILE = getattr(os, "O_TMPFILE", 0)
#: Code that imports modules. Python's `os` and `codecs` are frozen as well, and open any files.
_IMPORTS = "<frozen importlib", "<frozen zipimport"
#: Threads that make no samples: creel's, and those by which torch's workers send. The latter
#: look for a free name of a socket, which is there soon.
_OTHER_THREADS = ("creel-", "QueueFeederThread")

#: The records that are active in this process.
_active: dict[int, SampleInputs] = {}


class SampleInputs:
    """Inside the `with`, what this thread (and threads without a record) reads for a sample.

    It is a `ReadRecord`, and passes on all that it is told to the record of an outer dataset.
    """

    def __init__(self) -> None:
        #: Why it is not known what the sample depends on; "" if it is.
        self.doubt = ""
        self.thread = ThreadReads()
        self._outer: ReadRecord | None = None
        self._versions: dict[str, int] = {}  # before the read, by path as it was given
        self._served: list[str] = []  # files whose bytes may have come from the cache
        self._own: set[str] = set()  # files and folders that the sample itself made
        self._remote = False

    def __enter__(self) -> SampleInputs:
        _hear()
        self._outer, this_thread.observed = this_thread.observed, self
        _active[id(self)] = self
        return self

    def __exit__(self, *_: object) -> None:
        this_thread.observed = self._outer
        _active.pop(id(self), None)
        self.thread.close()

    # --- what is read -----------------------------------------------------------------------------

    def add(self, asked: Asked) -> None:
        if isinstance(asked, str):
            self._note_served(asked)
        elif len(asked) == 2:
            self.doubt = "it reads records or tars, whose files are not checked here"
        if self._outer is not None:
            self._outer.add(asked)

    def add_address(self, address: str, options: Options) -> None:
        self._note_served(address)
        if self._outer is not None:
            self._outer.add_address(address, options)

    def _note_served(self, address: str) -> None:
        if is_local(address):
            self._served.append(address)
        else:
            self._remote = True

    @property
    def sample(self) -> int:
        return 0 if self._outer is None else self._outer.sample

    def opened(
        self, path: str, status: os.stat_result, now_ns: int, *, again: bool = False
    ) -> PartialRead | None:
        outer = self._outer
        return None if outer is None else outer.opened(path, status, now_ns, again=again)

    def opened_remote(
        self, address: str, nbytes: int, options: Options, *, again: bool
    ) -> PartialRead | None:
        self._remote, outer = True, self._outer
        return None if outer is None else outer.opened_remote(address, nbytes, options, again=again)

    def waited(self, took: int) -> bool:
        return self._outer is not None and self._outer.waited(took)

    def opens(self, path: Any) -> None:
        name = self._noted(path)
        if name is not None:
            version, mode = _version(name)
            if mode and not (S_ISREG(mode) or S_ISDIR(mode)):
                self.doubt = f"it opened {name}, which is not a file"
            self._versions[name] = version
        if self._outer is not None:
            self._outer.opens(path)

    def opens_in_c(self, path: Any) -> None:
        if not isinstance(path, (str, bytes, os.PathLike)):
            if not hasattr(path, "read"):
                self.doubt = f"a library in C opened {path!r}"
        elif "://" in os.fsdecode(path):
            self._remote = True
        else:
            self.opens(path)
            if S_ISDIR(_version(os.fsdecode(path))[1]):
                self.doubt = f"a library in C reads the folder {os.fsdecode(path)}"
        if self._outer is not None:
            self._outer.opens_in_c(path)

    def looks_for(self, path: Any, folder_fd: int | None, *, follows: bool) -> None:
        if isinstance(path, int):
            return
        name = self._noted(_below(AT_CWD if folder_fd is None else folder_fd, os.fsdecode(path)))
        name = name if name is None or follows else name + ITSELF
        if name is not None and name not in self._versions:
            version, mode = _version(name)
            if follows or not S_ISDIR(mode):
                self._versions[name] = FOLDER if S_ISDIR(mode) else version
        if self._outer is not None:
            self._outer.looks_for(path, folder_fd, follows=follows)

    def writes(self, path: Any) -> None:
        """Note a file or folder that the sample makes anew: what it reads of it is its own."""
        self._own.add(os.fsdecode(path))
        if isinstance(self._outer, SampleInputs):
            self._outer.writes(path)

    def inherit(self, inputs: Inputs, owner: int, number: int) -> None:
        for path, version in inputs:
            if path == REMOTE:
                self._remote = True
            else:
                self._versions.setdefault(path, version)
        if self._outer is not None:
            self._outer.inherit(inputs, owner, number)

    def _noted(self, path: Any) -> str | None:
        """Return the path as text, if it may be an input that is not known yet."""
        name = os.fsdecode(path)
        if name.startswith(_NO_DATA) or name == os.devnull:
            return None
        if self._versions.get(name, FOLDER) != FOLDER:
            return None
        own = any(name == folder or name.startswith(f"{folder}/") for folder in self._own)
        return None if own else name

    # --- and what is known of it afterwards -----------------------------------------------------

    @property
    def versions(self) -> dict[str, int]:
        """What the sample has read so far, with versions; UNKNOWN where another process read it."""
        elsewhere = [*self._served, REMOTE] if self._remote else self._served
        return dict.fromkeys(elsewhere, UNKNOWN) | self._versions

    def known(self, loaders: int, made_ns: int, held: Mapping[str, int]) -> Inputs | None:
        """Return the inputs of the finished sample; None if one may have changed meanwhile.

        Args:
            loaders: the version of remote files.
            made_ns: a time (`time.time_ns`) before the daemon has read any of the files.
            held: what it depends on besides what it has read, as in `versions`.
        """
        inputs: list[list[Any]] = []
        for path, version in {**held, **self.versions}.items():
            if path == REMOTE:
                inputs.append([REMOTE, loaders])
            elif version == UNKNOWN:  # the daemon has read it at some time since then
                inputs.append([path, _version(path, made_ns)[0]])
            else:
                inputs.append([path, version])
        return inputs if are_current(inputs, loaders) else None


def are_current(inputs: Inputs, loaders: int) -> bool:
    """Whether all inputs have the versions that they had."""
    for path, version in inputs:
        if path == REMOTE:
            same = version == loaders
        else:
            now, mode = _version(path)
            same = S_ISDIR(mode) if version == FOLDER else now == version and version != CHANGING
        if not same:
            return False
    return True


def _version(path: str, before_ns: int | None = None) -> tuple[int, int]:
    """Return the version and the mode of what lies at a path; (MISSING, 0) for nothing."""
    now_ns, link = time.time_ns(), path.removesuffix(ITSELF)
    try:
        status = os_stat(link, follow_symlinks=link is path)
    except (OSError, ValueError):
        return MISSING, 0
    return of_stat(status, now_ns if before_ns is None else min(now_ns, before_ns)), status.st_mode


# --- what Python tells --------------------------------------------------------------------------


def _opened(records: list[SampleInputs], path: Any, mode: str | None, flags: int) -> None:
    """`open`, `io.FileIO` (with a mode) and `os.open` (without)."""
    if isinstance(path, int):
        path = _path_of(path)
        if path is None:
            return
    elif mode is None and os.fsdecode(path)[:1] != "/":
        path = _below(this_thread.folder_fd, os.fsdecode(path))
    reads = flags & os.O_ACCMODE != os.O_WRONLY if mode is None else set(mode) & set("r+")
    anew = flags & (os.O_TRUNC | os.O_EXCL) if mode is None else set(mode) & set("wx")
    for record in records:
        if _TMPFILE and flags & _TMPFILE == _TMPFILE:
            continue
        if anew:
            _written([record], path)
        elif reads:
            record.opens(path)


def _listed(records: list[SampleInputs], path: Any = None, *_: Any) -> None:
    """A folder's names, or attributes of a file."""
    if isinstance(path, int):
        path = _path_of(path)
        if path is None:
            return
    for record in records:
        record.opens("." if path is None else path)


def _named_anew(records: list[SampleInputs], source: Any, _: Any, *folders: int) -> None:
    """`os.link` and `os.rename`: what is read by the new name was there by the old one."""
    if any(folder >= 0 for folder in folders):
        raise ValueError("a path in an unknown folder")
    for record in records:
        record.opens(source)


def _symlinked(records: list[SampleInputs], source: Any, target: Any, folder: int) -> None:
    place = os.path.dirname(os.fsdecode(target))  # noqa: PTH120  a string
    _named_anew(records, os.path.join(place, os.fsdecode(source)), "", folder)  # noqa: PTH118


def _written(records: list[SampleInputs], path: Any, *_: Any) -> None:
    """A file or folder that is made anew: by another thread, it is none of the sample's own."""
    if _of_this_thread(records):
        records[0].writes(path)


def _database(records: list[SampleInputs], path: Any, *_: Any) -> None:
    name = os.fsdecode(path)
    if name.startswith("file:"):
        raise ValueError("an address")
    for record in records:
        record.opens(name)
        record.opens(f"{name}-wal")


def _program(records: list[SampleInputs], *_: Any) -> None:
    for record in records:
        record.doubt = "a program runs meanwhile, whose files are not seen"


def _forked(records: list[SampleInputs], *_: Any) -> None:
    """Only by the sample's own thread: others start workers of loaders."""
    if _of_this_thread(records):
        _program(records)


def _of_this_thread(records: list[SampleInputs]) -> bool:
    return len(records) == 1 and records[0] is this_thread.observed


_EVENTS: dict[str, Callable[..., None]] = {
    "open": _opened,
    "os.listdir": _listed,
    "os.scandir": _listed,
    "os.getxattr": _listed,
    "os.listxattr": _listed,
    "os.mkdir": _written,
    "os.link": _named_anew,
    "os.rename": _named_anew,
    "os.symlink": _symlinked,
    "sqlite3.connect": _database,
    **dict.fromkeys(("subprocess.Popen", "os.posix_spawn", "os.system"), _program),
    "os.fork": _forked,
}


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _active or event not in _EVENTS:
        return
    observed = this_thread.observed
    records = [observed] if isinstance(observed, SampleInputs) else _without_record()
    try:
        if not sys._getframe(1).f_code.co_filename.startswith(_IMPORTS):  # noqa: SLF001  no other way
            _EVENTS[event](records, *args)
    except Exception:  # noqa: BLE001  the person's own call must go on
        for record in records:
            record.doubt = f"it opened {args[0]!r}, which is not known to be a file"


def _without_record() -> list[SampleInputs]:
    """Return the records that may be concerned by what a thread does that has none of its own."""
    mine = _active and threading.current_thread().name.startswith(_OTHER_THREADS)
    return [] if mine else list(_active.values())


def records() -> Sequence[ReadRecord]:
    """Return the records of what this thread reads outside of creel's own code."""
    if this_thread.observed is None:
        return _without_record()
    return [this_thread.observed] if this_thread.intercepts else []


def _path_of(fd: int) -> str | None:
    """Return the path of an open file or folder; None if it is neither, or has no name any more.

    Raises:
        OSError: another file lies there now.
    """
    status = os.fstat(fd)
    if not (S_ISREG(status.st_mode) or S_ISDIR(status.st_mode)) or not status.st_nlink:
        return None
    path = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115  cheap: called for each open
    if not os.path.samestat(status, os_stat(path)):
        raise OSError("the file has moved")
    return path


def _below(folder_fd: int | None, path: str) -> str:
    """Return a path that is relative to an open folder.

    Raises:
        ValueError: that folder is not known.
    """
    if folder_fd == AT_CWD or path[:1] == "/":
        return path
    if folder_fd is None:
        raise ValueError("a path in an unknown folder")
    return f"{os.readlink(f'/proc/self/fd/{folder_fd}')}/{path}"  # noqa: PTH115  as above


_hears = False


def _hear() -> None:
    """Add the hook, which cannot be removed; it does nothing while no record is active."""
    global _hears  # noqa: PLW0603  one for each process
    if not _hears:
        _hears = True
        sys.addaudithook(_audit)


at_fork(after_in_child=_active.clear)
