"""This process's rank, world size and job, from torch.distributed or from its launcher.

torch.distributed knows them once it is initialized. Before that, or without it, they come from the
launcher's environment: torchrun's, MPI's or Slurm's. If every rank took itself for rank 0 of 1, the
ranks would count as separate jobs, each of which reads the whole dataset.

A launcher's ranks may also be programs of several kinds, or experiments of their own. So
`rank_and_world` is only for what costs no more than speed where it is wrong: whom the daemon takes
for a job, where files are read, how many workers share a node, the rank before a log line. What
decides which samples are in a batch, what is refused, and who says something, asks
`of_process_group`; streams let the launcher's ranks meet (`loader/extras/streams/share.py`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

#: Variables of (rank, world) by launcher; the first valid pair counts. mpirun starts its daemons by
#: srun, so under Slurm its processes have the variables of both, and MPI's are the right ones.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),  # torchrun, accelerate, DeepSpeed
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # Open MPI
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),  # MVAPICH2
    ("MVP_COMM_WORLD_RANK", "MVP_COMM_WORLD_SIZE"),  # MVAPICH 3 and later
    ("PMI_RANK", "PMI_SIZE"),  # MPICH, Intel MPI, Cray
)
#: Variables of the number of ranks on this node, by launcher.
_HERE = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "MVP_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
)
#: Larger step ids are not srun's, but of batch scripts, interactive shells, external processes.
_SPECIAL_STEPS = 0xFFFFFFF0  # slurm.h: SLURM_PENDING_STEP - 2 and the like


def rank_and_world() -> tuple[int, int]:
    """Return (rank, world) of this process; (0, 1) if neither torch nor a launcher knows."""
    return of_process_group() or launched(os.environ)


def of_process_group() -> tuple[int, int] | None:
    """Return (rank, world) of torch.distributed's default group; None if there is none."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return None


def speaks() -> bool:
    """Whether this process says what all ranks of its process group would say alike.

    Ranks of a launcher may be experiments of their own: each speaks for itself.
    """
    return (of_process_group() or (0, 1))[0] == 0


def launched(env: Mapping[str, str]) -> tuple[int, int]:
    """Return (rank, world) from a launcher's environment, 0 <= rank < world; else (0, 1).

    >>> launched({"PMI_RANK": "2", "PMI_SIZE": "8"}), launched({"RANK": "9", "WORLD_SIZE": "8"})
    ((2, 8), (0, 1))
    """
    for rank_name, world_name in [*_LAUNCHERS, *_slurm(env)]:
        rank = _number(env, rank_name)
        if 0 <= rank < (world := _number(env, world_name)):
            return rank, world
    return 0, 1


def on_one_node(world: int, env: Mapping[str, str]) -> bool:
    """Whether all ranks are known to run on this node.

    >>> on_one_node(2, {"LOCAL_WORLD_SIZE": "2"}), on_one_node(4, {"LOCAL_WORLD_SIZE": "2"})
    (True, False)
    """
    if world == 1 or any(_number(env, name) == world for name in _HERE):
        return True
    # srun may start torchrun on several nodes, in a step with one task on each.
    step = _number(env, "SLURM_STEP_NUM_NODES"), _number(env, "SLURM_STEP_NUM_TASKS")
    return bool(_slurm(env)) and step == (1, world)


def ranks_here(world: int, env: Mapping[str, str]) -> int:
    """Return how many of `world` ranks run on this node; all of them if no launcher knows.

    >>> ranks_here(16, {"LOCAL_WORLD_SIZE": "8"}), ranks_here(4, {}), ranks_here(1, {})
    (8, 4, 1)
    """
    known = (_number(env, name) for name in _HERE)
    here = next((number for number in known if number > 0), 0)
    if not here and _slurm(env):
        # Tasks of a step are spread evenly: the last node may have fewer.
        here = math.ceil(world / max(_number(env, "SLURM_STEP_NUM_NODES"), 1))
    return min(here or world, world)


def job_name(env: Mapping[str, str] | None = None) -> str:
    """Return the id of this training run: torchrun's, Slurm's or PMIx's, else "".

    >>> job_name({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}), job_name({"SLURM_JOB_ID": "7"})
    ('7.0', '7')
    """
    env = os.environ if env is None else env
    name = env.get("TORCHELASTIC_RUN_ID", "")
    if not name:
        job, step = env.get("SLURM_JOB_ID", ""), env.get("SLURM_STEP_ID", "")
        name = f"{job}.{step}" if job and step else job or env.get("PMIX_NAMESPACE", "")
    return name.encode(errors="backslashreplace").decode()  # messages carry only UTF-8


def job_here(world: int, env: Mapping[str, str], parent: int) -> str:
    """Return what distinguishes this node's jobs: a unique job name, else the parent process.

    A launcher is the parent of all its ranks on a node.

    >>> job_here(2, {"SLURM_JOB_ID": "7"}, 100), job_here(2, {"MASTER_PORT": "29500"}, 100)
    ('2 7   0', '2   29500 100')
    """
    name = job_name(env)
    parent = parent if name in {"", "none"} else 0  # torchrun's names of a job without one
    return f"{world} {name} {env.get('MASTER_ADDR', '')} {env.get('MASTER_PORT', '')} {parent}"


def _slurm(env: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return Slurm's (rank, world) variables if this process is one of the tasks of an srun step.

    A batch script and a shell under salloc also have a number of tasks: that of tasks to start.
    """
    if not 0 <= _number(env, "SLURM_STEP_ID") < _SPECIAL_STEPS:
        return []
    return [("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"), ("SLURM_PROCID", "SLURM_NTASKS")]


def _number(env: Mapping[str, str], name: str) -> int:
    """Return a variable's value; -1 if it is missing or not a number."""
    text = env.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else -1
