"""The daemon process: one loop thread, its signals, its timers, its beginning and end.

The loop sleeps in one epoll over the desk, the line and a wake-up from other threads. While
training runs it also wakes to look at the boards: an eighth of the time since anything moved there,
between 1 and 50 ms, so quick steps are seen at once and an idle daemon costs nothing.
"""

from __future__ import annotations

import argparse
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
from types import FrameType
from typing import Any

import msgspec
import zmq

from creel.addresses import first_address, second_address, taken
from creel.config import Config
from creel.daemon import metrics
from creel.daemon.line import Line
from creel.daemon.local import Desk
from creel.daemon.logs import set_up_logging
from creel.daemon.node import BEAT_S, Node
from creel.daemon.notify import Notify
from creel.daemon.takeover import made_way
from creel.errors import ConfigError, CreelError, UnavailableError
from creel.peers import holder

log = logging.getLogger("creel.main")

_QUICK_S = 0.001  # a client is not held up longer than this by a board nobody looked at
_TICK_S = 0.25
_DRAIN_S = 3.5  # SIGTERM to the end, at most; systemd and Slurm are patient for longer
_LAST_WORD_S = 0.1  # so that who asked for the end gets an answer
_CALLS = 256  # results taken a turn, so that clients and heartbeat get their turn too
_TRIES, _TRY_S = 10, 0.05  # of an address whose holder is not known
_SWITCH_S = 0.0005  # fetch threads hold the interpreter for microseconds; never let them for 5 ms


