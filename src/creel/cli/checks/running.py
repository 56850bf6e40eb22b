"""What the jobs that a daemon serves do to themselves: pure, from the daemon's own answers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from creel.cli.checks.finding import Finding, judged
from creel.units import format_size

Row = Mapping[str, Any]

_JOB = re.compile(r"/job_(\d+)")


def findings(
    stats: Row, datasets: Sequence[Row], env: Mapping[str, str], cores: float
) -> Iterator[Finding]:
    """Yield what is wrong with the running jobs.

    Args:
        stats: the answer of `creel stats --json`.
        datasets: the rows of `creel ls --json`.
        env: environment variables of a rank.
        cores: processors that processes here can keep busy.
    """
    sessions = stats["sessions"]
    ranks = len({session["pid"] for session in sessions})
    yield workers(sum(int(session["workers"]) for session in sessions), cores)
    yield threads(env, cores, ranks)
    yield batches(sessions, datasets, int(stats["memory"]["budget_nbytes"]))
    yield opened(sessions)


def workers(count: int, cores: float) -> Finding:
    """Compare the workers of all ranks with the processors that they share."""
    state = f"{count} workers at work, {cores:.4g} processors"
    remedy = f"they share processors: lower num_workers to {max(int(cores), 1)} for all ranks"
    return judged("workers", state, remedy if count > cores else "")


def threads(env: Mapping[str, str], cores: float, ranks: int) -> Finding:
    """Look for ranks that each start a thread for every processor.

    Args:
        ranks: training processes that the daemon serves.
    """
    ranks = max(
        ranks, *(_number(env.get(n, "")) for n in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"))
    )
    said, share = env.get("OMP_NUM_THREADS", ""), max(int(cores / max(ranks, 1)), 1)
    each = _number(said.partition(",")[0]) if said else int(cores)
    state = f"OMP_NUM_THREADS={said or '(not set)'} for {ranks} ranks, {cores:.4g} processors"
    remedy = f"ranks take each other's processors: export OMP_NUM_THREADS={share}"
    return judged("OMP threads", state, remedy if ranks * each > cores and each > share else "")


def _number(text: str) -> int:
    """Return the number that a text begins with, else 0: Slurm writes `4(x2)`."""
    match = re.match(r"\d+", text)
    return int(match[0]) if match else 0


def batches(sessions: Sequence[Row], datasets: Sequence[Row], budget_nbytes: int) -> Finding:
    """Compare the budget with two batches of each rank: the one being read and the next."""
    mean = {
        session["dataset"]: session["nbytes"] / max(session["objects"], 1) for session in datasets
    }
    need = 0.0
    for session in sessions:
        if session["batches"]:
            need += 2 * session["samples"] / session["batches"] * mean.get(session["dataset"], 0)
    if not need:
        return Finding("batches", "ok", "no batch of files was taken yet")
    state = f"two batches of each rank take {format_size(int(need))}"
    remedy = f"memory.budget is {format_size(budget_nbytes)}: no batch can wait in it, raise it"
    return judged("batches", state, remedy if need > budget_nbytes else "")


def opened(sessions: Sequence[Row]) -> Finding:
    """Name files that datasets read themselves, and that their loaders have seen awaited."""
    waiting = [session for session in sessions if session["own_file"]]
    if not waiting:
        return Finding("own files", "ok", "no rank waits for files that its dataset reads itself")
    files = ", ".join(f"pid {session['pid']} for {session['own_file']}" for session in waiting)
    state = f"training waits for files that its dataset reads itself: {files}"
    remedies = dict.fromkeys(session["own_remedy"] for session in waiting)
    return Finding("own files", "warn", state, "; ".join(remedies))


def cgroup(ours: str, daemons: str) -> Finding:
    """Compare the cgroups of this process and of the daemon.

    Args:
        ours, daemons: texts of /proc/PID/cgroup.
    """
    own, its = _JOB.search(ours), _JOB.search(daemons)
    if its and (own is None or own[1] != its[1]):
        state = f"the daemon runs in the cgroup of Slurm's job {its[1]}, and ends with it"
        return Finding(
            "cgroup", "warn", state, "give each job its own: creel run -- python train.py"
        )
    if own and not its:
        state = "the daemon's memory is not charged to this job, and not limited with it"
        if "slurmd" in daemons:
            state += ", but to slurmd"
        return Finding("cgroup", "warn", state, "start it in the job: creel run -- python train.py")
    return Finding("cgroup", "ok", "the daemon runs where it should")
