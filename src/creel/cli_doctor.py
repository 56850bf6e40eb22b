"""`creel doctor` and `creel env`: what this machine allows, and what to do if it is too little."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from creel import addresses, limits
from creel.config import Config, config_files, memory_budget
from creel.errors import ConfigError, CreelError, NoDaemonError, UnavailableError
from creel.units import format_size
from creel.version import VERSION

_SHM = "/dev/shm"  # noqa: S108 - only looked at
_PACKAGES = ("numpy", "pyarrow", "pyzmq", "msgspec", "psutil", "torch", "torchvision", "fsspec")


class Check(NamedTuple):
    """One finding. `level` is ok, warn (slow or risky) or bad (does not work)."""

    name: str
    level: str
    found: str
    remedy: str = ""


def checks(config: Config, ask: Callable[[str], dict[str, object]]) -> Iterator[Check]:
    """Everything worth looking at; `ask("status")` reaches the daemon or raises."""
    for look in (_system, _python, _torch):
        yield look()
    if platform.system() != "Linux":  # the rest is about a daemon, which cannot be here
        return
    for look in (_memfd, _files, _locked, _shm, _daemons):
        yield look()
    yield _memory(config)
    yield _address(config.daemon.name)
    yield _daemon(ask)


def _system() -> Check:
    name = f"{platform.system()} {platform.release()}"
    if platform.system() == "Linux":
        return Check("system", "ok", name)
    return Check("system", "bad", name, "the daemon needs Linux; here creel is torch's DataLoader")


def _python() -> Check:
    return Check("python", "ok", f"{platform.python_version()} ({sys.executable})")


def _torch() -> Check:
    found = _version("torch")
    if found == "-":
        return Check("torch", "warn", found, "training needs it: pip install 'creel[torch]'")
    return Check("torch", "ok", found)


def _version(package: str) -> str:
    """Without importing it; "-" where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "-"


def _memfd() -> Check:
    """Sealed anonymous memory: every kernel since 3.17 has it, some sandboxes forbid it."""
    try:
        fd = os.memfd_create("creel-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError) as e:
        return Check("memfd", "bad", str(e), "creel needs memfd_create: Linux 3.17+, not filtered")
    os.close(fd)
    major, minor = (int(n) for n in platform.release().split(".")[:2])
    if (major, minor) < (5, 1):
        remedy = (
            "before Linux 5.1 clients cannot be kept from writing to the cache: update when you can"
        )
        return Check("memfd", "warn", "no F_SEAL_FUTURE_WRITE", remedy)
    return Check("memfd", "ok", "sealed, read-only for clients")


def _files() -> Check:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} open files (hard limit {hard})"
    if soft < 1024:
        return Check("descriptors", "warn", found, f"raise it: ulimit -n {min(hard, 65536)}")
    return Check("descriptors", "ok", found)


def _locked() -> Check:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Check("locked memory", "ok", "unlimited")
    if soft < 64 << 20:
        remedy = "pinning for a GPU may fail: ulimit -l unlimited"
        return Check("locked memory", "warn", format_size(soft), remedy)
    return Check("locked memory", "ok", format_size(soft))


def _shm() -> Check:
    """creel itself never uses /dev/shm; torch does, for tensors that creel leaves to it."""
    try:
        stat = os.statvfs(_SHM)
    except OSError as e:
        return Check(
            _SHM, "warn", str(e), "torch's own worker transport needs it; creel's does not"
        )
    size = stat.f_frsize * stat.f_blocks
    if size < 1 << 30:
        remedy = "fine for creel; torch's own workers may fail: docker run --shm-size=8g"
        return Check(_SHM, "warn", format_size(size), remedy)
    return Check(_SHM, "ok", format_size(size))


def _memory(config: Config) -> Check:
    have = limits.memory()
    found = f"{format_size(have.available)} free of {format_size(have.total)}"
    try:
        budget = memory_budget(config.memory, total=have.total, available=have.available)
    except ConfigError as e:
        return Check("memory", "bad", found, str(e))
    found += f"; budget {format_size(budget)}"
    if budget > have.available:
        return Check("memory", "warn", found, "more than is free now: lower memory.budget")
    return Check("memory", "ok", found)


def _address(name: str) -> Check:
    """Anybody may bind it; and who sees other files has another one."""
    try:
        uid = addresses.held_by_another(name)
    except UnavailableError as e:
        return Check("address", "bad", str(e), "mount /proc as it is for this PID namespace")
    if uid is not None:
        second = addresses.runtime_folder() is not None
        remedy = "a second one is used, with a secret" if second else "choose another daemon.name"
        return Check("address", "warn", f"user {uid} holds it", remedy)
    pids = addresses.elsewhere(name)
    found = f"; daemons that see other files: {', '.join(map(str, pids))}" if pids else ""
    return Check("address", "ok", f"nobody else's{found}")


def _daemon(ask: Callable[[str], dict[str, object]]) -> Check:
    try:
        told = ask("status")
    except NoDaemonError:
        return Check("daemon", "ok", "none runs; the first DataLoader will start one")
    except CreelError as e:
        remedy = "it may hang or be of another version: creel stop --now, or end its process"
        return Check("daemon", "bad", str(e), remedy)
    found = f"{told['name']} (pid {told['pid']}, creel {told['version']})"
    if told["version"] != VERSION:
        remedy = f"this is creel {VERSION}: creel stop, and let a new one start"
        return Check("daemon", "warn", found, remedy)
    return Check("daemon", "ok", found)


def _daemons() -> Check:
    """Several daemons of one user share nothing: each has a budget of its own."""
    pids = list(daemon_pids())
    if len(pids) > 1:
        listed = f"{len(pids)} of yours run (pids {', '.join(map(str, pids))})"
        return Check(
            "daemons", "warn", listed, "each has its own budget: use one name, stop the others"
        )
    return Check("daemons", "ok", f"{len(pids)} of yours runs" if pids else "none of yours runs")


def daemon_pids() -> Iterator[int]:
    """This user's daemons."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile, or is not ours to look at
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")[:5]
            ours = any(word == "creel.daemon" or Path(word).name == "creeld" for word in words)
            if ours and folder.stat().st_uid == os.getuid():
                yield int(folder.name)


def _cpus() -> str:
    """How many this process may use, where the system can limit that."""
    have = str(os.cpu_count())
    if not hasattr(os, "sched_getaffinity"):  # macOS, Windows
        return have
    return f"{len(os.sched_getaffinity(0))} of {have}"


def environment() -> dict[str, str]:
    """Versions and limits, to paste into an issue."""
    have = limits.memory()
    told = {
        "creel": VERSION,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpus": _cpus(),
        "memory": f"{format_size(have.available)} free of {format_size(have.total)}",
    }
    told |= {package: _version(package) for package in _PACKAGES}
    told["files"] = ", ".join(map(str, config_files())) or "-"
    return told | {k: v for k, v in sorted(os.environ.items()) if k.startswith("CREEL_")}
