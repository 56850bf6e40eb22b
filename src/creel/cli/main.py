"""The `creel` command. Modules other than click are imported on use, so --help is instant."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

import click

from creel.cli.commands import daemon, machine, trying, watching
from creel.cli.commands.options import FAILED
from creel.cli.shipped import example, pbs_group, service, slurm_group
from creel.errors import ConfigError, CreelError, NoDaemonError
from creel.version import VERSION

_USAGE, _NO_DAEMON, _INTERRUPTED = 2, 3, 130
_WORDS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def main(args: list[str] | None = None) -> int:
    """Run the command line and return its exit code (docs/json.md)."""
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
        return _USAGE if isinstance(e, ConfigError) else FAILED
    return code if isinstance(code, int) else 0


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


for command in (
    *(daemon.run, daemon.stop, daemon.status, daemon.warm, daemon.ls, daemon.drop),
    *(watching.stats, watching.top, watching.trace, watching.plot, watching.stream),
    *(trying.simulate, trying.verify, trying.explain),
    *(machine.doctor, machine.env, machine.config),
    *(service, slurm_group, pbs_group, example),
):
    creel.add_command(command)
