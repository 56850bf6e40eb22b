"""The `creel` command. Modules other than click are imported on use, so --help is instant."""

from __future__ import annotations

import io
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from creel.cli.shipped import example, pbs_group, service, slurm_group
from creel.errors import ConfigError, CreelError, NoDaemonError
from creel.version import VERSION

if TYPE_CHECKING:
    from creel.config import Config
    from creel.loader.client.client import Client

_FAILED, _USAGE, _NO_DAEMON, _INTERRUPTED = 1, 2, 3, 130
_WORDS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def main(args: list[str] | None = None) -> int:
    """Run the command line and return its exit code (docs/cli.md)."""
    from creel.daemon.reporting.logs import open_standard_files

    open_standard_files()
    color = False if os.environ.get("NO_COLOR") else None  # no-color.org; None: on a terminal
    state: dict[str, Any] = {}
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # its encoding may lack characters of a name
            stream.reconfigure(errors="replace")
    out = sys.stdout
    try:
        code = creel.main(args, prog_name="creel", standalone_mode=False, color=color, obj=state)
    except click.ClickException as e:
        e.show()
        # an unknown option ends the parsing before --json is seen
        state["json"] = state.get("json") or "--json" in (sys.argv if args is None else args)
        _print_error(state, e.format_message())
        return e.exit_code
    except (KeyboardInterrupt, click.Abort):
        return _INTERRUPTED
    except (BrokenPipeError, SystemExit) as e:  # `creel stats | head`: click exits with 1
        if isinstance(e, SystemExit) and sys.stdout is out:  # click replaces a broken pipe
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except CreelError as e:
        click.secho(f"creel: {e}", err=True, fg="red", color=color)
        _print_error(state, str(e))
        if isinstance(e, NoDaemonError):
            return _NO_DAEMON
        return _USAGE if isinstance(e, ConfigError) else _FAILED
    return code if isinstance(code, int) else 0


def _print(answer: Mapping[str, Any], as_json: bool, as_text: Callable[[Any], object]) -> None:
    """Print an answer as JSON, or as text by `as_text`."""
    from creel.cli.watching import view

    if as_json:
        view.print_json(answer)
    else:
        as_text(answer)


def _print_error(state: dict[str, Any], why: str) -> None:
    """Print an error as JSON for callers that asked for JSON and read standard output only."""
    if state.get("json"):
        from creel.cli.watching import view

        view.print_json({"error": why}, line=True)


@click.group(context_settings=_WORDS)
@click.option("--name", help="Name of the daemon (default: CREEL_SOCKET, or the configuration's).")
@click.version_option(VERSION, message="%(prog)s %(version)s")
@click.pass_context
def creel(context: click.Context, name: str | None) -> None:
    """Start, watch and check the daemon that keeps training fed.

    Training needs none of this: the first creel.DataLoader starts a daemon by itself.
    """
    context.obj["flags"] = {"daemon.name": name}


def _remember_json(context: click.Context, _: click.Parameter, value: bool) -> bool:
    context.obj["json"] = value
    return value


def _refuse_nan(_: click.Context, __: click.Parameter, value: float) -> float:
    """Refuse nan, which passes every range check."""
    if math.isnan(value):
        raise click.BadParameter("nan is not a number of seconds.")
    return value


_as_json = click.option(
    "--json",
    "as_json",
    is_flag=True,
    is_eager=True,
    callback=_remember_json,
    help="Print JSON (docs/cli.md has the schema).",
)


