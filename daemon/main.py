"""The daemon process: its loop, signals, timers, start and end.

The loop sleeps in one epoll over control socket, request socket and wake-ups from other threads.
With open sessions it also polls the shared words, after an eighth of the time since they last
changed, or that no reader runs out of what is ready, if that is longer; 1 ms at least, 80 at most.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import faulthandler
import logging
import os
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import zmq

from creel.addresses import first_address, second_address, taken
from creel.cache.memory.address_space import leave_address_space
from creel.cache.memory.memfd import Descriptor
from creel.config import Config, from_flat
from creel.daemon.reporting.logs import open_standard_files, set_up_logging
from creel.daemon.reporting.notify import Notify, handed_over
from creel.daemon.service.core_shell import BEAT_S
from creel.daemon.service.memory import restart_memory
from creel.daemon.service.node import Node
from creel.daemon.service.sockets import commands
from creel.daemon.service.sockets.control_socket import ControlSocket, released
from creel.daemon.service.sockets.request_socket import RequestSocket
from creel.daemon.signals import hold_signals, watch_signals
from creel.errors import ConfigError, CreelError, UnavailableError
from creel.system import limits
from creel.system.unix_peers import owner_of

if TYPE_CHECKING:
    from creel.daemon.reporting.page import PageServer

log = logging.getLogger("creel.main")

_QUICK_S = 0.001  # shortest pause between two polls of the shared words
_TICK_S = 0.25
_DRAIN_S = 3.5  # longest time from SIGTERM to the end; systemd and Slurm wait longer
_FINAL_REPLY_S = 0.1  # time for the answer to the client that asked for the stop
_MAX_CALLS_S = 0.01  # longest turn of calls from other threads; then clients are served
_BIND_TRIES, _BIND_PAUSE_S = 10, 0.05  # for an address whose holder is unknown
_SWITCH_S = 0.0005  # switch interval of the GIL: fetch threads need microseconds, not 5 ms


class Daemon:
    """All parts of one daemon process; `run` serves until it is stopped."""

    def __init__(
        self,
        config: Config,
        flags: Mapping[str, object],
        *,
        embedded: bool,
        ready_fd: int,
        given: Mapping[str, Descriptor] | None = None,
    ) -> None:
        """Bind the address and create the arena.

        Args:
            flags: settings from the command line, which survive a reload.
            embedded: whether to end with the last client.
            ready_fd: a pipe, or -1; while the other end is open, its holder may become a client.
            given: descriptors from the service manager, by name.

        Raises:
            UnavailableError: another daemon of this name already serves this user.
            ConfigError: settings that this machine cannot meet.
        """
        name = config.daemon.name
        #: The settings, from files, environment and flags.
        self._config = config
        self._flags = {**flags, "daemon.name": name}
        self._embedded = embedded
        self._ready_fd = ready_fd
        #: What other threads have left to the loop.
        self._calls: deque[Callable[[], None]] = deque()
        #: What the loop waits for.
        self._epoll = select.epoll()
        # Never closed: a thread that hangs in a read, or waits for signals, may write to it later.
        self._wake = Descriptor(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        self._epoll.register(self._wake.fd, select.EPOLLIN)
        #: Of the request socket.
        self._context: zmq.Context[Any] = zmq.Context()
        #: The service manager that started it, if any.
        self._notify = Notify()
        #: Serves metrics; None: not asked for.
        self._page: PageServer | None = None
        #: When it ends though clients are there, monotonic seconds.
        self._drain_by = float("inf")
        #: Whether it has given up its address.
        self._leaving = False
        self._why = ""  # it ends
        #: Whether settings are to be read anew.
        self._reload = False
        #: The working directory at the start.
        self._folder = _working_directory()
        #: When the loop last moved, and when it last ticked.
        self._moved = self._ticked = time.monotonic()
        #: When the last client left; None: there are some.
        self._unused_since: float | None = None
        #: When the parent was last looked for.
        self._watched = 0.0
        total = limits.memory().total
        kept = restart_memory.take(given, config.memory, total) if given else None
        if given:
            self._notify.unstore(*restart_memory.NAMES)
        returns = self._notify.heard and not embedded
        #: All that is no socket.
        self.node = Node(config, self, embedded=embedded, returns=returns, kept=kept)
        try:
            #: Where clients connect.
            self.control_socket = self._bind(name)
        except BaseException:
            self.node.close()
            raise
        #: Where they ask.
        self.request_socket = RequestSocket(self.node, self.control_socket, self._context)
        self._epoll.register(self.request_socket.fd, select.EPOLLIN)
        try:
            self._serve_metrics()
        except BaseException:
            self._ready_fd = -1  # the caller reports the reason through it
            self.close()
            raise

    def _bind(self, name: str) -> ControlSocket:
        """Listen at the first address, or at the second if another user holds the first.

        Raises:
            UnavailableError: a daemon of this user holds the address, or other users hold both.
        """
        first = first_address(name)
        control_socket = self._listen(name, first)
        if control_socket is not None:
            return control_socket
        uid = owner_of(first)
        second = second_address(name, make=True)
        control_socket = None if second is None else self._listen(name, second)
        if control_socket is None:
            raise taken(name, uid)
        log.warning("user %s holds this daemon's address: listening at a second one", uid)
        return control_socket

    def _listen(self, name: str, address: str) -> ControlSocket | None:
        """Return a control socket at this address; None if another user holds the address."""
        if not self._embedded and released(address):
            log.info("an embedded daemon released the address; it ends with its last client")
        for _ in range(_BIND_TRIES):
            try:
                limit = self._config.daemon.max_connections
                return ControlSocket(address, self.node, self._epoll, limit=limit)
            except OSError as e:
                if e.errno != errno.EADDRINUSE:
                    raise
            uid = owner_of(address)
            if uid == os.getuid():
                raise UnavailableError(f"your daemon named {name!r} is already running")
            if uid is not None:
                return None
            time.sleep(_BIND_PAUSE_S)  # the holder may have just ended
        return None

    def call_soon(self, call: Callable[[], None]) -> None:
        """Run `call` on the loop thread; callable from any thread."""
        self._calls.append(call)
        os.eventfd_write(self._wake.fd, 1)

    def stop(self, now: bool, why: str) -> None:
        """Drain and end: at once (`now`), or when all clients have left; `why` is for the log.

        Both addresses are free for the next daemon at once.
        """
        self.control_socket.stop_listening()
        self._close_page()
        self._leaving = True
        self._why = self._why or why
        if now and self.node.shell.state != "draining":
            log.info("draining: %s", why)
            self.node.drain()
            self._notify.stopping()
            self._drain_by = time.monotonic() + _DRAIN_S

    def report_ready(self) -> None:
        """Announce that clients may connect; wait for the process that started this daemon."""
        if self._ready_fd >= 0:
            _write(self._ready_fd, "1")
            self._epoll.register(self._ready_fd, 0)  # hang-ups are always reported
            self.node.datasets.expect()

    def run(self) -> None:
        self._notify.ready(self._status())
        log.info("ready: %s", self._status())
        more = False
        while not self._finished(time.monotonic()):
            ready = self._epoll.poll(0 if more else self._pace(time.monotonic()), 64)
            more = self._turn([fd for fd, _ in ready], time.monotonic())
        log.info("ended: %s", self._why)

    def keep_memory(self) -> None:
        """Leave the memory to the next daemon of this service, if there is a service manager."""
        index = self.node.keep() if self.node.returns else None
        if index is not None:
            self._notify.store(restart_memory.ARENA, self.node.arena.descriptor.fd)
            self._notify.store(restart_memory.INDEX, index.fd)

    def close(self) -> None:
        self.control_socket.close()
        self._close_page()
        self.node.close()
        self.request_socket.close()
        self._context.term()
        self._notify.close()
        if self._ready_fd >= 0:
            self._stop_waiting_for_starter()
        self._epoll.close()

    # --- the loop -----------------------------------------------------------------------------

    def _turn(self, ready: list[int], now: float) -> bool:
        """Run one turn of the loop; return whether more work waits."""
        for fd in ready:
            if fd == self._ready_fd:
                self._stop_waiting_for_starter()
            elif fd == self._wake.fd:
                os.eventfd_read(fd)  # before taking the calls, so that none is missed
            elif self.control_socket.handles(fd):
                self.control_socket.ready(fd, now)
        more = self.request_socket.turn()
        more |= self._take_calls()
        if self.node.sessions.poll_words():
            self._moved = now
        self.node.shell.settle()
        self._timers(time.monotonic())
        return more or self.request_socket.more()

    def _take_calls(self) -> bool:
        until = time.monotonic() + _MAX_CALLS_S
        while self._calls:
            if time.monotonic() > until:
                return True
            try:
                self._calls.popleft()()
            except Exception:  # must not end the daemon for other clients
                log.exception("a call from another thread failed")
            self.node.shell.beat(time.monotonic())
        return False

    def _pace(self, now: float) -> float:
        """Return the longest time to sleep, in seconds.

        A trainer that waits wakes the daemon. The others need it before they have read what is
        ready. Looking each millisecond took most of its CPU time in warm epochs of small batches.
        """
        if not self.node.registry.sessions:
            return 0.1 if self._leaving else 0.5
        pause_s = max(now - self._moved, self.node.shell.core.lead_s()) / 8
        pace_s = min(max(pause_s, _QUICK_S), BEAT_S)
        return min(pace_s, max(self.node.memory_guard.due - now, _QUICK_S))

    def _timers(self, now: float) -> None:
        """Do what is due. Two clocks: the shell beats within a turn, too; ticks change the core."""
        self.node.shell.beat(now)
        self.node.memory_guard.poll(now)
        if now - self._ticked < _TICK_S:
            return
        self._ticked = now
        self.control_socket.sweep(now)
        if self.node.shell.state == "serving":
            self.node.datasets.remove_idle()
            self.node.clusters.tick(now)
            if self.node.registry.sessions:
                self.node.tick()
        if self._reload:
            self._reload = False
            self._read_settings_again()
        if self._notify.watchdog_s and now - self._watched >= self._notify.watchdog_s / 2:
            self._watched = now
            self._notify("WATCHDOG=1", f"STATUS={self._status()}")

    def _finished(self, now: float) -> bool:
        if self.control_socket.clients:
            self._unused_since = None
            if self.node.shell.state != "draining":
                return False
            quiet = (
                not self.node.fetcher.pending and now > self._drain_by - _DRAIN_S + _FINAL_REPLY_S
            )
            return quiet or now > self._drain_by
        if self._leaving:
            return True
        if not self._embedded or self._ready_fd >= 0:
            return False
        if self.control_socket.keep_alive:
            self._unused_since = None
            return False
        self._unused_since = self._unused_since or now
        if now - self._unused_since > max(self._config.daemon.linger_s, self.node.linger_s):
            self._why = "no client left"
            return True
        return False

    def _stop_waiting_for_starter(self) -> None:
        """Stop waiting for the process that started this daemon: it has connected, or will not."""
        self._epoll.unregister(self._ready_fd)
        os.close(self._ready_fd)
        self._ready_fd = -1

    # --- for the node (`Loop`) ----------------------------------------------------------------

    @property
    def request_address(self) -> str:
        return self.request_socket.address

    @property
    def clients(self) -> int:
        return self.control_socket.clients

    def pids(self) -> dict[str, int]:
        return self.control_socket.pids()

    def send(self, client: bytes, message: Any) -> None:
        self.request_socket.send(client, message)

    def _status(self) -> str:
        node = self.node
        return (
            f"{node.shell.state} as {self._config.daemon.name!r}: clients {self.clients},"
            f" sessions {len(node.registry.sessions)}, memory {node.arena.nbytes >> 20} MiB"
        )

    # --- settings and signals -----------------------------------------------------------------

    def _serve_metrics(self) -> None:
        if not self._config.daemon.metrics:
            return
        from creel.daemon.reporting.prometheus import serve_page, take_by  # 15 ms

        def status_and_stats() -> dict[str, Any]:
            answer: dict[str, Any] = take_by(
                self.call_soon, lambda: commands.status_and_stats(self.node)
            )
            return answer

        self._page = serve_page(self._config.daemon.metrics, status_and_stats)

    def _close_page(self) -> None:
        if self._page is not None:
            self._page.close()
            self._page = None

    def take_signal(self, number: signal.Signals, origin: str) -> None:
        """Act on a signal, in any thread; `origin`: its name and sender.

        SIGTERM drains. A service also drains by SIGINT and SIGQUIT, which a terminal sends, and
        reloads by SIGHUP. SIGUSR2 prints the stacks of all threads: here, where this thread holds
        the interpreter's lock, as faulthandler's own handler reads frames that change meanwhile,
        and can crash. All others are for the trainer.
        """
        interactive = set() if self._embedded else {signal.SIGINT, signal.SIGQUIT}
        if number in {signal.SIGTERM, *interactive}:
            self.call_soon(lambda: self.stop(True, origin))
        elif number == signal.SIGHUP and not self._embedded:
            self._reload = True
            self.call_soon(lambda: None)
        elif number == signal.SIGUSR2:
            faulthandler.dump_traceback(all_threads=True)
        else:
            log.info("%s: ignored", origin)

    def _read_settings_again(self) -> None:
        self._notify.reloading()
        try:
            loaded = self._load_again()
        except ConfigError as e:
            log.error("the settings are not reloaded: %s", e)  # noqa: TRY400  a sentence says it
        else:
            old, new = self._config.flat(), loaded.flat()
            for key in [k for k in new if new[k] != old[k]]:
                effect = "in effect now" if key in _AT_ONCE else "takes effect at the next start"
                log.info("%s = %r (was %r), %s", key, new[key], old[key], effect)
            self._config = self.node.config = loaded
            at_once = {key: new[key] for key in _AT_ONCE}
            self.node.effective = from_flat(self.node.effective.flat() | at_once)
            set_up_logging(loaded.daemon.log_level, as_json=loaded.daemon.log_json)
        self._notify.ready(self._status())

    def _load_again(self) -> Config:
        """Load the settings from the folder in which this daemon was started (see `serve`)."""
        try:
            with contextlib.suppress(OSError):  # the folder and its settings file are gone
                os.chdir(self._folder)
            return Config.load(self._flags)[0]
        finally:
            os.chdir("/")


_AT_ONCE = frozenset(
    f"daemon.{name}"
    for name in ("log_level", "log_json", "linger_s", "idle_s", "max_idle_datasets")
)


def serve(config: Config, flags: Mapping[str, object], *, embedded: bool, ready_fd: int) -> int:
    """Run the daemon until it is stopped; return the exit code: 1 if it gave up.

    A service manager then starts it again.

    Args:
        flags: see Daemon.
        embedded: whether to end `daemon.linger_s` after the last client has left.
        ready_fd: a pipe, or -1; it gets "1" once clients may connect, or "0" and the reason why
            not.
    """
    hold_signals()
    set_up_logging(config.daemon.log_level, as_json=config.daemon.log_json)
    sys.setswitchinterval(_SWITCH_S)
    _use_small_pages()
    try:
        daemon = Daemon(
            config,
            flags,
            embedded=embedded,
            ready_fd=ready_fd,
            given=handed_over(os.environ),  # kept nowhere: what is not used is freed
        )
    except (CreelError, OSError) as e:
        _report_start(ready_fd, f"0{e}")
        log.log(logging.DEBUG if embedded else logging.ERROR, "%s", e)
        return 2 if isinstance(e, ConfigError) else 1
    os.chdir("/")  # keep no mount busy; the daemon uses no relative paths
    try:
        watch_signals(daemon.take_signal)
        daemon.report_ready()
        daemon.run()
        daemon.keep_memory()
    finally:
        daemon.close()
    return 0 if daemon.node.shell.sound else 1


def _working_directory() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # the folder was removed
        return "/"


def _use_small_pages() -> None:
    """Keep numpy from using huge pages: the first plan writes all over columns of millions.

    With huge pages this would allocate all of a column at once: 0.9 s of the loop for 14 M records.
    """
    with contextlib.suppress(AttributeError):  # numpy reads its environment variable only at import
        np._core.multiarray._set_madvise_hugepage(False)  # type: ignore[attr-defined]  # noqa: SLF001


def _report_start(fd: int, text: str) -> None:
    if fd >= 0:
        _write(fd, text)
        os.close(fd)


def _write(fd: int, text: str) -> None:
    try:
        os.write(fd, text.encode())
    except OSError:
        log.debug("the process that started this daemon does not wait for it any more")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a daemon as arguments say that `creeld` (`cli/run.py`) or an embedding loader makes."""
    open_standard_files()
    leave_address_space()
    parser = argparse.ArgumentParser(prog="python -m creel.daemon")
    for flag in ("--name", "--memory", "--log-level", "--metrics"):
        parser.add_argument(flag)
    parser.add_argument("--embedded", action="store_true")
    parser.add_argument("--ready-fd", type=int, default=-1)
    parser.add_argument("--config-fd", type=int, default=-1)
    args = parser.parse_args(argv)
    flags = {
        "daemon.name": args.name,
        "memory.budget": args.memory,
        "daemon.log_level": args.log_level,
        "daemon.metrics": args.metrics,
    }
    try:
        config = Config.load(flags)[0] if args.config_fd < 0 else _handed_over(args.config_fd)
    except ConfigError as e:
        print(f"creeld: {e}", file=sys.stderr)  # noqa: T201  before there is a log
        _report_start(args.ready_fd, f"0{e}")
        return 2
    return serve(config, flags, embedded=args.embedded, ready_fd=args.ready_fd)


def _handed_over(fd: int) -> Config:
    """Return the settings handed over by the loader that started this daemon."""
    with open(fd, "rb") as f:
        return msgspec.json.Decoder(Config).decode(f.read())
