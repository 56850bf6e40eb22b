"""How many processors a process has, in a faked tree of cgroups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from creel.cli.doctor import environment
from creel.system import limits
from creel.system.limits import cores

V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/cpu"


def v1(folder: str, quota: int) -> dict[str, str]:
    return {
        f"{V1}/{folder}cpu.cfs_quota_us": f"{quota}\n",
        f"{V1}/{folder}cpu.cfs_period_us": "100000\n",
    }


@pytest.mark.parametrize(
    ("cgroup", "files", "have"),
    [
        ("", {}, 8),
        ("0::/\n", {f"{V2}/cpu.max": "max 100000\n"}, 8),
        ("0::/\n", {f"{V2}/cpu.max": "150000 100000\n"}, 1.5),  # a pod sees its own group as root
        ("0::/\n", {f"{V2}/cpu.max": "1600000 100000\n"}, 8),
        ("0::/\n", {f"{V2}/cpu.max": "100 100000\n"}, 0.01),
        ("0::/\n", {f"{V2}/cpu.max": "what 0\n"}, 8),
        # The least of nested groups counts, whichever it is.
        ("0::/a/b\n", {f"{V2}/a/cpu.max": "200000 100000", f"{V2}/a/b/cpu.max": "max 100000"}, 2),
        ("0::/a/b\n", {f"{V2}/a/cpu.max": "max 100000", f"{V2}/a/b/cpu.max": "90000 30000"}, 3),
        ("0::/a\n", {f"{V2}/cpu.max": "50000 100000", f"{V2}/a/cpu.max": "400000 100000"}, 0.5),
        ("0::/a\n", {f"{V2}/a/c/cpu.max": "100000 100000"}, 8),  # not above this process
        ("0::/../outside\n", {f"{V2}/cpu.max": "100000 100000"}, 1),
        ("5:cpu,cpuacct:/a\n4:memory:/b\n", v1("a/", 250_000) | v1("b/", 100_000), 2.5),
        ("5:cpu,cpuacct:/a\n", v1("a/", -1) | v1("", -1), 8),
        ("5:cpuset:/a\n", v1("a/", 100_000), 8),
    ],
)
def test_a_quota_of_any_group_above_limits_the_processors(
    cgroup: str,
    files: dict[str, str],
    have: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "_ROOT", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    for name, text in {"proc/self/cgroup": cgroup, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cores() == have
    assert environment()["cpus"] == f"{have:.4g} of 16"