def _seconds(
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


_interval = _seconds("--interval", 0.1, 1.0, "Seconds between updates.")


def _repeat(interval: float, as_json: bool, show: Callable[[], object]) -> None:
    """Show something again and again, until Ctrl-C."""
    import time

    while True:
        time.sleep(interval)
        if not as_json:
            click.secho(f"\n{time.strftime('%H:%M:%S')}", dim=True)
        show()


def _config(context: click.Context, **flags: object) -> Config:
    from creel.config import Config

    return Config.load({**context.obj["flags"], **flags})[0]


@contextmanager
def _client(context: click.Context) -> Iterator[Client]:
    """Yield a connection to the daemon, or raise NoDaemonError with what to do about it."""
    from creel.cli.watching.stats import connection

    with connection(_config(context).daemon.name) as client:
        yield client


# --- run, stop --------------------------------------------------------------------------------


@creel.command(context_settings={"allow_interspersed_args": False})
@click.option("--memory", metavar="SIZE", help='Memory budget: "64GiB", "50%" or "auto".')
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(context: click.Context, memory: str | None, command: tuple[str, ...]) -> int:
    """Run COMMAND with a daemon of its own.

    The daemon stops afterwards, and the exit code is COMMAND's. Without COMMAND: serve in the
    foreground until SIGTERM or Ctrl-C, as creeld does.
    """
    from creel.cli import run
    from creel.cli.watching import stats

    if sys.platform != "linux":
        raise ConfigError(stats.ELSEWHERE)
    if not command:
        return run.serve(_config(context, **{"memory.budget": memory}))
    run.check_command(command[0])
    if context.obj["flags"]["daemon.name"] is None:
        context.obj["flags"]["daemon.name"] = f"run-{os.getpid()}"
    return run.around(_config(context, **{"memory.budget": memory}), command)


@creel.command()
@click.option(
    "--now", is_flag=True, help="Stop at once, without waiting for clients to disconnect."
)
@_as_json
@click.pass_context
def stop(context: click.Context, *, now: bool, as_json: bool) -> None:
    """Stop the daemon."""
    with _client(context) as client:
        client.ask("stop", now=now)
    when = "now" if now else "once its clients have disconnected"
    _print({"stopping": when}, as_json, lambda _: click.echo(f"stopping {when}", err=True))


# --- status, stats, top -----------------------------------------------------------------------


@creel.command()
@_as_json
@click.pass_context
def status(context: click.Context, *, as_json: bool) -> None:
    """Show whether a daemon runs, and what uses it."""
    from creel.cli.watching import view

    with _client(context) as client:
        answer = client.ask("status")
    _print(answer, as_json, lambda values: view.pairs(view.status_pairs(values)))


@creel.command()
@click.option("--watch", is_flag=True, help="Repeat until Ctrl-C.")
@click.option("--why", is_flag=True, help="Say what training waited for, and what would help.")
@click.option("--bad", is_flag=True, help="List the samples that could not be read.")
@click.option("--run", is_flag=True, help="Of the latest run, not since the daemon's start.")
@_interval
@_as_json
@click.pass_context
def stats(
    context: click.Context, /, *, watch: bool, why: bool, bad: bool, run: bool, **how: Any
) -> None:
    """Show hits, source reads, evictions, and stalls by cause."""
    from creel.cli.watching import stats as show

    if watch + why + bad > 1:
        raise click.UsageError("one of --watch, --why and --bad at a time")
    if run and (why or bad):
        raise click.UsageError("--run is for counters: --why and --bad have none")
    interval: float = how["interval"]
    as_json: bool = how["as_json"]
    of = {"run": True} if run else {}
    with _client(context) as client:
        if why:
            show.reasons(client, as_json=as_json)
            return
        if bad:
            show.bad_samples(client.ask("bad_samples"), as_json=as_json)
            return

        def counters() -> None:
            show.counters(client.ask("stats", **of), as_json=as_json, line=watch)

        counters()
        if watch:
            _repeat(interval, as_json, counters)


@creel.command()
@_interval
@click.pass_context
def top(context: click.Context, interval: float) -> None:
    """Show live statistics; quit with q or Ctrl-C."""
    from creel.cli.watching import top

    if not (sys.stdout.isatty() and sys.stdin.isatty()):
        raise click.UsageError("top needs a terminal; use `creel stats --watch` in a pipe")
    if os.environ.get("TERM", "").lower() in {"dumb", "unknown"}:  # rich draws nothing there
        raise click.UsageError("this terminal cannot redraw (TERM); use `creel stats --watch`")
    with _client(context) as client:
        top.show(lambda: client.ask("stats"), lambda: client.ask("status"), interval)


@creel.command()
@click.argument("out", type=click.Path(dir_okay=False))
@_seconds("--seconds", 0.001, 10.0, "How far back it goes.")
@_as_json
@click.pass_context
def trace(context: click.Context, out: str, *, seconds: float, as_json: bool) -> None:
    """Write the last batches as a timeline for Perfetto or Chrome.

    OUT is the file to write. The batches are those of all ranks of this node.
    """
    from creel.cli.watching import trace

    with _client(context) as client:
        told = trace.trace(client, out, seconds)
    _print(told, as_json, lambda values: click.echo(trace.sentence(values)))


# --- warm, simulate, verify -------------------------------------------------------------------


@creel.command()
@click.argument("target")
@click.option("--time", "limit", metavar="DURATION", help='Load no more after this: "90s", "10m".')
@click.option("--background", is_flag=True, help="Return once loading has begun.")
@_as_json
@click.pass_context
def warm(
    context: click.Context, target: str, *, limit: str | None, background: bool, as_json: bool
) -> None:
    """Load a folder, a file, shards or a dataset into memory.

    TARGET is a path, an address, or MODULE:DATASET of your program. A folder is loaded for
    creel.ImageFolder, FileDataset or TarDataset; for a dataset of your own, name it. A daemon is
    started if none runs. It stays for an hour after its last client.
    """
    from creel.cli import warm
    from creel.units import parse_seconds

    if limit is not None and background:
        raise click.UsageError("--time waits for the end, --background does not: give one of them")
    time_s = math.inf if limit is None else parse_seconds(limit)
    config = _config(context)
    with warm.daemon(config) as client:
        where = client, target, config.daemon.name
        result = warm.warm(*where, quiet=as_json, time_s=time_s, background=background)
    _print(result, as_json, lambda values: click.echo(warm.sentence(values)))


@creel.command()
@_as_json
@click.pass_context
def ls(context: click.Context, *, as_json: bool) -> None:
    """List the datasets that the daemon holds, and how much of each."""
    from creel.cli.watching import view

    with _client(context) as client:
        answer = client.ask("datasets")
    _print(answer, as_json, lambda values: view.datasets(values["datasets"]))


@creel.command()
@click.argument("dataset")
@_as_json
@click.pass_context
def drop(context: click.Context, dataset: str, *, as_json: bool) -> None:
    """Free what the daemon holds of a dataset.

    DATASET is a path, for all that lie there, or the first letters of a key (`creel ls`).
    """
    with _client(context) as client:
        path = str(Path(dataset).absolute()) if Path(dataset).exists() else dataset.rstrip("/")
        answer = client.ask("drop", dataset=path)
    several = f" ({answer['dropped']} datasets)" if answer["dropped"] > 1 else ""
    what = f"dropped {answer['path'] or answer['dataset']}{several}"
    _print(answer, as_json, lambda _: click.echo(what))


@creel.command()
@click.option("--nodes", type=click.IntRange(1), required=True, help="Nodes of the cluster.")
@click.option("--samples", metavar="COUNT", required=True, help='Samples of the dataset: "14.2M".')
@click.option("--sample-size", metavar="SIZE", required=True, help='Size of a sample: "110KB".')
@click.option(
    "--memory", metavar="SIZE", required=True, help='Memory of each node for samples: "256GiB".'
)
@click.option("--batch", type=click.IntRange(1), required=True, help="Samples per rank and step.")
@click.option(
    "--ranks", type=click.IntRange(1), default=1, show_default=True, help="Ranks per node."
)
@click.option(
    "--epochs", type=click.IntRange(1), default=5, show_default=True, help="Epochs to replay."
)
@click.option(
    "--link", metavar="SIZE", default="0", help="Bytes per second of a node's link: 10GB."
)
@click.option("--source", metavar="SIZE", default="0", help="Bytes per second of the source: 5GB.")
@click.option(
    "--opens", metavar="COUNT", default="0", help="Files that the source opens per second."
)
@click.option("--step", metavar="DURATION", default="0", help='Time to compute a step: "250ms".')
@click.option(
    "--window", type=click.IntRange(1), default=8, show_default=True, help="Steps read ahead."
)
@click.option("--depth", type=click.IntRange(1, 64), help="Epochs that placement looks ahead.")
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the job's sampler."
)
@click.option("--remap", is_flag=True, help='As DataLoader(remap="global-batch").')
@_as_json
def simulate(
    *,
    samples: str,
    sample_size: str,
    memory: str,
    link: str,
    source: str,
    opens: str,
    step: str,
    depth: int | None,
    remap: bool,
    as_json: bool,
    **counts: int,
) -> None:
    """Replay the epochs of a job on a hypothetical cluster.

    Shows source reads, transfers, memory and time. Speeds that are not given are unlimited.
    """
    from creel.cli import simulate
    from creel.policies.cluster.simulate import Scenario
    from creel.units import parse_count, parse_seconds, parse_size

    scenario = Scenario(
        samples=parse_count(samples),
        nbytes=parse_size(sample_size),
        memory=parse_size(memory),
        link_speed=parse_size(link),
        source_speed=parse_size(source),
        source_opens=parse_count(opens),
        step_s=parse_seconds(step),
        depth=depth or 0,
        remap=remap,
        **counts,
    )
    _print(simulate.simulate(scenario), as_json, simulate.show)


