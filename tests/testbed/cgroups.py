"""Limits of an emulated host: one cgroup per host, below the caller's own, so they only tighten."""
from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from testbed.host import TestbedError, parse_size

CGROUP_ROOT = Path("/sys/fs/cgroup")


class Cgroups:
    """CPU, memory and disk limits; cgroup v1 (per-controller trees) or v2."""

    def __init__(self, cluster: str):
        self.cluster = cluster

    @staticmethod
    def own(controller: str) -> "tuple[Path, bool]":
        """The caller's cgroup for a controller (v1's name of it), and whether it is v2."""
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        for _, names, path in lines:
            if controller in names.split(","):
                for base in (CGROUP_ROOT / controller, CGROUP_ROOT / names):
                    for where in (base / path.lstrip("/"), base):
                        if (where / "cgroup.procs").exists():
                            return where, False
        name = {"blkio": "io"}.get(controller, controller)
        for _, names, path in lines:
            if not names:
                for where in (CGROUP_ROOT / path.lstrip("/"), CGROUP_ROOT):
                    controllers = where / "cgroup.controllers"
                    if controllers.exists() and name in controllers.read_text().split():
                        return where, True
        raise TestbedError(f"no cgroup controller {controller!r} here")

    def create(self, host: str, limits: dict) -> "list[str]":
        """Create the host's groups; return the directories to join.
        limits: {controller: {v1 file: value}, ...} with v2's {file: value} beside it.
        """
        joins = []
        for controller, (v1_files, v2_files) in limits.items():
            base, v2 = self.own(controller)
            parent = base / f"testbed-{self.cluster}"
            group = parent / host
            try:
                if v2:
                    name = {"blkio": "io"}.get(controller, controller)
                    (base / "cgroup.subtree_control").write_text(f"+{name}")
                    parent.mkdir(exist_ok=True)
                    (parent / "cgroup.subtree_control").write_text(f"+{name}")
                group.mkdir(parents=True, exist_ok=True)
                for file, value in (v2_files if v2 else v1_files).items():
                    (group / file).write_text(value)
            except OSError as err:
                raise TestbedError(f"cannot limit {controller}: {err}") from err
            joins.append(str(group))
        return list(dict.fromkeys(joins))

    @staticmethod
    def remove(directories) -> None:
        for directory in directories:
            for _ in range(100):  # the kernel empties a killed group with a delay
                try:
                    os.rmdir(directory)
                except FileNotFoundError:
                    pass
                except OSError:
                    time.sleep(0.02)
                    continue
                break
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(directory))


def limits_of(memory: "str | None", cpus: "float | None", disk: "str | None", directory: Path) -> dict:
    limits = {}
    if memory is not None:
        value = str(parse_size(memory))
        limits["memory"] = {"memory.limit_in_bytes": value}, {"memory.max": value}
    if cpus is not None:
        quota = str(int(cpus * 100_000))
        limits["cpu"] = ({"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": quota},
                         {"cpu.max": f"{quota} 100000"})
    if disk is not None:
        device = directory.stat().st_dev
        sys_dir = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
        if (sys_dir / "partition").exists():  # only whole disks have a rate
            sys_dir = sys_dir.parent
        if not (sys_dir / "dev").exists():
            raise TestbedError(f"{directory} is not on a disk that can be limited")
        number, rate = (sys_dir / "dev").read_text().strip(), parse_size(disk)
        limits["blkio"] = ({f"blkio.throttle.{way}_bps_device": f"{number} {rate}" for way in ("read", "write")},
                           {"io.max": f"{number} rbps={rate} wbps={rate}"})
    return limits
