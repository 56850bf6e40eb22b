"""What the kernel says that readers of samples wait for: whether for storage, and for which file.

Nothing of the dataset is replaced, and no call of its costs more: `/proc/PID/task/TID/syscall` says
in which system call a thread sleeps. This process may look at itself and at its workers.
"""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from creel.loader.making.batch_times import IDLE, READING
from creel.system.python_open import python_open, text_of

#: Numbers of system calls whose first argument is a descriptor that they read: read, pread64,
#: readv, preadv, fstat, getdents64, ioctl (by which Python's `open` asks for a terminal).
_READS = {"x86_64": {0, 17, 19, 295, 5, 217, 16}, "aarch64": {63, 67, 65, 69, 80, 61, 29}}
#: Of those that wait for storage by a path, and which argument that is: open, openat, openat2,
#: stat, lstat, newfstatat, statx, access, faccessat.
_BY_PATH = {
    "x86_64": {2: 0, 257: 1, 437: 1, 4: 0, 6: 0, 262: 1, 332: 1, 21: 0, 269: 1},
    "aarch64": {56: 1, 437: 1, 79: 1, 291: 1, 48: 1},
}
#: Of futex, in which a thread waits for another one.
_FUTEX = {"x86_64": 202, "aarch64": 98}
_FAULT = -1  # a page of a mapped file
_OTHER = ("/dev/", "/proc/", "/sys/", "/memfd:")
_CODE = (".py", ".pyc", ".so")
#: Below these no mapped file is a person's data: locales and the like.
_NO_DATA = (*_OTHER, "/usr/", "/lib", "/etc/")
#: Of a path in another process's memory; a longer one is not named.
_MAX_PATH = 4096


class KernelWait(NamedTuple):
    """What a thread waits for at the moment.

    Attributes:
        storage: whether for storage.
        path: for which file; "" where the kernel does not say.
        mapped: whether for a page of a file that is mapped into memory.
    """

    storage: bool
    path: str = ""
    mapped: bool = False


_NOTHING = KernelWait(storage=False)


class Reader(NamedTuple):
    """Who reads samples.

    Attributes:
        pid: its process.
        threads: returns the numbers of its threads that may read samples.
        stage: returns its stage (`batch_times`), and the number of the batch that it makes.
    """

    pid: int
    threads: Callable[[], Sequence[int]]
    stage: Callable[[], tuple[int, int]]

    def waits(self) -> KernelWait:
        """Return what it waits for: for storage if any of its threads does."""
        waits = [awaited(self.pid, thread) for thread in self.threads()]
        waits = [wait for wait in waits if wait.storage]
        return next((wait for wait in waits if wait.path), waits[0] if waits else _NOTHING)

    def runs(self) -> bool:
        """Whether any of its threads uses a processor, or is about to."""
        return not all(_call(self.pid, thread) for thread in self.threads())


def process(pid: int, stage: Callable[[], tuple[int, int]]) -> Reader:
    """Return the reader that is a whole process."""
    return Reader(pid, lambda: _threads(pid), stage)


def this_thread(batch: Callable[[], int | None]) -> Reader:
    """Return the reader that is the present thread, with those that it waits for.

    batch: returns the number of the batch that it makes; None: it makes none.
    """
    pid, own = os.getpid(), threading.get_native_id()

    def threads() -> Sequence[int]:
        call = _call(pid, own)
        waits_for_others = bool(call) and call[0] == _FUTEX.get(platform.machine())
        return _threads(pid) if waits_for_others else [own]

    def stage() -> tuple[int, int]:
        number = batch()
        return (IDLE, -1) if number is None else (READING, number)

    return Reader(pid, threads, stage)


def awaited(pid: int, thread: int) -> KernelWait:
    """Return what a thread waits for; nothing if it is not for storage, or we may not look."""
    try:
        call, machine = _call(pid, thread), platform.machine()
        if not call:
            return _NOTHING
        if call[0] == _FAULT:
            return KernelWait(storage=True, path=_mapped_file(pid), mapped=True)
        if call[0] in _READS.get(machine, ()):
            return _of_file(_link(pid, f"fd/{call[1]}"))
        argument = _BY_PATH.get(machine, {}).get(call[0])
        if argument is None:
            return _NOTHING
        at = call[1] if argument else None
        wait = _of_file(_absolute(pid, _text(pid, call[1 + argument]), at), opens=True)
        # The call may have ended before its path was read: the memory is another's then.
        return wait if _call(pid, thread) == call else _NOTHING
    except (OSError, ValueError, IndexError):  # it has ended, or we may not look
        return _NOTHING


def _threads(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]  # noqa: PTH208
    return []


def _call(pid: int, thread: int) -> list[int]:
    """Return the number and arguments of the system call in which a thread is; [] if in none."""
    try:
        words = text_of(f"/proc/{pid}/task/{thread}/syscall", encoding="ascii").split()
        if words[0] == "running":
            return []
        return [int(words[0]), *(int(word, 16) for word in words[1:])]
    except (OSError, ValueError, IndexError):
        return []


def _of_file(path: str, *, opens: bool = False) -> KernelWait:
    """Return the wait for a file by its path; `opens`: for an open, of any path."""
    if not path.startswith("/") or path.startswith(_OTHER):
        return KernelWait(storage=opens and not path)
    return KernelWait(storage=True, path="" if path.endswith(_CODE) else path)


def _link(pid: int, name: str) -> str:
    return os.readlink(f"/proc/{pid}/{name}")  # noqa: PTH115  may be no path


def _text(pid: int, address: int) -> str:
    """Return the text that a process has at an address; "" if it cannot be read."""
    try:
        with python_open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            text, end, _ = memory.read(_MAX_PATH).partition(b"\0")
        return os.fsdecode(text) if end else ""
    except (OSError, ValueError, OverflowError):
        return ""


def _absolute(pid: int, path: str, at: int | None) -> str:
    """Return a process's path as an absolute one; `at`: the descriptor that it is relative to."""
    if path.startswith("/") or not path:
        return path
    try:
        folder = "cwd" if at is None or at >= 1 << 31 else f"fd/{at}"  # AT_FDCWD is negative
        return os.path.normpath(f"{_link(pid, folder)}/{path}")
    except OSError:
        return ""


def _mapped_file(pid: int) -> str:
    """Return the only data file that a process maps; "" if there are none or several."""
    data: set[str] = set()
    code: set[str] = set()
    with python_open(f"/proc/{pid}/maps", "rb") as maps:
        for line in maps:
            _, rights, _, _, _, *path = os.fsdecode(line.rstrip(b"\n")).split(None, 5)
            if path and path[0].startswith("/") and not path[0].startswith(_NO_DATA):
                (code if "x" in rights else data).add(path[0])
    data = {path for path in data - code if not path.endswith(_CODE)}
    return data.pop() if len(data) == 1 else ""
