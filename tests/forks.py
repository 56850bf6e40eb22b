"""Daemons forked by a process that has imported them already: a tenth of a second instead of one.

Each is a process of its own with its own environment, and runs what `python -m creel.daemon` runs,
of which only the imports are shared. Start it when nothing is tested yet: it stays for good.
"""

from __future__ import annotations

import ast
import gc
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


class Forked:
    """One such daemon, with what the tests use of a `subprocess.Popen`."""

    def __init__(
        self, line: socket.socket, arguments: Sequence[str], log: int, env: Mapping[str, str]
    ) -> None:
        """`line`: of `prepare`; `log`: a descriptor for what it says."""
        self.returncode: int | None = None
        self._ended, ended = os.pipe()
        try:
            request = repr((list(arguments), dict(env), str(Path.cwd()))).encode()
            socket.send_fds(line, [request], [log, ended])
        finally:
            os.close(ended)
        self.pid = int(line.recv(20))

    def wait(self, timeout_s: float | None = None) -> int:
        """As that of Popen."""
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout_s)[0]:
                raise subprocess.TimeoutExpired("creel.daemon", timeout_s or 0)
            self.returncode = int(os.read(self._ended, 20))
            os.close(self._ended)
        return self.returncode

    def poll(self) -> int | None:
        """As that of Popen."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        """As that of Popen; who forked it has waited for it where it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """As that of Popen."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """As that of Popen."""
        self.send_signal(signal.SIGKILL)


def prepare() -> socket.socket:
    """Start the process that forks; it ends when nobody holds the line any more."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        command = [sys.executable, __file__, str(its.fileno())]
        process = subprocess.Popen(command, pass_fds=[its.fileno()])
    process.returncode = 0  # nobody waits for it: no warning
    return ours


def fork_on_request(line: socket.socket) -> bool:
    """Fork for each request and tell how each child ended; True in a child, False at the end."""
    children: dict[int, tuple[int, int]] = {}  # pidfd -> (pid, where its status is awaited)
    while True:
        for ready in select.select([line.fileno(), *children], [], [])[0]:
            if ready in children:
                pid, status = children.pop(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                os.write(status, str(code).encode())
                os.close(status)
                os.close(ready)
                continue
            request, (*fds,), _, _ = socket.recv_fds(line, 1 << 20, 2)
            if not request:
                return False
            log, status = fds
            pid = os.fork()
            if not pid:
                for fd in [
                    status,
                    *(fd for pidfd, (_, s) in children.items() for fd in (pidfd, s)),
                ]:
                    os.close(fd)
                line.close()
                arguments, env, folder = ast.literal_eval(request.decode())
                become(arguments, env, folder, log)
                return True
            os.close(log)
            children[os.pidfd_open(pid)] = pid, status
            line.send(str(pid).encode())


def become(arguments: list[str], env: dict[str, str], folder: str, log: int) -> None:
    """Make this process what a new one would be."""
    sys.argv = ["creel.daemon", *arguments]
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    os.dup2(log, 2)
    os.close(log)


if __name__ == "__main__":
    from creel.daemon.main import main

    gc.freeze()
    if fork_on_request(socket.socket(fileno=int(sys.argv[1]))):
        raise SystemExit(main())
