"""Start a daemon if none listens.

The daemon is a separate process in its own session: it outlives the trainer that started it as long
as others use it, and ends after its last client. If several processes find no daemon at the same
time, one of them binds an abstract address, the *turn*, and starts it; the others connect to its
daemon. If two daemons start nevertheless, the kernel gives the daemon's address to one, and the
other exits silently.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec

from creel.addresses import first_address, held_by_another, runtime_folder, startable, taken
from creel.cache.memory.memfd import Descriptor, memfd
from creel.config import Config
from creel.errors import NoDaemonError, UnavailableError
from creel.loader.client.client import Client
from creel.system.forks import no_fork
from creel.system.limits import few_descriptors
from creel.system.python_module import command_of
from creel.system.unix_peers import owner_of

log = logging.getLogger("creel.embed")

_START_S = 20.0  # a daemon is ready in 0.4 s; imports from a cold parallel file system take long
OTHER_START_S = 3.0  # longest wait for another process's start
_RETRY_S = 0.02
_MAX_LOG_NBYTES = 2000  # bytes of a failed daemon's log that the error quotes


def connect_or_start(
    config: Config, *, trainer_pid: int = 0, start: DaemonStart | None = None
) -> Client | None:
    """Connect to this node's daemon, starting one if there is none.

    Args:
        config: with `config.loader.embed` False, only a running daemon is used.
        trainer_pid: see `Client.connect`.
        start: a daemon that is starting already; always closed here.

    Returns:
        None, after one warning with the reason, if there is no daemon: the caller reads directly.
    """
    try:
        if config.loader.disable:
            return None
        if limit := few_descriptors():
            log.warning(
                "creel reads directly, without a cache: %d open files (ulimit -n) are too few",
                limit,
            )
            return None
        return _connect_or_start(config, trainer_pid, start)
    except (UnavailableError, OSError) as e:
        # The text alone: a handler that keeps the error keeps its frames, and with them the loader.
        log.warning("creel reads directly, without a cache: %s", str(e))
        return None
    finally:
        if start is not None:
            start.close()


def _connect_or_start(config: Config, trainer_pid: int, start: DaemonStart | None) -> Client:
    name = config.daemon.name
    try:
        return Client.connect(name, trainer_pid=trainer_pid)
    except NoDaemonError as e:
        if not config.loader.embed:
            raise
        uid = held_by_another(name)
        if uid is not None and runtime_folder() is None:
            raise taken(name, uid) from e
    if start is not None:
        return _started(start, name, trainer_pid)
    with _new_turn() as turn:
        retry = time.monotonic() + OTHER_START_S
        while not _take(turn, name) and time.monotonic() < retry:
            time.sleep(_RETRY_S)
            with suppress(NoDaemonError):
                return Client.connect(name, trainer_pid=trainer_pid)
        with suppress(NoDaemonError):  # the previous holder of the turn may have started one
            return Client.connect(name, trainer_pid=trainer_pid)
        return _started(DaemonStart(config), name, trainer_pid)


def _started(start: DaemonStart, name: str, trainer_pid: int) -> Client:
    """Connect to the daemon that `start` brings up, or to another that took the address."""
    try:
        deadline = time.monotonic() + _START_S
        report = start.report(_START_S)
        # "0..." may mean that another daemon took the address but does not listen yet, or has just
        # ended. A daemon that reported "1" listened; if it does not now, it was stopped. A daemon
        # that died reports nothing. New workers of each epoch may find that, and must not wait for
        # it.
        retry = deadline if report.startswith("0") else time.monotonic() + (1.0 if report else 0.0)
        while True:
            try:
                return Client.connect(name, trainer_pid=trainer_pid)
            except NoDaemonError as e:
                if report.startswith("0") and "already" not in report:
                    raise NoDaemonError(f"the daemon did not start: {report[1:]}") from e
                if time.monotonic() > retry:
                    reason = report[1:] or start.last_log() or e
                    raise NoDaemonError(f"the daemon did not start: {reason}") from e
            time.sleep(_RETRY_S)
    finally:
        start.close()


def _new_turn() -> socket.socket:
    """Return a socket for `_turn_address`: the process that binds it starts a daemon.

    The kernel frees the address when that process ends. A start costs 0.3 s of a core.
    """
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


def _turn_address(name: str) -> str:
    return first_address(name).removesuffix("control") + "start"


def _take(turn: socket.socket, name: str) -> bool:
    """Whether this process may start a daemon; also True if another user holds the address."""
    address = _turn_address(name)
    try:
        turn.bind(address)
    except OSError:
        return owner_of(address) not in {None, os.getuid()}
    return True


def started_elsewhere(name: str) -> bool:
    """Whether another process of this user is starting a daemon that does not answer yet."""
    try:
        return startable(name) and owner_of(_turn_address(name)) == os.getuid()
    except UnavailableError:
        return False


class DaemonStart:
    """A daemon that is starting. Until this is closed it stays up, even without a client."""

    def __init__(
        self, config: Config, turn: socket.socket | None = None, log_fd: int | None = None
    ) -> None:
        """Start the process.

        `turn`: a bound `_new_turn`, taken over, so that no other process starts a daemon meanwhile.
        `log_fd`: the daemon's log; None: a memfd that `last_log` reads.

        Raises:
            OSError, UnavailableError: it cannot be started.
        """
        self._turn = turn
        self._log_fd = memfd("creel-log") if log_fd is None else os.dup(log_fd)
        try:
            with no_fork():
                self._process, self._ready_fd = _spawn(config, self._log_fd)
        except BaseException:
            os.close(self._log_fd)
            raise

    def reported(self, timeout_s: float = 0.0) -> bool:
        """Whether the daemon has reported or ended, now or within `timeout_s`."""
        poll = select.poll()
        poll.register(self._ready_fd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def report(self, timeout_s: float) -> str:
        """Wait for the daemon's ready or failure message; "" if it is late or the daemon died."""
        if not self.reported(timeout_s):
            return ""
        return os.read(self._ready_fd, 4096).decode(errors="replace")

    def last_log(self) -> str:
        size = os.fstat(self._log_fd).st_size
        data = os.pread(self._log_fd, _MAX_LOG_NBYTES, max(size - _MAX_LOG_NBYTES, 0))
        return data.decode(errors="replace").strip()

    def close(self, *, wait: bool = True) -> None:
        """Release the daemon: from now on it stays only for its clients. Idempotent.

        wait: reap the process that was started; False in a forked child, which is not its parent.
        """
        if self._log_fd < 0:
            return
        if wait:
            self._process.wait()  # returns at once: it forks the daemon off (daemon/__main__.py)
        else:
            self._process.returncode = 0  # else Popen warns that a child of this process still runs
        os.close(self._ready_fd)
        os.close(self._log_fd)
        self._log_fd = -1
        if self._turn is not None:
            self._turn.close()


