"""Limits of what this process may use: a job in a cgroup may use less than the machine has.

Reads /proc and /sys only. A file that is missing or unreadable (another system, a hardened
container) sets no limit.
"""

from __future__ import annotations

import errno
import math
import os
import re
from pathlib import Path
from typing import NamedTuple

from creel.system.python_open import text_of

_ROOT = Path("/")  # has proc/ and sys/
#: cgroup v1 writes "no limit" as a number near 2**63; no machine has an exbibyte.
_NO_LIMIT = 1 << 60
#: Most buffers of one system call, on Linux.
IOV_MAX = 1024


class MemoryLimits(NamedTuple):
    """Memory in bytes: the `total` that this process may use, and how much is `available` now."""

    total: int
    available: int


def memory(*, active: bool = False) -> MemoryLimits:
    """Return the memory of the machine, reduced to the tightest cgroup above this process.

    active: count the cgroup's file pages in recent use as available, too. The kernel reclaims them
        before it kills a process.
    """
    lines = re.finditer(r"^(\w+):\s+(\d+) kB$", _read(_ROOT / "proc/meminfo"), re.MULTILINE)
    info = {line[1]: int(line[2]) * 1024 for line in lines}
    total = info.get("MemTotal", 0)
    available = info.get("MemAvailable", total)
    if _read(_ROOT / "proc/sys/vm/overcommit_memory").strip() == "2":  # strict accounting
        promised = info.get("Committed_AS", 0)
        available = min(available, max(info.get("CommitLimit", available) - promised, 0))
    for limit, used in _cgroups("(?:in)?active_file" if active else "inactive_file"):
        total = min(total, limit)
        available = min(available, max(limit - used, 0))
    return MemoryLimits(total, available)


def cores() -> float:
    """Return how many processors this process can keep busy, at least a hundredth.

    Those that it may run on, reduced to the tightest CPU quota of a cgroup above it: a pod with
    `cpu.max` of 1.5 processors sees all of its node's. Threads beyond that number only wait.
    """
    if hasattr(os, "sched_getaffinity"):  # macOS and Windows have no such limit
        least = float(len(os.sched_getaffinity(0)))
    else:
        least = float(os.cpu_count() or 1)
    for line in _read(_ROOT / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            for folder in _folders(_ROOT / "sys/fs/cgroup", path):
                least = min(least, _quota(*_read(folder / "cpu.max").split()))
        elif "cpu" in controllers.split(","):
            for folder in _folders(_ROOT / "sys/fs/cgroup/cpu", path):
                names = "cpu.cfs_quota_us", "cpu.cfs_period_us"
                least = min(least, _quota(*(_read(folder / name).strip() for name in names)))
    return max(least, 0.01)


def _quota(quota: str = "", period: str = "") -> float:
    """Return the processors of a quota in microseconds per period; infinite if there is none."""
    some = quota.isdigit() and period.isdigit() and int(period) > 0
    return int(quota) / int(period) if some else math.inf


def _cgroups(cold: str) -> list[tuple[int, int]]:
    """Return (limit, used) of every memory cgroup above this process that sets a limit.

    cold: pattern of the counters in `memory.stat` that do not count as used.
    """
    limits = []
    for line in _read(_ROOT / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            # Above memory.high the kernel slows all processes of the group down.
            for limit in ("memory.max", "memory.high"):
                limits += _walk(_ROOT / "sys/fs/cgroup", path, limit, "memory.current", cold)
        elif "memory" in controllers.split(","):
            limits += _walk(
                _ROOT / "sys/fs/cgroup/memory",
                path,
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                f"total_{cold}",
            )
    return limits


def _walk(mount: Path, path: str, limit: str, used: str, cold: str) -> list[tuple[int, int]]:
    """Return (limit, used) from the process's cgroup up to the mount, a container's own group."""
    limits = []
    for folder in _folders(mount, path):
        limit_nbytes = _number(_read(folder / limit))
        if limit_nbytes is not None and limit_nbytes < _NO_LIMIT:
            stat = re.finditer(rf"^{cold} (\d+)$", _read(folder / "memory.stat"), re.MULTILINE)
            reclaimable = sum(int(match[1]) for match in stat)
            limits.append(
                (limit_nbytes, max((_number(_read(folder / used)) or 0) - reclaimable, 0))
            )
    return limits


def _folders(mount: Path, path: str) -> list[Path]:
    """Return the folders of the process's cgroup and of all above it, up to the mount."""
    group = mount / path.lstrip("/")
    return [group, *(p for p in group.parents if p == mount or mount in p.parents)]


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None


def _read(path: Path) -> str:
    try:
        return text_of(path)
    except (OSError, UnicodeDecodeError):
        return ""


#: Below these limits on open descriptors (RLIMIT_NOFILE) creel leaves all to the process: a
#: connection to the daemon takes about ten, and each batch buffer that is kept takes one.
_MIN_DESCRIPTORS = 64
_MIN_DESCRIPTORS_TO_KEEP = 128


def few_descriptors() -> int:
    """Return the limit on open descriptors if it is too low for creel to use any, else 0."""
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return limit if 0 <= limit < _MIN_DESCRIPTORS else 0


def descriptors_run_out() -> bool:
    """Whether less than a half of the limit on open descriptors is left; False if nobody knows.

    A new descriptor has the lowest free number.
    """
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        lowest = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as e:
        return e.errno == errno.EMFILE
    os.close(lowest)
    return limit >= 0 and 2 * lowest >= limit


def may_keep() -> bool:
    """Whether this process may keep memory and descriptors that are unused at the moment.

    It may not under a limit on address space (`ulimit -v`), where other uses would lack it.
    """
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    endless = resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    return endless and not 0 <= limit < _MIN_DESCRIPTORS_TO_KEEP


def may_map(nbytes: int) -> bool:
    """Whether a mapping leaves at least as much address space (`ulimit -v`) for batches."""
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return True
    pages = _read(_ROOT / "proc/self/statm").split()
    taken = int(pages[0]) * resource.getpagesize() if pages else 0
    return 2 * nbytes <= limit - taken
