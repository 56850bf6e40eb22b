"""`creel doctor` and `creel env`: what this machine allows, and how to get more."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import click

from creel import addresses
from creel.cache.memory.memfd import memfd
from creel.cli.processes import daemon_pids
from creel.config import KEY_VARIABLE, Config, config_files, memory_budget
from creel.errors import ConfigError, CreelError, NoDaemonError, UnavailableError
from creel.system import limits
from creel.units import format_size
from creel.version import VERSION

_SHM = "/dev/shm"  # noqa: S108 - only looked at
PACKAGE = "creel-data"  # as the index knows it; `creel` there is another project
_PACKAGES = ("numpy", "pyarrow", "pyzmq", "msgspec", "torch", "torchvision", "fsspec")


class Finding(NamedTuple):
    """One finding. `level` is ok, warn (slow or risky) or bad (does not work)."""

    name: str
    level: str
    found: str
    remedy: str = ""


def checks(config: Config, ask: Callable[[str], dict[str, object]]) -> Iterator[Finding]:
    """Yield all checks of this machine; `ask("status")` returns the daemon's answer or raises."""
    for look in (_system, _python, _package, _torch):
        yield look()
    if platform.system() != "Linux":  # the other checks are about a daemon, which needs Linux
        return
    for look in (_memfd, _files, _locked, _shm, _daemons):
        yield look()
    yield _memory(config)
    yield _address(config.daemon.name)
    yield _daemon(config.daemon.name, ask)


def show(found: Iterable[Finding]) -> None:
    """Print the findings, each with its remedy."""
    for one in found:
        colour = {"ok": "green", "warn": "yellow", "bad": "red"}[one.level]
        click.echo(f"{click.style(f'{one.level:<4}', fg=colour)}  {one.name:<13}  {one.found}")
        if one.remedy:
            click.echo(f"{'':19}  {click.style('-> ' + one.remedy, dim=True)}")


def _system() -> Finding:
    name = f"{platform.system()} {platform.release()}"
    if platform.system() == "Linux":
        return Finding("system", "ok", name)
    return Finding(
        "system", "bad", name, "the daemon needs Linux; here creel is torch's DataLoader"
    )


def _python() -> Finding:
    return Finding("python", "ok", f"{platform.python_version()} ({sys.executable})")


def _package() -> Finding:
    """Look for the other project that is imported as creel: files of both would be mixed."""
    other = _version("creel")
    if other != "-":
        found = f"the package creel {other} is installed, another project with this import name"
        remedy = f"pip uninstall creel, then pip install --force-reinstall --no-deps {PACKAGE}"
        return Finding("package", "warn", found, remedy)
    found = _version(PACKAGE)
    return Finding(
        "package", "ok", f"{PACKAGE} {found}" if found != "-" else "not installed by pip"
    )


def _torch() -> Finding:
    found = _version("torch")
    if found == "-":
        return Finding("torch", "warn", found, "training needs it: pip install 'creel-data[torch]'")
    return Finding("torch", "ok", found)


