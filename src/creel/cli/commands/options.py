"""What the subcommands share: options, the connection to the daemon, and how they answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from creel.errors import ConfigError, CreelError

if TYPE_CHECKING:
    from creel.config import Config
    from creel.loader.client.client import Client

FAILED = 1  # exit code


def print_answer(
    answer: Mapping[str, Any], as_json: bool, as_text: Callable[[Any], object]
) -> None:
    """Print an answer as JSON, or as text by `as_text`."""
    from creel.cli.watching import view

    if as_json:
        view.print_json(answer)
    else:
        as_text(answer)


def _remember_json(context: click.Context, _: click.Parameter, value: bool) -> bool:
    context.obj["json"] = value
    return value


def _refuse_nan(_: click.Context, __: click.Parameter, value: float) -> float:
    """Refuse nan, which passes every range check."""
    if math.isnan(value):
        raise click.BadParameter("nan is not a number of seconds.")
    return value


json_option = click.option(
    "--json",
    "as_json",
    is_flag=True,
    is_eager=True,
    callback=_remember_json,
    help="Print JSON (docs/json.md has the schema).",
)


def seconds_option(
    option: str, least: float, default: float, text: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return an option whose value is a number of seconds, up to a day."""
    return click.option(
        option,
        type=click.FloatRange(least, 86_400),
        callback=_refuse_nan,
        default=default,
        show_default=True,
        help=text,
    )


interval_option = seconds_option("--interval", 0.1, 1.0, "Seconds between updates.")


def repeat(interval: float, as_json: bool, show: Callable[[], object]) -> None:
    """Show something again and again, until Ctrl-C."""
    import time

    while True:
        time.sleep(interval)
        if not as_json:
            click.secho(f"\n{time.strftime('%H:%M:%S')}", dim=True)
        show()


def config_of(context: click.Context, **flags: object) -> Config:
    from creel.config import Config

    return Config.load({**context.obj["flags"], **flags})[0]


@contextmanager
def script_of(context: click.Context, arguments: Sequence[str]) -> Iterator[None]:
    """Add to a failure inside that options of this command stand among the script's arguments."""
    try:
        yield
    except (CreelError, ConfigError) as e:
        ours = {
            name for p in context.command.params if isinstance(p, click.Option) for name in p.opts
        }
        given = [word for word in arguments if word.partition("=")[0] in ours]
        if not given or type(e) not in {CreelError, ConfigError}:
            raise
        words = f"{given[0]!r} went to the script: options of {context.command_path} come before it"
        raise type(e)(f"{e}; {words}") from None


@contextmanager
def client_of(context: click.Context) -> Iterator[Client]:
    """Yield a connection to the daemon, or raise NoDaemonError with what to do about it."""
    from creel.cli.watching.stats import connection

    with connection(config_of(context).daemon.name) as client:
        yield client
