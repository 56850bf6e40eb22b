"""`creel doctor` and `creel env`: what this machine allows, and how to get more."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click

from creel import addresses
from creel.cache.memory.memfd import memfd
from creel.cli.checks import dataset, exposed, nodes, running
from creel.cli.checks.finding import Finding, judged
from creel.cli.processes import daemon_pids
from creel.config import KEY_VARIABLE, Config, config_files, memory_budget
from creel.errors import ConfigError, CreelError, NoDaemonError, UnavailableError
from creel.system import limits
from creel.units import format_size
from creel.version import VERSION

_SHM = "/dev/shm"  # noqa: S108 - only looked at
PACKAGE = "creel-data"  # as the index knows it; `creel` there is another project
_PACKAGES = ("numpy", "pyarrow", "pyzmq", "msgspec", "torch", "torchvision", "fsspec")


def checks(
    config: Config,
    ask: Callable[[str], dict[str, Any]],
    *,
    path: str = "",
    hosts: str = "",
    port: int = 0,
) -> Iterator[Finding]:
    """Yield all checks of this machine, and of what is named.

    Args:
        ask: `ask("status")` returns the daemon's answer or raises; so does it with "stats" and
            "datasets".
        path: where a dataset lies; "": nowhere.
        hosts, port: the nodes of a job, which all run this, as in `cluster.hosts`; "": none.
    """
    for look in (_system, _python, _package, _torch):
        yield look()
    if platform.system() != "Linux":  # the other checks are about a daemon, which needs Linux
        return
    for look in (_memfd, _files, _locked, _shm):
        yield look()
    yield _memory(config)
    yield from exposed.findings(config, os.environ)
    proc = _proc()
    yield proc
    if proc.level == "bad":  # no daemon can be found
        return
    yield _daemons()
    yield _address(config.daemon.name)
    yield from _daemon(config.daemon.name, ask)
    if path:
        yield from dataset.findings(path, config.disk.path, time.time())
    if hosts:
        yield from nodes.findings(hosts, port)


def show(findings: Iterable[Finding]) -> None:
    """Print the findings, each with its remedy."""
    for finding in findings:
        colour = {"ok": "green", "warn": "yellow", "bad": "red"}[finding.level]
        click.echo(
            f"{click.style(f'{finding.level:<4}', fg=colour)}  {finding.name:<13}  {finding.state}"
        )
        if finding.remedy:
            click.echo(f"{'':19}  {click.style('-> ' + finding.remedy, dim=True)}")


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
        state = f"the package creel {other} is installed, another project with this import name"
        remedy = f"pip uninstall creel, then pip install --force-reinstall --no-deps {PACKAGE}"
        return Finding("package", "warn", state, remedy)
    state = _version(PACKAGE)
    return Finding(
        "package", "ok", f"{PACKAGE} {state}" if state != "-" else "not installed by pip"
    )


def _torch() -> Finding:
    release = _version("torch")
    if release == "-":
        return Finding(
            "torch", "warn", release, "training needs it: pip install 'creel-data[torch]'"
        )
    return Finding("torch", "ok", release)


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


def _proc() -> Finding:
    """Check /proc, by which creel knows which processes see the same files."""
    pid = ""
    with contextlib.suppress(OSError):
        pid = Path("/proc/self").readlink().name
    if pid == str(os.getpid()):
        return Finding("/proc", "ok", "of this PID namespace")
    state = f"of another PID namespace (pid {pid})" if pid else "not mounted"
    remedy = "mount -t proc proc /proc in the container; without it training reads directly"
    return Finding("/proc", "bad", state, remedy)


def _files() -> Finding:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    state = f"{soft} open files (hard limit {hard})"
    if soft < 1024:
        return Finding("descriptors", "warn", state, f"raise it: ulimit -n {min(hard, 65536)}")
    return Finding("descriptors", "ok", state)


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
    return shm(stat.f_frsize * stat.f_blocks, stat.f_frsize * stat.f_bavail)


def shm(size: int, free: int) -> Finding:
    """Judge the bytes of /dev/shm, and those of them that are free."""
    state, remedy = f"{format_size(free)} free of {format_size(size)}", ""
    if size < 1 << 30:
        remedy = "fine for creel; torch's own workers may fail: docker run --shm-size=8g"
    elif free < size / 16:
        remedy = "its files take memory from the cache: remove what ended jobs have left there"
    return judged(_SHM, state, remedy)


def _memory(config: Config) -> Finding:
    have = limits.memory()
    state = f"{format_size(have.available)} free of {format_size(have.total)}"
    try:
        budget = memory_budget(config.memory, total=have.total, available=have.available)
    except ConfigError as e:
        return Finding("memory", "bad", state, str(e))
    state += f"; budget {format_size(budget)}"
    if budget > have.available:
        return Finding("memory", "warn", state, "more than is free now: lower memory.budget")
    return Finding("memory", "ok", state)


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
    others = f"; daemons that see other files: {', '.join(map(str, pids))}" if pids else ""
    return Finding("address", "ok", f"no other user holds it{others}")


def _daemon(name: str, ask: Callable[[str], dict[str, Any]]) -> Iterator[Finding]:
    try:
        status, stats, datasets = ask("status"), ask("stats"), ask("datasets")["datasets"]
    except NoDaemonError:
        yield Finding("daemon", "ok", f"none named {name!r}; the first DataLoader will start one")
        return
    except CreelError as e:
        remedy = "it may hang or be of another version: creel stop --now, or end its process"
        yield Finding("daemon", "bad", str(e), remedy)
        return
    state = f"{status['name']} (pid {status['pid']}, creel {status['version']})"
    if status["version"] != VERSION:
        remedy = f"this is creel {VERSION}: creel stop, and let a new one start"
        yield Finding("daemon", "warn", state, remedy)
        return
    yield Finding("daemon", "ok", state)
    with contextlib.suppress(OSError):  # it has just ended
        ours, its = (Path(f"/proc/{pid}/cgroup").read_text() for pid in ("self", status["pid"]))
        yield running.cgroup(ours, its)
    env = _environment_of(stats["sessions"][0]["pid"]) if stats["sessions"] else os.environ
    yield from running.findings(stats, datasets, env, limits.cores())


def _environment_of(pid: int) -> Mapping[str, str]:
    """Return the variables that a trainer began with: torchrun sets some; without it, our own."""
    try:
        lines = os.fsdecode(Path(f"/proc/{pid}/environ").read_bytes()).split("\0")
    except OSError:  # it has just ended
        return os.environ
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


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
