"""Which rank of how many this process is, and of which job: what its launcher says of it.

torch.distributed knows once it was begun. Before that, and where nobody begins it, the launcher's
environment says it: torchrun's, MPI's or Slurm's. Ranks that all took themselves for the only one
would count as so many jobs, each of which reads the whole dataset.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

#: (rank, world) by launcher; the first one that is there and makes sense counts. mpirun starts its
#: daemons by srun, so that under Slurm its processes have the variables of both: MPI's are meant.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),  # torchrun, accelerate, DeepSpeed
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # Open MPI
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),  # MVAPICH2
    ("MVP_COMM_WORLD_RANK", "MVP_COMM_WORLD_SIZE"),  # MVAPICH 3 and later
    ("PMI_RANK", "PMI_SIZE"),  # MPICH, Intel MPI, Cray
)
#: Steps from here on are no srun: a batch script, an interactive shell, external processes.
_SPECIAL_STEPS = 0xFFFFFFF0  # slurm.h: SLURM_PENDING_STEP - 2 and the like


def rank_and_world() -> tuple[int, int]:
    """(rank, world) of this process; (0, 1) where nobody says otherwise."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return launched(os.environ)


def launched(env: Mapping[str, str]) -> tuple[int, int]:
    """(rank, world) as a launcher's environment has them, 0 <= rank < world; else (0, 1).

    >>> launched({"PMI_RANK": "2", "PMI_SIZE": "8"}), launched({"RANK": "9", "WORLD_SIZE": "8"})
    ((2, 8), (0, 1))
    """
    launchers = [*_LAUNCHERS, *_slurm(env)]
    for rank, world in ((_number(env, r), _number(env, w)) for r, w in launchers):
        if 0 <= rank < world:
            return rank, world
    return 0, 1


def job_name(env: Mapping[str, str] | None = None) -> str:
    """What names this training run: torchrun's, Slurm's or PMIx's id, else nothing.

    >>> job_name({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}), job_name({"SLURM_JOB_ID": "7"})
    ('7.0', '7')
    """
    env = os.environ if env is None else env
    if run := env.get("TORCHELASTIC_RUN_ID"):
        return run
    job, step = env.get("SLURM_JOB_ID", ""), env.get("SLURM_STEP_ID", "")
    return f"{job}.{step}" if job and step else job or env.get("PMIX_NAMESPACE", "")


def _slurm(env: Mapping[str, str]) -> list[tuple[str, str]]:
    """Slurm's variables, where srun started this process as one of a step's tasks.

    A batch script and a shell under salloc have a number of tasks, too: of those they may start.
    """
    if not 0 <= _number(env, "SLURM_STEP_ID") < _SPECIAL_STEPS:
        return []
    return [("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"), ("SLURM_PROCID", "SLURM_NTASKS")]


def _number(env: Mapping[str, str], name: str) -> int:
    """A variable's value; -1 where it is missing or no number."""
    text = env.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else -1