def start_early(config: Config) -> DaemonStart | None:
    """Start a daemon if one is wanted, none answers and no process starts one; else None."""
    if config.loader.disable or not config.loader.embed or few_descriptors():
        return None
    turn = None
    try:
        turn = _new_turn()
        if startable(config.daemon.name) and _take(turn, config.daemon.name):
            return DaemonStart(config, turn)
    except (UnavailableError, OSError):
        pass  # `connect_or_start` warns with the reason
    if turn is not None:
        turn.close()
    return None


def _spawn(config: Config, log_fd: int) -> tuple[subprocess.Popen[bytes], int]:
    """Start the process; return it and a pipe on which it reports "1", or "0" and a reason."""
    command = command_of("creel.daemon")
    if not command:
        raise UnavailableError(
            "this program has no Python to start a daemon with: start creeld first"
        )
    settings = Descriptor(memfd("creel-config"))
    os.write(settings.fd, msgspec.json.encode(config))
    os.lseek(settings.fd, 0, os.SEEK_SET)
    ready, write = os.pipe2(os.O_CLOEXEC)
    try:
        command += ["--embedded", "--ready-fd", str(write), "--config-fd", str(settings.fd)]
        with _signals_blocked():
            process = subprocess.Popen(  # noqa: S603  our own interpreter and module
                command,
                stdin=subprocess.DEVNULL,
                stdout=log_fd,
                stderr=log_fd,
                pass_fds=(write, settings.fd),
                start_new_session=True,
            )
    except BaseException:
        os.close(ready)
        raise
    finally:
        os.close(write)
    return process, ready


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Start a process inside that no signal ends until it says what each means to it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