@creel.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--steps", type=click.IntRange(1), help="Stop after this many batches.")
@_as_json
@click.argument("target")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def verify(target: str, arguments: tuple[str, ...], *, steps: int | None, as_json: bool) -> int:
    """Compare every batch with torch's, bit for bit.

    TARGET is a SCRIPT (with ARGUMENTS), or MODULE:LOADER: a DataLoader or a function that returns
    one. Options come before it. Both sides run from equal seeds. Reports the first difference
    and exits with 1.
    """
    if target.endswith(".py") and not Path(target).is_file():  # before seconds of importing torch
        raise ConfigError(f"there is no script {target}")
    try:
        from creel.loader import verify as verification
    except ModuleNotFoundError as e:
        if e.name != "torch":
            raise
        raise ConfigError("creel verify needs torch: pip install 'creel-data[torch]'") from None

    result = verification.verify(target, arguments, steps)
    _print(result, as_json, lambda values: click.echo(verification.sentence(values)))
    return 0 if result["equal"] else _FAILED


@creel.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--steps",
    type=click.IntRange(16, 900),
    default=64,
    show_default=True,
    help="Stop after this many batches.",
)
@_seconds("--limit", 1, 600.0, "Stop after this many seconds.")
@_as_json
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def explain(
    context: click.Context,
    script: str,
    arguments: tuple[str, ...],
    *,
    steps: int,
    limit: float,
    as_json: bool,
) -> None:
    """Say what a training script will take.

    By workers and by memory, from a few of its steps. Runs SCRIPT (with ARGUMENTS) with creel's
    DataLoader in the place of torch's and a daemon of its own, and ends it after these steps.
    Options come before SCRIPT.
    """
    if not Path(script).is_file():
        raise ConfigError(f"there is no script {script}")
    from creel.cli import explain

    if context.obj["flags"]["daemon.name"] is None:
        context.obj["flags"]["daemon.name"] = f"explain-{os.getpid()}"
    told = explain.explain(_config(context), script, arguments, steps, limit)
    _print(told, as_json, explain.show)


