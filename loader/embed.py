"""Starting a daemon where none listens.

The daemon is a process of its own in its own session: it outlives the trainer that started it for
as long as others use it, and ends by itself after the last one. Of workers that find none at the
same time one starts it. Ranks that start daemons early race for the abstract address; the kernel
lets one win, the others' daemons end without a word, and everybody connects to the winner.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import sys
import time
from contextlib import suppress

import msgspec

from creel.addresses import first_address, held_by_another, runtime_folder, startable, taken
from creel.config import Config
from creel.errors import NoDaemonError, UnavailableError
from creel.limits import few_descriptors
from creel.loader.client import Client
from creel.peers import holder

log = logging.getLogger("creel.embed")

_START_S = 20.0  # a daemon is ready in 0.4 s; a cold parallel file system may take long to import
_TURN_S = 3.0  # nobody waits longer for another process's start
_RETRY_S = 0.02
_MOST_LOG = 2000  # characters of a failed daemon's last words


def connect_or_start(
    config: Config | None = None, *, patron: int = 0, start: Start | None = None
) -> Client | None:
    """A connection to this node's daemon, starting one when there is none.

    Args:
        patron: see `Client.connect`.
        start: a daemon that is on its way already.

    Returns None, after one warning that says why, when no daemon can be had: the caller reads
    directly. `config.loader.embed` False means that only a running daemon is used.
    """
    if config is None:
        config = Config.load()[0]
    if config.loader.disable:
        return None
    if limit := few_descriptors():
        log.warning("creel reads directly, without a cache: %d descriptors (ulimit -n)", limit)
        return None
    try:
        return _connect_or_start(config, patron, start)
    except (UnavailableError, OSError) as e:
        log.warning("creel reads directly, without a cache: %s", e)
        return None
    finally:
        if start is not None:
            start.close()


def _connect_or_start(config: Config, patron: int, start: Start | None) -> Client:
    name = config.daemon.name
    try:
        return Client.connect(name, patron=patron)
    except NoDaemonError as e:
        if not config.loader.embed:
            raise
        uid = held_by_another(name)
        if uid is not None and runtime_folder() is None:
            raise taken(name, uid) from e
    if start is not None:
        return _started(start, name, patron)
    with _turn() as turn:
        patience = time.monotonic() + _TURN_S
        while not _is_mine(turn, name) and time.monotonic() < patience:
            time.sleep(_RETRY_S)
            with suppress(NoDaemonError):
                return Client.connect(name, patron=patron)
        with suppress(NoDaemonError):  # who had the turn before may have started it just now
            return Client.connect(name, patron=patron)
        return _started(Start(config), name, patron)


def _started(start: Start, name: str, patron: int) -> Client:
    """A connection to the daemon that this start brings up, or to one that was quicker."""
    try:
        deadline = time.monotonic() + _START_S
        return _connect(name, patron, deadline, start.word(deadline), start.log_fd)
    finally:
        start.close()


def _turn() -> socket.socket:
    """To be bound by who starts a daemon: of a loader's workers, that all find none, one is enough.

    It costs 0.3 s of a core. Whoever holds it gives it up by its end, whatever that is.
    """
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


def _is_mine(turn: socket.socket, name: str) -> bool:
    """Whether it is this process's turn to start a daemon; yes where another user is in the way."""
    address = first_address(name).removesuffix("desk") + "turn"
    try:
        turn.bind(address)
    except OSError:
        return holder(address) not in {None, os.getuid()}
    return True


class Start:
    """A daemon on its way up. It stays, without any client, for as long as this is not closed."""

    def __init__(self, config: Config) -> None:
        """Start the process; OSError when that cannot be done."""
        self.log_fd = os.memfd_create("creel-log", os.MFD_CLOEXEC)
        try:
            self._process, self._ready_fd = _spawn(config, self.log_fd)
        except BaseException:
            os.close(self.log_fd)
            raise

    def word(self, deadline: float) -> str:
        """What the daemon says when it is ready or fails; "" if nothing in time or it died."""
        poll = select.poll()
        poll.register(self._ready_fd, select.POLLIN)
        if not poll.poll(max(deadline - time.monotonic(), 0) * 1000):
            return ""
        return os.read(self._ready_fd, 4096).decode(errors="replace")

    def close(self) -> None:
        """Let go of it."""
        if self.log_fd >= 0:
            self._process.wait()  # it forks the daemon off at once (daemon/__main__.py)
            os.close(self._ready_fd)
            os.close(self.log_fd)
            self.log_fd = -1

    def disown(self) -> None:
        """Forget it in a forked child: it is the parent's."""
        os.close(self._ready_fd)
        os.close(self.log_fd)
        self.log_fd = -1


def start_early(config: Config) -> Start | None:
    """A daemon on its way up, when one will be needed and none answers; None otherwise."""
    if config.loader.disable or not config.loader.embed or few_descriptors():
        return None
    try:
        return Start(config) if startable(config.daemon.name) else None
    except (UnavailableError, OSError):
        return None  # whoever needs it will hear why


def _connect(name: str, patron: int, deadline: float, word: str, log_fd: int) -> Client:
    """Connect to our daemon, or to the one that was quicker."""
    # "0..." may mean that another daemon won and is not yet listening, or just ended. Ours listened
    # when it said "1": if it does not by now, somebody has stopped it.
    patience = deadline if word.startswith("0") else time.monotonic() + 1.0
    while True:
        try:
            return Client.connect(name, patron=patron)
        except NoDaemonError as e:
            if time.monotonic() > patience:
                said = word[1:] or _last_words(log_fd)
                raise NoDaemonError(f"a daemon could not be started: {said or e}") from e
            if word.startswith("0") and "already" not in word:
                raise NoDaemonError(f"a daemon could not be started: {word[1:]}") from e
        time.sleep(_RETRY_S)


def _spawn(config: Config, log_fd: int) -> tuple[subprocess.Popen[bytes], int]:
    """The process, and the end of a pipe on which it will say "1", or "0" and why not."""
    config_fd = os.memfd_create("creel-config", os.MFD_CLOEXEC)
    ready, write = os.pipe2(os.O_CLOEXEC)
    try:
        os.write(config_fd, msgspec.json.encode(config))
        os.lseek(config_fd, 0, os.SEEK_SET)
        safe = ["-P"] if sys.version_info >= (3, 11) else []
        command = [
            *(sys.executable, *safe, "-m", "creel.daemon", "--embedded"),
            *("--ready-fd", str(write), "--config-fd", str(config_fd)),
        ]
        process = subprocess.Popen(  # noqa: S603  our own interpreter and module
            command,
            stdin=subprocess.DEVNULL,
            stdout=log_fd,
            stderr=log_fd,
            pass_fds=(write, config_fd),
            start_new_session=True,
        )
    except BaseException:
        os.close(ready)
        raise
    finally:
        os.close(write)
        os.close(config_fd)
    return process, ready


def _last_words(log_fd: int) -> str:
    size = os.fstat(log_fd).st_size
    data = os.pread(log_fd, _MOST_LOG, max(size - _MOST_LOG, 0))
    return data.decode(errors="replace").strip()