def _version(package: str) -> str:
    """Return the version of a package without importing it; "-" if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "-"


def _memfd() -> Finding:
    """Check sealed anonymous memory: every kernel since 3.17 has it, some sandboxes forbid it."""
    try:
        fd = memfd("creel-doctor", sealable=True)
    except OSError as e:
        return Finding(
            "memfd", "bad", str(e), "creel needs memfd_create: Linux 3.17+, not filtered"
        )
    os.close(fd)
    release = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))  # "6.10-rc7-amd64"
    if release < (5, 1):
        remedy = (
            "before Linux 5.1 clients cannot be kept from writing to the cache: update when you can"
        )
        return Finding("memfd", "warn", "no F_SEAL_FUTURE_WRITE", remedy)
    return Finding("memfd", "ok", "sealed, read-only for clients")


def _files() -> Finding:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} open files (hard limit {hard})"
    if soft < 1024:
        return Finding("descriptors", "warn", found, f"raise it: ulimit -n {min(hard, 65536)}")
    return Finding("descriptors", "ok", found)


def _locked() -> Finding:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("locked memory", "ok", "unlimited")
    if soft < 64 << 20:
        remedy = "pinning for a GPU may fail: ulimit -l unlimited"
        return Finding("locked memory", "warn", format_size(soft), remedy)
    return Finding("locked memory", "ok", format_size(soft))


def _shm() -> Finding:
    """Check /dev/shm, which creel does not use, but torch does for other tensors."""
    try:
        stat = os.statvfs(_SHM)
    except OSError as e:
        return Finding(
            _SHM, "warn", str(e), "torch's own worker transport needs it; creel's does not"
        )
    size = stat.f_frsize * stat.f_blocks
    if size < 1 << 30:
        remedy = "fine for creel; torch's own workers may fail: docker run --shm-size=8g"
        return Finding(_SHM, "warn", format_size(size), remedy)
    return Finding(_SHM, "ok", format_size(size))


def _memory(config: Config) -> Finding:
    have = limits.memory()
    found = f"{format_size(have.available)} free of {format_size(have.total)}"
    try:
        budget = memory_budget(config.memory, total=have.total, available=have.available)
    except ConfigError as e:
        return Finding("memory", "bad", found, str(e))
    found += f"; budget {format_size(budget)}"
    if budget > have.available:
        return Finding("memory", "warn", found, "more than is free now: lower memory.budget")
    return Finding("memory", "ok", found)


def _address(name: str) -> Finding:
    """Check the addresses: another user may hold one, or the daemon may see other files."""
    try:
        uid = addresses.held_by_another(name)
    except UnavailableError as e:
        return Finding("address", "bad", str(e), "mount /proc as it is for this PID namespace")
    if uid is not None:
        second = addresses.runtime_folder() is not None
        remedy = "a second one is used, with a secret" if second else "choose another daemon.name"
        return Finding("address", "warn", f"user {uid} holds it", remedy)
    pids = addresses.elsewhere(name)
    found = f"; daemons that see other files: {', '.join(map(str, pids))}" if pids else ""
    return Finding("address", "ok", f"no other user holds it{found}")


def _daemon(name: str, ask: Callable[[str], dict[str, object]]) -> Finding:
    try:
        status = ask("status")
    except NoDaemonError:
        return Finding("daemon", "ok", f"none named {name!r}; the first DataLoader will start one")
    except CreelError as e:
        remedy = "it may hang or be of another version: creel stop --now, or end its process"
        return Finding("daemon", "bad", str(e), remedy)
    found = f"{status['name']} (pid {status['pid']}, creel {status['version']})"
    if status["version"] != VERSION:
        remedy = f"this is creel {VERSION}: creel stop, and let a new one start"
        return Finding("daemon", "warn", found, remedy)
    return Finding("daemon", "ok", found)


def _daemons() -> Finding:
    """Count this user's daemons, which share nothing; each has a budget of its own."""
    pids = list(daemon_pids())
    if len(pids) > 1:
        listed = f"you run {len(pids)} (pids {', '.join(map(str, pids))})"
        return Finding(
            "daemons", "warn", listed, "each has its own budget: use one name, stop the others"
        )
    return Finding("daemons", "ok", "you run one" if pids else "you run none")


def _cpus() -> str:
    """Return the number of CPUs that this process may use."""
    return f"{limits.cores():.4g} of {os.cpu_count()}"


def environment() -> dict[str, str]:
    """Return versions and limits, to paste into an issue."""
    have = limits.memory()
    facts = {
        "creel": VERSION,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpus": _cpus(),
        "memory": f"{format_size(have.available)} free of {format_size(have.total)}",
    }
    facts |= {package: _version(package) for package in _PACKAGES}
    facts["files"] = ", ".join(map(str, config_files())) or "-"
    ours = {k: v for k, v in sorted(os.environ.items()) if k.startswith("CREEL_")}
    if KEY_VARIABLE in ours:
        ours[KEY_VARIABLE] = "(a key, not shown)"
    return facts | ours
