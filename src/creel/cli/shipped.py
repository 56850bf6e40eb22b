"""`creel service`, `slurm`, `pbs`, `example`: files that come with creel, to be copied.

They are in the wheel (`creel/deploy`, `creel/examples`); in a checkout these folders lie on top.
"""

from __future__ import annotations

import json
import os
import shlex
import stat
import sys
import sysconfig
from pathlib import Path

import click

from creel.errors import ConfigError

_PACKAGE = Path(__file__).parent.parent
#: The user's own unit, and the machine's template for one daemon of each user.
_UNIT, _TEMPLATE = "creeld.service", "creeld@.service"
_SYSTEM = Path("/etc/systemd/system")
#: What stands in the files for the folder of this environment's programs.
_BIN = "/usr/bin/env "
_SHELL_BIN, _HOOK_BIN = "bin=/usr/bin", 'BIN = "/usr/bin"'
SLURM = ("prolog", "task-prolog", "epilog", "job")
EXAMPLES = ("train", "train_ddp", "continual", "gray_scott")


def read(name: str) -> str:
    """Return the text of a file that comes with creel, "deploy/creeld.service" for example."""
    for folder in (_PACKAGE, _PACKAGE.parent.parent):  # installed; a checkout
        if (folder / name).is_file():
            return (folder / name).read_text()
    raise ConfigError(f"this copy of creel has no {name}: pip install --force-reinstall creel-data")


def unit(*, system: bool = False) -> str:
    """Return the unit file of a user or of the system, with this environment's `creeld`."""
    text = read(f"deploy/{_TEMPLATE if system else _UNIT}")
    return text.replace(f"{_BIN}creeld", _systemd_word(_programs() / "creeld"))


def slurm(name: str) -> str:
    """Return a script for Slurm, with the folder of this environment's programs."""
    return read(f"deploy/slurm/{name}.sh").replace(
        _SHELL_BIN, f"bin={shlex.quote(str(_programs()))}"
    )


def pbs() -> str:
    """Return the hook for PBS, with the folder of this environment's programs."""
    literal = json.dumps(str(_programs()), ensure_ascii=False)  # also a literal of Python's
    return read("deploy/pbs/hook.py").replace(_HOOK_BIN, f"BIN = {literal}")


def _systemd_word(path: Path) -> str:
    """Return a path as one word of a unit's line (systemd.syntax, "Quoting")."""
    text = str(path).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{text}"' if set(text) & set(" \t\"'\\") else text


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


def _closed_folder() -> Path | None:
    """Return a folder above `creeld`, or above its Python, that other users may not enter."""
    for program in (_programs() / "creeld", Path(sys.executable).resolve()):
        for folder in program.parents:
            if not folder.stat().st_mode & stat.S_IXOTH:
                return folder
    return None


def _unit_path(*, system: bool) -> Path:
    """Return where the service manager looks for the unit."""
    if system:
        return _SYSTEM / _TEMPLATE
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(config) / "systemd" / "user" / _UNIT


@click.group()
def service() -> None:
    """Run creeld under your systemd."""


_system = click.option(
    "--system", is_flag=True, help="The machine's template creeld@USER, for daemons of any user."
)


@service.command(name="show")
@_system
def show_service(*, system: bool) -> None:
    """Print the unit file, with the path of this environment's creeld."""
    click.echo(unit(system=system), nl=False)


@service.command()
@_system
@click.option("--force", is_flag=True, help="Replace a unit file that is there and differs.")
def install(*, system: bool, force: bool) -> None:
    """Write the unit file to where systemd looks for it.

    Says how to start it. Needs no root, except for --system. Starts nothing.
    """
    path, text = _unit_path(system=system), unit(system=system)
    if not force and path.exists() and path.read_text() != text:
        raise ConfigError(f"{path} differs from creel's: --force replaces it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as e:
        raise ConfigError(f"{path} cannot be written: {e.strerror}") from e
    click.echo(f"wrote {path}")
    if system and (folder := _closed_folder()):
        click.echo(f"other users may not enter {folder}: their daemons cannot start", err=True)
    manager, name = ("systemctl", "creeld@USER") if system else ("systemctl --user", "creeld")
    click.echo(f"start it: {manager} daemon-reload && {manager} enable --now {name}")
    if not system:
        click.echo("let it run also while you are not logged in: loginctl enable-linger")


@click.group(name="slurm")
def slurm_group() -> None:
    """Run a daemon for each Slurm job."""


@slurm_group.command(name="show")
@click.argument("name", type=click.Choice(SLURM))
def show_slurm(name: str) -> None:
    """Print a script for Slurm.

    prolog, task-prolog and epilog are for slurm.conf; job is one to submit.
    """
    click.echo(slurm(name), nl=False)


@click.group(name="pbs")
def pbs_group() -> None:
    """Run a daemon for each PBS job."""


@pbs_group.command(name="show")
def show_pbs() -> None:
    """Print a hook for PBS.

    It starts a daemon with each job, and ends it with the job. It was never run under PBS.
    """
    click.echo(pbs(), nl=False)


@click.command()
@click.argument("name", type=click.Choice(EXAMPLES))
def example(name: str) -> None:
    """Print a program to begin with.

    train; train_ddp, for several processes; continual, with a memory of earlier tasks; gray_scott,
    a simulation that streams to two models.
    """
    click.echo(read(f"examples/{name}.py"), nl=False)