class Daemon:
    """Everything of one process. `run` serves until it is told to stop."""

    def __init__(
        self,
        config: Config,
        flags: Mapping[str, object] | None = None,
        *,
        embedded: bool = False,
        ready_fd: int = -1,
    ) -> None:
        """Take the address and the memory.

        Args:
            flags: what of `config` came from the command line, and stays when it is read again.
            embedded: whether to go with the last client.
            ready_fd: as long as its other end is open somebody means to become one.

        Raises:
            UnavailableError: another daemon of this name serves this user already.
            ConfigError: settings that cannot be met here.
        """
        name = config.daemon.name
        self._config = config
        self._flags = {**(flags or {}), "daemon.name": name}
        self._embedded = embedded
        self._ready_fd = ready_fd
        self._calls: deque[Callable[[], None]] = deque()
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._context: zmq.Context[Any] = zmq.Context()
        self._notify = Notify()
        self._page: metrics.Page | None = None
        self._drain_by = float("inf")
        self._leaving = False
        self._reload = False
        self._moved = self._ticked = time.monotonic()
        self._alone_since: float | None = None
        self._watched = 0.0
        self.node = Node(config, call_soon=self.call_soon, send=self._send, embedded=embedded)
        try:
            self.desk = self._bind(name)
        except BaseException:
            self.node.close()
            raise
        self.line = Line(self.node, self.desk, self._context)
        self._epoll.register(self.line.fd, select.EPOLLIN)
        self.node.line_address = self.line.address
        self.node.stop = self.stop
        self.node.clients = lambda: self.desk.clients
        self.node.pids = self.desk.pids
        try:
            self._serve_metrics()
        except BaseException:
            self._ready_fd = -1  # the caller's, to say why
            self.close()
            raise

    def _bind(self, name: str) -> Desk:
        """Listen at the first address, or at the second where another user holds that one."""
        first = first_address(name)
        desk = self._listen(name, first)
        if desk is not None:
            return desk
        holding = holder(first)
        second = second_address(name, make=True)
        desk = None if second is None else self._listen(name, second)
        if desk is None:
            raise taken(name, holding)
        log.warning("user %s holds this daemon's address: it listens at a second one", holding)
        return desk

    def _listen(self, name: str, address: str) -> Desk | None:
        """The desk at this address; None where another user holds it.

        Raises:
            UnavailableError: our own daemon does.
        """
        if not self._embedded and made_way(address):
            log.info("an embedded daemon named %r made way; it goes with its last client", name)
        for _ in range(_TRIES):
            desk = self._desk_at(address)
            if desk is not None:
                return desk
            uid = holder(address)
            if uid == os.getuid():
                raise UnavailableError(f"a daemon named {name!r} serves you already")
            if uid is not None:
                return None
            time.sleep(_TRY_S)  # it may have ended just now
        return None

    def _desk_at(self, address: str) -> Desk | None:
        try:
            return Desk(address, self.node, self._epoll, limit=self._config.daemon.max_connections)
        except OSError as e:
            if e.errno == errno.EADDRINUSE:
                return None
            raise

    def call_soon(self, call: Callable[[], None]) -> None:
        """Have the loop thread run this; callable from any thread."""
        self._calls.append(call)
        os.eventfd_write(self._wake, 1)

    def stop(self, now: bool) -> None:
        """Drain and end: at once, or once all clients have left."""
        self.desk.stop_listening()
        self._leaving = True
        if now and self.node.state != "draining":
            log.info("draining")
            self.node.state = "draining"
            self.node.registry.drain()
            self._notify.stopping()
            self._drain_by = time.monotonic() + _DRAIN_S

    def say_ready(self) -> None:
        """Clients may come; whoever started us is waited for until it lets go of the pipe."""
        if self._ready_fd >= 0:
            _write(self._ready_fd, "1")
            self._epoll.register(self._ready_fd, 0)  # tells of an error, always

    def run(self) -> None:
        """Serve until stopped."""
        self._notify.ready(self._status())
        log.info("ready: %s", self._status())
        more = False
        while not self._finished(time.monotonic()):
            ready = self._epoll.poll(0 if more else self._pace(time.monotonic()), 64)
            more = self._turn([fd for fd, _ in ready], time.monotonic())
        log.info("ended")

    def close(self) -> None:
        """Give everything back."""
        self.desk.close()
        if self._page is not None:
            self._page.close()
        self.node.close()
        self.line.close()
        self._context.term()
        self._notify.close()
        if self._ready_fd >= 0:
            self._unexpect()
        self._epoll.close()
        os.close(self._wake)

    # --- the loop -----------------------------------------------------------------------------

    def _turn(self, ready: list[int], now: float) -> bool:
        """One round; whether there is more to do at once."""
        for fd in ready:
            if fd == self._ready_fd:
                self._unexpect()
            elif fd == self._wake:
                os.eventfd_read(fd)  # before the calls are taken: none is missed
            elif self.desk.handles(fd):
                self.desk.ready(fd, now)
        more = self.line.turn()
        more |= self._take_calls()
        if self.node.poll_boards():
            self._moved = now
        self._timers(time.monotonic())
        return more or self.line.more()

    def _take_calls(self) -> bool:
        for _ in range(_CALLS):
            if not self._calls:
                return False
            try:
                self._calls.popleft()()
            except Exception:  # what one client had done elsewhere is no reason to leave the others
                log.exception("a call from another thread failed")
            self.node.beat(time.monotonic())
        return True

    def _pace(self, now: float) -> float:
        """Seconds to sleep at most."""
        if not self.node.registry.sessions:
            return 0.1 if self._leaving else 0.5
        return min(max((now - self._moved) / 8, _QUICK_S), BEAT_S)

    def _timers(self, now: float) -> None:
        self.node.beat(now)
        if now - self._ticked < _TICK_S:
            return
        self._ticked = now
        self.desk.sweep(now)
        if self.node.state == "serving":
            self.node.forget_idle()
            if self.node.registry.sessions:
                self.node.tick()
        if self._reload:
            self._reload = False
            self._read_settings_again()
        if self._notify.watchdog_s and now - self._watched >= self._notify.watchdog_s / 2:
            self._watched = now
            self._notify("WATCHDOG=1", f"STATUS={self._status()}")

    def _finished(self, now: float) -> bool:
        if self.desk.clients:
            self._alone_since = None
            if self.node.state != "draining":
                return False
            quiet = not self.node.fetcher.pending and now > self._drain_by - _DRAIN_S + _LAST_WORD_S
            return quiet or now > self._drain_by
        if self._leaving:
            return True
        if not self._embedded or self._ready_fd >= 0:
            return False
        if self.desk.patrons:
            self._alone_since = None
            return False
        self._alone_since = self._alone_since or now
        if now - self._alone_since > self._config.daemon.linger_s:
            log.info("no client left")
            return True
        return False

    def _unexpect(self) -> None:
        """Whoever started us has come, or will not."""
        self._epoll.unregister(self._ready_fd)
        os.close(self._ready_fd)
        self._ready_fd = -1

    def _send(self, who: bytes, message: Any) -> None:
        self.line.send(who, message)

    def _status(self) -> str:
        node = self.node
        return (
            f"{node.state} as {self._config.daemon.name!r}: clients {self.desk.clients},"
            f" sessions {len(node.registry.sessions)}, memory {node.arena.nbytes >> 20} MiB"
        )

    # --- settings and signals -----------------------------------------------------------------

    def _serve_metrics(self) -> None:
        if not self._config.daemon.metrics:
            return

        def told() -> dict[str, Any]:
            answer: dict[str, Any] = metrics.take_by(self.call_soon, self.node.told)
            return answer

        self._page = metrics.Page(self._config.daemon.metrics, told)

    def install_signals(self) -> None:
        """SIGTERM and SIGINT drain, SIGHUP reads the settings again, SIGUSR2 prints all stacks."""

        def drain(number: int, frame: FrameType | None) -> None:
            del number, frame
            self.call_soon(lambda: self.stop(True))

        def reload(number: int, frame: FrameType | None) -> None:
            del number, frame
            self._reload = True
            self.call_soon(lambda: None)

        signal.signal(signal.SIGTERM, drain)
        signal.signal(signal.SIGINT, signal.SIG_IGN if self._embedded else drain)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if self._embedded else reload)
        faulthandler.register(signal.SIGUSR2, all_threads=True)

    def _read_settings_again(self) -> None:
        self._notify.reloading()
        try:
            fresh, _ = Config.load(self._flags)
        except ConfigError as e:
            log.error("the settings stay as they are: %s", e)  # noqa: TRY400  a sentence says it
        else:
            old, new = self._config.flat(), fresh.flat()
            for key in [k for k in new if new[k] != old[k]]:
                effect = "from now on" if key in _AT_ONCE else "from the next start on"
                log.info("%s = %r (was %r), %s", key, new[key], old[key], effect)
            self._config = self.node.config = fresh
            self.node.effective = _with(self.node.effective, fresh, _AT_ONCE)
            set_up_logging(fresh.daemon.log_level, as_json=fresh.daemon.log_json)
        self._notify.ready(self._status())


