"""`creel run`: run a daemon for the duration of a command, or in the foreground; `creeld`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import click

from creel.config import Config
from creel.errors import ConfigError, UnavailableError
from creel.version import VERSION

_START_S = 15.0  # usually one second; more from a cold parallel file system
_STOP_S = 10.0
_STDERR = 2
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def daemon_env(config: Config) -> dict[str, str]:
    """Return the environment for a daemon of this configuration and for its clients."""
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


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--name", help="Name of the daemon (default: CREEL_SOCKET, or the configuration's).")
@click.option("--memory", metavar="SIZE", help='Memory budget: "64GiB", "50%" or "auto".')
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error", "critical"]))
@click.option("--metrics", metavar="ADDRESS", help='Serve Prometheus here: "127.0.0.1:9464".')
@click.version_option(VERSION, prog_name="creeld", message="%(prog)s %(version)s")
@click.pass_context
def creeld(context: click.Context, /, **options: str | None) -> None:
    """Run the daemon that keeps training fed, in the foreground until SIGTERM or Ctrl-C.

    `creel service install` runs it as a service.
    """
    from creel.daemon.main import main

    given = {f"--{name.replace('_', '-')}": value for name, value in options.items() if value}
    context.exit(main([word for pair in given.items() for word in pair]))


def around(config: Config, command: Sequence[str]) -> int:
    """Start a daemon, run `command` with it, stop it; return the command's exit code.

    Runs it without a daemon of its own, after a warning, if that does not start for any reason:
    training then reads directly, or through the daemon that has the name.

    Raises:
        ConfigError: no such command.
    """
    with ExitStack() as stack:
        try:
            refuse_name_in_use(config.daemon.name)
            stack.enter_context(own_daemon(config))
        except Exception as e:  # noqa: BLE001  also MemoryError, or a library that cannot be mapped
            reason = str(e) or type(e).__name__
            click.echo(f"creel: {reason}; {command[0]} runs without a daemon of its own", err=True)
        return _run(command, daemon_env(config))


def refuse_name_in_use(name: str) -> None:
    """Raise UnavailableError if a daemon of that name answers."""
    from creel.loader.client.client import Client

    pid = 0
    with suppress(UnavailableError, OSError), Client.connect(name, "cli") as client:
        pid = client.daemon_pid
    if pid:
        raise UnavailableError(f"another daemon (pid {pid}) is already named {name!r}")


@contextmanager
def own_daemon(config: Config) -> Iterator[None]:
    """Run a daemon inside the `with`. If this process is killed, it ends with its last client."""
    from creel.loader.client.client import Client
    from creel.loader.client.embed import DaemonStart

    name = config.daemon.name
    start = DaemonStart(config, log_fd=_STDERR)
    try:
        report = start.report(_START_S)
        if report.startswith("0"):
            raise ConfigError(f"the daemon cannot start with these settings: {report[1:]}")
        if not report:
            raise UnavailableError(f"the daemon ended, or did not answer within {_START_S:.0f} s")
        with Client.connect(name, "cli") as client:
            pid = client.daemon_pid
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                if not start.reported():  # the daemon has started and not ended
                    os.kill(pid, number)
                    start.reported(_STOP_S)
    finally:
        start.close()


def _run(command: Sequence[str], env: dict[str, str]) -> int:
    with _ctrl_c_for_the_command():
        try:
            child = subprocess.Popen(command, env=env)  # noqa: S603 - the command the user gave
        except OSError as e:
            raise ConfigError(f"{command[0]}: {e.strerror}") from e
        with _forwarding(child):
            code = child.wait()
    return code if code >= 0 else 128 - code


@contextmanager
def _ctrl_c_for_the_command() -> Iterator[None]:
    """Do nothing on SIGINT: the terminal sends it to the command, too, which decides."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:  # which the command inherits, as it inherits no handler
        signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _forwarding(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Forward signals to the command inside the `with`."""
    before = {s: signal.signal(s, lambda number, _: child.send_signal(number)) for s in _FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
