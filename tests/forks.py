"""Processes forked from one that has already imported their modules, which saves a second or two.

Each is a process of its own with its own environment. It runs what `python -m creel.daemon` or
`python -c ...` would run; only the imports are shared. Start the process that forks before any
test: it stays for good.
"""

from __future__ import annotations

import ast
import ctypes
import gc
import os
import select
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path


class Forked:
    """A forked process, with those methods of `subprocess.Popen` that the tests use."""

    def __init__(
        self,
        line: socket.socket,
        arguments: Sequence[str],
        fds: Sequence[int],
        env: Mapping[str, str],
        *,
        inside: int = 0,
        new_session: bool = False,
    ) -> None:
        """Start it.

        Args:
            line: the result of `prepare`.
            fds: the standard input, output and error.
            inside: pid of a process in whose namespaces it runs; 0: in this process's.
        """
        self.returncode: int | None = None
        self._ended, ended = os.pipe()
        try:
            request = list(arguments), dict(env), str(Path.cwd()), inside, new_session
            socket.send_fds(line, [repr(request).encode()], [*fds, ended])
        finally:
            os.close(ended)
        self.pid = int(line.recv(20))

    def wait(self, timeout_s: float | None = None) -> int:
        """As Popen.wait."""
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout_s)[0]:
                raise subprocess.TimeoutExpired("a forked process", timeout_s or 0)
            self.returncode = int(os.read(self._ended, 20))
            os.close(self._ended)
        return self.returncode

    def poll(self) -> int | None:
        """As Popen.poll."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        """As Popen.send_signal; the process that forked it waits for it if it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended since
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """As Popen.terminate."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """As Popen.kill."""
        self.send_signal(signal.SIGKILL)


#: Linux's number (6.1 and later), for which `mmap` has no name yet.
_MADV_COLLAPSE = 25
_LARGE_NBYTES = 2 << 20


def make_forks_cheap() -> None:
    """Put what this process has in memory into large pages, once; elsewhere nothing happens.

    A fork copies an entry for each page and a child takes back each, which for 290 MB is most of
    what a worker costs that reads a few samples: 33 ms of the kernel's time, 17 after this. It
    turns no setting: memory that comes later has small pages, and a page that is written to after
    a fork becomes small ones again, of which one is copied.
    """
    gc.collect()
    gc.freeze()  # a collection would write to all objects, and take 300 ms
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        span, access, *_, inode = line.split()[:5]
        if access != "rw-p" or inode != "0":
            continue
        start, stop = (int(address, 16) for address in span.split("-"))
        first = -(-start // _LARGE_NBYTES) * _LARGE_NBYTES
        last = stop // _LARGE_NBYTES * _LARGE_NBYTES
        if first < last:
            advise(first, last - first, _MADV_COLLAPSE)


def prepare(kind: str) -> socket.socket:
    """Start the process that forks "daemon"s or "program"s; it ends when the line is closed."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        command = [sys.executable, __file__, kind, str(its.fileno())]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}  # torch reads it once
        process = subprocess.Popen(command, pass_fds=[its.fileno()], env=env)
    process.returncode = 0  # no warning that it was not waited for
    return ours


def fork_on_request(line: socket.socket) -> bool:
    """Fork for each request and report how each child ended; True in a child, else False."""
    children: dict[int, tuple[int, int]] = {}  # pidfd -> (pid, descriptor for its status)
    while True:
        for ready in select.select([line.fileno(), *children], [], [])[0]:
            if ready in children:
                pid, status = children.pop(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                os.write(status, str(code).encode())
                os.close(status)
                os.close(ready)
                continue
            request, (*fds,), _, _ = socket.recv_fds(line, 1 << 20, 4)
            if not request:
                return False
            *std, status = fds
            arguments, env, folder, inside, new_session = ast.literal_eval(request.decode())
            pid = _fork(inside)
            if not pid:
                for others in ((status,), *((pidfd, s) for pidfd, (_, s) in children.items())):
                    for fd in others:
                        os.close(fd)
                line.close()
                if new_session:
                    os.setsid()
                become(arguments, env, folder, std)
                return True
            for fd in std:
                os.close(fd)
            children[os.pidfd_open(pid)] = pid, status
            line.send(str(pid).encode())


def _fork(inside: int) -> int:
    """Fork; the child runs in the namespaces of process `inside`, if that is not 0."""
    if not inside:
        return os.fork()
    own = os.open("/proc/self/ns/pid", os.O_RDONLY)
    born, *others = (
        os.open(f"/proc/{inside}/ns/{kind}", os.O_RDONLY)
        for kind in ("pid", "net", "uts", "ipc", "mnt")
    )
    _enter(born)  # the PID namespace changes for children only
    pid = os.fork()
    for fd in [own] if pid else others:
        _enter(fd)
    for fd in (own, born, *others):
        os.close(fd)
    return pid


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, 0):
        raise OSError(ctypes.get_errno(), "setns")


def become(arguments: list[str], env: dict[str, str], folder: str, fds: list[int]) -> None:
    """Make this process what a new one would be."""
    sys.argv = arguments
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)


def run_program() -> int:
    """Do what `python -c CODE ARGUMENTS...` does."""
    code = sys.argv.pop(0)
    sys.argv.insert(0, "-c")
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), module.__dict__)
    return 0


def main(kind: str, line: int) -> int:
    run: Callable[[], int] = run_program
    if kind == "daemon":
        from creel.daemon.main import main as run
    else:
        import creel

        creel.DataLoader, creel.FileDataset, creel.wrap  # noqa: B018  imported with torch
    make_forks_cheap()
    return run() if fork_on_request(socket.socket(fileno=line)) else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], int(sys.argv[2])))
