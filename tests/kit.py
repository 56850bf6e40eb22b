"""Helpers of the tests: names of temporary daemons, processes, leak checks."""

from __future__ import annotations

import errno
import gc
import os
import socket
import struct
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from creel.cache.memory.pools.allocator import Lengths
from creel.cache.storage import lookup
from creel.cache.storage.stores.remote import Stores
from creel.loader.client.client import Client
from creel.policies.arrays import Ints
from creel.policies.cluster.boundary import ClusterView
from creel.policies.prefetch import Window
from creel.settings import FetchSettings, WindowSettings


def unique_name() -> str:
    """Return a daemon name that no other test (and no user of this machine) uses."""
    return f"test-{os.getpid()}-{uuid.uuid4().hex[:12]}"


def seeds(count: int) -> range:
    """Return the seeds of a random test: `count` times the variable SEEDS (`make stress`)."""
    return range(count * int(os.environ.get("SEEDS", "1")))


def lengths_of(length: NDArray[np.integer]) -> Lengths:
    """Summary of (n,) lengths, each of one object."""
    return Lengths.of(length, np.ones(len(length), np.int64))


def default_window(**changes: int) -> Window:
    """Return the limits of a daemon with default settings, except for `changes`."""
    return replace(Window.of(WindowSettings(), FetchSettings()), **changes)


def cluster_view(
    origin: Sequence[int] | Ints,
    nbytes: int,
    by_hash: frozenset[str] = frozenset(),
    *,
    again: bool = False,
) -> ClusterView:
    """Return node 0's view of a cluster: one rank and `nbytes` of memory per node, no disk."""
    n = len(origin)
    disk, names = np.array([(0, 1)] * n, np.int64), tuple(map(str, range(n)))
    return ClusterView(
        0,
        np.arange(n),
        np.full(n, nbytes),
        np.asarray(origin),
        disk,
        "",
        names,
        by_hash=by_hash,
        again=again,
    )


def until(condition: Callable[[], bool], timeout_s: float = 60.0, event: object = "") -> None:
    """Wait for a condition that another process will make true; fail with `event` otherwise.

    `event` is what the failure says, as it is then: a text, or what is still missing. The deadline
    is not part of the test: a busy machine may take seconds instead of milliseconds.
    """
    deadline, pause_s = time.monotonic() + timeout_s, 0.0005
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {event or condition}")
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, 0.01)


def listening(pid: int) -> list[int]:
    """Return the TCP ports on which a process listens, once it does."""
    ports: list[int] = []

    def listens() -> bool:
        sockets = psutil.Process(pid).net_connections()
        ports[:] = [s.laddr.port for s in sockets if s.status == "LISTEN"]
        return bool(ports)

    until(listens, event=f"process {pid} listens")
    return ports


class Cores:
    """The time since this was made of the cores that we may use.

    How often several processes that run beside each other read a source depends on how fast each
    is. Such counts, and times, say something about creel only while the cores have time to spare.
    """

    def __init__(self) -> None:
        self._idle, self._all = self._jiffies()

    def spare(self) -> bool:
        """Whether the cores were idle for a quarter of the time: no one waited long for one."""
        idle, total = self._jiffies()
        return 4 * (idle - self._idle) >= total - self._all

    def skip_unless_spare(self) -> None:
        """Skip the rest of a test, which compares counts: what it said of batches was tested."""
        if not self.spare():
            pytest.skip("batches compared; no core was idle")

    @staticmethod
    def _jiffies() -> tuple[int, int]:
        """Return the time that our cores were idle, and their time; what a host stole is used."""
        ours = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        lines = map(str.split, Path("/proc/stat").read_text(encoding="ascii").splitlines())
        # The words after the eighth are part of these.
        spent = np.array([line[1:9] for line in lines if line[0] in ours], np.int64).sum(axis=0)
        return int(spent[3] + spent[4]), int(spent.sum())


