"""`creel service`, `creel slurm`, `creel example`: files that come with creel, to be copied.

They are in the wheel (`creel/deploy`, `creel/examples`); in a checkout these folders lie on top.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

import click

from creel.errors import ConfigError

_PACKAGE = Path(__file__).parent.parent
_UNIT = "creeld.service"
#: What stands in the files for the folder of this environment's programs.
_BIN = "/usr/bin/env "
_SHELL_BIN = "bin=/usr/bin"
SLURM = ("prolog", "task-prolog", "epilog", "job")
EXAMPLES = ("train", "train_ddp", "continual", "gray_scott")


def read(name: str) -> str:
    """Return the text of a file that comes with creel, "deploy/creeld.service" for example."""
    for folder in (_PACKAGE, _PACKAGE.parent.parent):  # installed; a checkout
        if (folder / name).is_file():
            return (folder / name).read_text()
    raise ConfigError(f"this copy of creel has no {name}: pip install --force-reinstall creel-data")


def unit() -> str:
    """Return the user's unit file, with the path of this environment's `creeld`."""
    return read(f"deploy/{_UNIT}").replace(f"{_BIN}creeld", str(_programs() / "creeld"))


def slurm(name: str) -> str:
    """Return a script for Slurm, with the folder of this environment's programs."""
    return read(f"deploy/slurm/{name}.sh").replace(_SHELL_BIN, f"bin={_programs()}")


def _programs() -> Path:
    """Return the folder of `creel` and `creeld`, which `pip install --user` puts elsewhere.

    Raises:
        ConfigError: they are nowhere: a checkout on PYTHONPATH has no programs.
    """
    scripts = (sysconfig.get_path("scripts"), sysconfig.get_path("scripts", "posix_user"))
    # A program that the shell found by PATH has a whole path here; "creel" alone, given by another
    # program, says nothing of a folder.
    ran = [Path(sys.argv[0]).parent.absolute()] if "/" in sys.argv[0] else []
    for folder in (*ran, *map(Path, scripts)):
        if (folder / "creeld").is_file():
            return folder
    raise ConfigError("this environment has no creeld: pip install creel-data")


def _unit_path() -> Path:
    """Return where the user's service manager looks for the unit."""
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(config) / "systemd" / "user" / _UNIT


@click.group()
def service() -> None:
    """Run creeld under your systemd."""


@service.command(name="show")
def show_service() -> None:
    """Print the unit file, with the path of this environment's creeld."""
    click.echo(unit(), nl=False)


@service.command()
@click.option("--force", is_flag=True, help="Replace a unit file that is there and differs.")
def install(*, force: bool) -> None:
    """Write the unit file to your own systemd's folder, and say how to start it.

    Needs no root. Starts nothing.
    """
    path, text = _unit_path(), unit()
    if not force and path.exists() and path.read_text() != text:
        raise ConfigError(f"{path} differs from creel's: --force replaces it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as e:
        raise ConfigError(f"{path} cannot be written: {e.strerror}") from e
    click.echo(f"wrote {path}")
    click.echo("start it: systemctl --user daemon-reload && systemctl --user enable --now creeld")


@click.group(name="slurm")
def slurm_group() -> None:
    """Run a daemon for each Slurm job."""


@slurm_group.command(name="show")
@click.argument("name", type=click.Choice(SLURM))
def show_slurm(name: str) -> None:
    """Print a script for Slurm: prolog, task-prolog and epilog of slurm.conf, or a job."""
    click.echo(slurm(name), nl=False)


@click.command()
@click.argument("name", type=click.Choice(EXAMPLES))
def example(name: str) -> None:
    """Print a program to begin with.

    train; train_ddp, for several processes; continual, with a memory of earlier tasks; gray_scott,
    a simulation that streams to two models.
    """
    click.echo(read(f"examples/{name}.py"), nl=False)