def _with(config: Config, fresh: Config, keys: frozenset[str]) -> Config:
    """`config` with these keys' values out of `fresh`."""
    parts: dict[str, dict[str, object]] = {}
    for key, value in config.flat().items():
        section, _, name = key.partition(".")
        parts.setdefault(section, {})[name] = fresh.flat()[key] if key in keys else value
    return msgspec.convert(parts, Config)


_AT_ONCE = frozenset(
    f"daemon.{name}"
    for name in ("log_level", "log_json", "linger_s", "idle_s", "max_idle_datasets")
)


def serve(
    config: Config,
    flags: Mapping[str, object] | None = None,
    *,
    embedded: bool = False,
    ready_fd: int = -1,
) -> int:
    """Be the daemon until told to stop; the exit code.

    Args:
        flags: see Daemon.
        embedded: leave `daemon.linger_s` after the last client has.
        ready_fd: a pipe that gets "1" once clients may come, or "0" and the reason why not.
    """
    set_up_logging(config.daemon.log_level, as_json=config.daemon.log_json)
    sys.setswitchinterval(_SWITCH_S)
    try:
        daemon = Daemon(config, flags, embedded=embedded, ready_fd=ready_fd)
    except (CreelError, OSError) as e:
        _tell(ready_fd, f"0{e}")
        log.log(logging.DEBUG if embedded else logging.ERROR, "%s", e)
        return 2 if isinstance(e, ConfigError) else 1
    os.chdir("/")  # keep no mount busy; relative paths mean nothing here
    try:
        daemon.install_signals()
        daemon.say_ready()
        daemon.run()
    finally:
        daemon.close()
    return 0


def _tell(fd: int, text: str) -> None:
    if fd >= 0:
        _write(fd, text)
        os.close(fd)


def _write(fd: int, text: str) -> None:
    try:
        os.write(fd, text.encode())
    except OSError:
        log.debug("nobody waits for this daemon any more")


def main(argv: Sequence[str] | None = None) -> int:
    """The `creeld` command."""
    parser = argparse.ArgumentParser(
        prog="creeld", description="The daemon that keeps training fed; see `creel run`."
    )
    parser.add_argument("--name", help="which daemon of this user (CREEL_SOCKET)")
    parser.add_argument("--memory", metavar="SIZE", help='budget: "64GiB", "50%%" or "auto"')
    parser.add_argument("--log-level", choices=["debug", "info", "warning", "error", "critical"])
    parser.add_argument("--metrics", metavar="ADDRESS", help='for Prometheus: "127.0.0.1:9464"')
    parser.add_argument("--embedded", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ready-fd", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--config-fd", type=int, default=-1, help=argparse.SUPPRESS)
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
        _tell(args.ready_fd, f"0{e}")
        return 2
    return serve(config, flags, embedded=args.embedded, ready_fd=args.ready_fd)


def _handed_over(fd: int) -> Config:
    """The settings of the loader that starts this daemon."""
    with open(fd, "rb") as f:
        return msgspec.json.decode(f.read(), type=Config)