# --- streams ----------------------------------------------------------------------------------


@creel.command()
@click.argument("path")
@click.option("--watch", is_flag=True, help="Repeat until Ctrl-C.")
@click.option("--end", is_flag=True, help="End the stream: its producers are gone for good.")
@click.option("--forget", metavar="NAME", help="Let producers go on without the reader NAME.")
@_interval
@_as_json
def stream(
    path: str, *, watch: bool, end: bool, forget: str | None, interval: float, as_json: bool
) -> None:
    """Show a stream's chunks, its rate, and how far its readers are."""
    from creel.cli.watching import stream as show

    if end:
        show.end(path)
    if forget is not None:
        show.forget(path, forget)
    _print(show.state(path), as_json and not watch, lambda values: show.show(values, as_json))
    if watch:
        _repeat(interval, as_json, lambda: show.show(show.state(path), as_json))


# --- doctor, env, config ----------------------------------------------------------------------


@creel.command()
@click.argument("path", default="")
@click.option("--nodes", default="", metavar="HOSTS", help="Other nodes of the job, or auto.")
@click.option("--port", default=29610, show_default=True, help="Where nodes meet for --nodes.")
@_as_json
@click.pass_context
def doctor(context: click.Context, path: str, nodes: str, port: int, *, as_json: bool) -> int:
    """Check this machine for what would slow creel down.

    With PATH also the storage of the dataset there; with --nodes, run by srun on all nodes of a
    job, the network between them.
    """
    from creel.cli import doctor

    def ask(what: str) -> dict[str, Any]:
        with _client(context) as client:
            return dict(client.ask(what))

    found = list(doctor.checks(_config(context), ask, path=path, hosts=nodes, port=port))
    ok = all(check.level != "bad" for check in found)
    answer = {"ok": ok, "checks": [check._asdict() for check in found]}
    _print(answer, as_json, lambda _: doctor.show(found))
    return 0 if ok else _FAILED


@creel.command()
@_as_json
def env(*, as_json: bool) -> None:
    """Print versions and limits, for bug reports."""
    from creel.cli import doctor
    from creel.cli.watching import view

    _print(doctor.environment(), as_json, lambda values: view.pairs(values.items()))


@creel.group()
def config() -> None:
    """Show the settings."""


@config.command()
@click.option("--origin", is_flag=True, help="Show where each value came from.")
@_as_json
@click.pass_context
def show(context: click.Context, *, origin: bool, as_json: bool) -> None:
    """Show every setting with its value."""
    from creel.cli.watching import view
    from creel.config import Config

    loaded, origins = Config.load(context.obj["flags"])
    values = loaded.flat()
    if as_json:
        settings = {k: {"value": v, "origin": origins[k]} for k, v in values.items()}
        view.print_json({"settings": settings})
    elif origin:
        rows = [(k, _toml(v), origins[k]) for k, v in values.items()]
        view.table(("setting", "value", "origin"), rows, left=3)
    else:
        _show_toml(values)


def _show_toml(values: dict[str, object]) -> None:
    """Print the settings as a file that can be saved as creel.toml."""
    before = ""
    for key, value in values.items():
        section, _, name = key.partition(".")
        if section != before:
            click.echo(f"{chr(10) if before else ''}[{section}]")
            before = section
        click.echo(f"{name} = {_toml(value)}")


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


# --- files that come with creel ---------------------------------------------------------------

for one in (service, slurm_group, pbs_group, example):
    creel.add_command(one)
