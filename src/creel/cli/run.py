"""`creel run`: run a daemon for the duration of a command, or in the foreground."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from creel.config import Config
from creel.errors import ConfigError, NoDaemonError, UnavailableError

_START_S = 15.0  # a daemon is ready within one second; a cold parallel file system may need more
_STOP_S = 10.0
_USAGE = 2  # exit code of a daemon that cannot meet its settings, which it has reported
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def daemon_env(config: Config) -> dict[str, str]:
    """Return the environment for a daemon of this configuration and its clients."""
    return dict(os.environ) | {
        "CREEL_SOCKET": config.daemon.name,
        "CREEL_MEMORY__BUDGET": config.memory.budget,
    }


def check_command(word: str) -> None:
    """Raise ConfigError unless the program exists."""
    if shutil.which(word) is None:
        raise ConfigError(f"program not found: {word!r}")


def serve(config: Config) -> int:
    os.environ.update(daemon_env(config))
    from creel.daemon.main import main

    return int(main([]) or 0)


def around(config: Config, command: Sequence[str]) -> int:
    """Start a daemon, run `command` with it, stop it; return the command's exit code.

    Raises:
        ConfigError: no such command, or settings that cannot be met.
        UnavailableError: the daemon did not start.
    """
    env = daemon_env(config)
    words = [sys.executable, "-P"] if sys.version_info >= (3, 11) else [sys.executable]
    command_line = [*words, "-m", "creel.daemon"]
    # Its own session: Ctrl-C is for the command, which may continue and then needs the daemon.
    daemon = subprocess.Popen(command_line, env=env, start_new_session=True)  # noqa: S603 - ours
    try:
        _await(daemon, config.daemon.name)
        return _run(command, env)
    finally:
        _stop(daemon)


def _await(daemon: subprocess.Popen[bytes], name: str) -> None:
    """Return once the daemon answers at its address."""
    from creel.loader.client.client import Client

    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        try:
            client = Client.connect(name, "cli")
        except NoDaemonError:
            if daemon.poll() == _USAGE:
                raise ConfigError("the daemon cannot start with these settings") from None
            if daemon.poll() is not None:
                raise UnavailableError(f"the daemon ended with {daemon.returncode}") from None
            time.sleep(0.02)
            continue
        theirs = client.daemon_pid
        client.close()
        if theirs != daemon.pid:
            raise UnavailableError(f"another daemon (pid {theirs}) is already named {name!r}")
        return
    raise UnavailableError(f"the daemon did not answer within {_START_S:.0f} s")


def _run(command: Sequence[str], env: dict[str, str]) -> int:
    try:
        child = subprocess.Popen(command, env=env)  # noqa: S603 - the command the user gave
    except OSError as e:
        raise ConfigError(f"{command[0]}: {e.strerror}") from e
    with _forwarding(child):
        while True:
            try:
                code = child.wait()
                break
            except KeyboardInterrupt:  # the terminal has signalled the child as well: let it decide
                continue
    return code if code >= 0 else 128 - code


@contextmanager
def _forwarding(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Forward signals that were meant for the command."""
    before = {s: signal.signal(s, lambda number, _: child.send_signal(number)) for s in _FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