def forget_stores(patch: pytest.MonkeyPatch, settings: FetchSettings | None = None) -> None:
    """Until the patch ends, make this process one that has used no store yet, with `settings`."""
    # There is no public function for this.
    patch.setattr(lookup, "_stores", None if settings is None else Stores(settings))
    patch.setattr(lookup, "_reached", set())


def daemon_of(name: str) -> psutil.Process:
    """Return the process of the running daemon of that name."""
    with Client.connect(name, "cli") as client:
        return psutil.Process(int(client.ask("status")["pid"]))


def knock(address: str, timeout_s: int = 30) -> socket.socket:
    """Return a raw connection to a control socket; no operation on it exceeds `timeout_s`.

    The kernel waits for room in the backlog only if the socket blocks; Python's timeouts make it
    non-blocking.
    """
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", timeout_s, 0))
        s.connect(address)
    except BaseException:
        s.close()
        raise
    s.settimeout(timeout_s)
    return s


def resource_warnings_in_a_fork(patch: pytest.MonkeyPatch) -> int:
    """Fork; return how many ResourceWarnings the child gives while it starts (`python -X dev`).

    Tests that call it need a filter "always::ResourceWarning".
    """
    warned: list[Any] = []
    patch.setattr(warnings, "showwarning", lambda *arguments: warned.append(arguments))
    pid = os.fork()
    if pid == 0:
        os._exit(sum(issubclass(arguments[1], ResourceWarning) for arguments in warned))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def gone(pid: int) -> bool:
    """Whether a process has ended, even if its parent has not waited for it."""
    return state(pid) in {"gone", psutil.STATUS_ZOMBIE}


def stopped(pid: int) -> bool:
    """Whether SIGSTOP has stopped all of a process."""
    return state(pid) == psutil.STATUS_STOPPED


def state(pid: int) -> str:
    """Return psutil's status of a process, or "gone"."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return "gone"


def drop(path: Path) -> None:
    """Ask the kernel to drop the file's pages from the page cache."""
    with path.open("rb") as file:
        os.fsync(file)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def dropped(path: Path) -> bool:
    """Call `drop`; return whether the kernel did so."""
    drop(path)
    with path.open("rb") as file:
        try:
            os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
        except OSError as error:
            file.read()  # the test read has brought pages back
            drop(path)
            return error.errno == errno.EAGAIN
    return False


def descriptors(pid: int | str = "self", *, eventfds: bool = False) -> frozenset[tuple[str, str]]:
    """Return (number, target) of all descriptors of a process; use it as `after - before`.

    Other comparisons fail: an earlier test's garbage is collected first, but one of its threads may
    still close something, or wait for its daemon, which takes an eventfd each time.
    """
    gc.collect()
    targets = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # the listing's own descriptor, and any closed meanwhile
            target = str(fd.readlink())
            if eventfds or not target.startswith("anon_inode:[eventfd"):
                targets.add((fd.name, target))
    return frozenset(targets)


@dataclass(frozen=True)
class Holdings:
    """Resources of a process that a careless test leaves behind."""

    fds: int
    threads: int
    children: frozenset[int]

    @classmethod
    def now(cls) -> Holdings:
        gc.collect()
        me = psutil.Process()
        children = frozenset(c.pid for c in me.children(recursive=True) if not gone(c.pid))
        return cls(me.num_fds(), threading.active_count(), children)


@contextmanager
def nothing_left(timeout_s: float = 60.0) -> Iterator[None]:
    """Fail unless descriptors, threads and children are back to those at the start."""
    before = Holdings.now()
    yield

    def back() -> bool:
        now = Holdings.now()
        return (
            now.fds <= before.fds
            and now.threads <= before.threads
            and now.children <= before.children
        )

    try:
        until(back, timeout_s)
    except AssertionError:
        raise AssertionError(f"not given back: {before} before, {Holdings.now()} after") from None
