"""A real Slurm of two hosts (slurm.sh), with creel's scripts as prolog, task prolog and epilog."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

from testbed import cluster

SCRIPT = Path(__file__).with_name("slurm.sh")
PROGRAMS = Path(sys.executable).parent
NODES = ("n0", "n1")


def unavailable() -> str:
    """Return why no Slurm can run here, or ""."""
    for program in ("slurmctld", "slurmd", "munged", "setpriv"):
        if not shutil.which(program):
            return f"needs {program} (slurm-wlm, munge)"
    if not (PROGRAMS / "creeld").exists():
        return "needs an environment with creeld"
    return cluster.unavailable() or ""


class Slurm:
    """The hosts n0 and n1, which see this machine's files but have a /run and a /tmp of their own.

    Attributes:
        folder: which all hosts see, for scripts, data and output.
    """

    def __init__(self, **settings: str) -> None:
        """settings: other values of variables of the scripts."""
        self.folder = Path(tempfile.mkdtemp(prefix="creel-slurm-", dir=cluster.SCRATCH_DIR))
        self.folder.chmod(0o755)
        hooks = {"PROLOG": "prolog", "TASK_PROLOG": "task-prolog", "EPILOG": "epilog"}
        self._env = {k: v for k, v in os.environ.items() if not k.startswith("CREEL_")} | {
            "SLURM_TESTBED_DIR": str(self.folder / "state"),
            "PYTHON": sys.executable,
            **{hook: str(self._hook(name, settings)) for hook, name in hooks.items()},
        }
        self._script("up", str(len(NODES)))
        self._before = {node: set(self._there(node)) for node in NODES}

    def _hook(self, name: str, settings: dict[str, str]) -> Path:
        shown = [str(PROGRAMS / "creel"), "slurm", "show", name]
        text = subprocess.run(shown, capture_output=True, text=True, timeout=110, check=True).stdout
        for variable, value in settings.items():
            text = "\n".join(
                " ".join(
                    f"{variable}={value}" if word.startswith(f"{variable}=") else word
                    for word in line.split(" ")
                )
                for line in text.split("\n")
            )
        path = self.folder / f"{name}.sh"
        path.write_text(text)
        path.chmod(0o755)
        return path

    def _script(self, *words: str, timeout_s: float = 120) -> str:
        done = subprocess.run(
            [str(SCRIPT), *words],
            env=self._env,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def do(self, *words: str, timeout_s: float = 120) -> str:
        """Run srun, sbatch or another command of Slurm; return its output."""
        return self._script("do", *words, timeout_s=timeout_s)

    def on(self, node: str, *words: str) -> str:
        """Run a command on a node, outside of any job."""
        return self._script("node", node, *words)

    def submit(self, text: str, *options: str) -> str:
        """Submit a batch script whose output goes to `folder`/out-JOB; return the job's id."""
        script = self.folder / "job.sh"
        script.write_text(f"#!/bin/bash\n{text}\n")
        where = f"--output={self.folder}/out-%j"
        return self.do(
            "sbatch", "--parsable", f"--chdir={self.folder}", where, *options, str(script)
        ).strip()

    def end_of(self, job: str, timeout_s: float = 180) -> str:
        """Wait for the end of a job; return its state, such as COMPLETED or FAILED."""
        # One shell asks again and again: to enter a host takes a third of a second of a core.
        over = "JobState=(COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL)"
        wait = f"until scontrol -o show job {job} | head -n 1 | grep -oE '{over}'"
        wait += "; do sleep 0.1; done"
        return self.do("sh", "-c", wait, timeout_s=timeout_s).strip().removeprefix("JobState=")

    def left(self, node: str) -> list[str]:
        """Return what jobs have left on a node: processes, their sockets, files of the prolog."""
        return [line for line in self._there(node) if line not in self._before[node]]

    def _there(self, node: str) -> list[str]:
        """Return the command lines, the sockets' addresses and creel's files of a node."""
        shown = "ps -ww -eo args; awk '{print $8}' /proc/net/unix; ls -d /run/creel*/* || :"
        return self.on(node, "sh", "-c", shown).splitlines()

    def __enter__(self) -> Slurm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None
    ) -> None:
        self._script("down")
        shutil.rmtree(self.folder)
