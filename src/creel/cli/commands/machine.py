"""Subcommands about this machine and the settings."""

from __future__ import annotations

from typing import Any

import click

from creel.cli.commands.options import (
    FAILED,
    client_of,
    config_of,
    json_option,
    print_answer,
)


@click.command()
@click.argument("path", default="")
@click.option("--nodes", default="", metavar="HOSTS", help="Other nodes of the job, or auto.")
@click.option("--port", default=29610, show_default=True, help="Where nodes meet for --nodes.")
@json_option
@click.pass_context
def doctor(context: click.Context, path: str, nodes: str, port: int, *, as_json: bool) -> int:
    """Check this machine for what would slow creel down.

    Kernel, limits, versions, two daemons, what others may read, and the jobs that a daemon serves;
    a remedy for each.
    With PATH (a folder, a file or an address) also the storage of the dataset there: time to look
    at a file, stripes on Lustre, keys and region of S3, a disk tier slower than it. With --nodes
    auto, run by srun on all nodes of a job, the network between them. Exits with 1 if something
    does not work.
    """
    from creel.cli import doctor

    def ask(command: str) -> dict[str, Any]:
        with client_of(context) as client:
            return dict(client.ask(command))

    findings = list(doctor.checks(config_of(context), ask, path=path, hosts=nodes, port=port))
    ok = all(check.level != "bad" for check in findings)
    answer = {"ok": ok, "checks": [check.values() for check in findings]}
    print_answer(answer, as_json, lambda _: doctor.show(findings))
    return 0 if ok else FAILED


@click.command()
@json_option
def env(*, as_json: bool) -> None:
    """Print versions and limits, for bug reports."""
    from creel.cli import doctor
    from creel.cli.watching import view

    print_answer(doctor.environment(), as_json, lambda values: view.pairs(values.items()))


@click.group()
def config() -> None:
    """Show the settings."""


@config.command()
@click.option("--origin", is_flag=True, help="Show where each value came from.")
@json_option
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
