"""Ranks as launchers define them."""

from __future__ import annotations

import os

import pytest

from creel.loader.cluster.ranks import job_name, launched, on_one_node
from creel.messages import Open, encode

ALLOCATED = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_JOB_NAME": "bash"}
STEP = {**ALLOCATED, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}


@pytest.mark.parametrize(
    "env, told",
    [
        ({}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "8"}, (3, 8)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (1, 2)),
        ({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"}, (1, 2)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2)),
        # srun
        ({**STEP, "SLURM_PROCID": "3"}, (3, 4)),
        ({**STEP, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, (1, 2)),
        ({"SLURM_STEP_ID": "1", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, (1, 2)),
        # a shell under salloc, which runs on a login node; one in an interactive step; a script
        (ALLOCATED, (0, 1)),
        ({**STEP, "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"}, (0, 1)),
        ({**ALLOCATED, "SLURM_PROCID": "0"}, (0, 1)),
        ({**ALLOCATED, "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967291"}, (0, 1)),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, (0, 1)),  # srun --pty bash
        # torchrun within srun, one task a node; mpirun, whose daemons srun has started
        ({**STEP, "SLURM_PROCID": "1", "RANK": "9", "WORLD_SIZE": "32"}, (9, 32)),
        (
            {**STEP, "SLURM_PROCID": "1", "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8"},
            (5, 8),
        ),
        # impossible numbers are ignored
        ({"RANK": "8", "WORLD_SIZE": "8"}, (0, 1)),
        ({"RANK": "-1", "WORLD_SIZE": "8"}, (0, 1)),
        ({"RANK": "1", "WORLD_SIZE": "many"}, (0, 1)),
        ({"RANK": "1"}, (0, 1)),
        ({"RANK": "x", "WORLD_SIZE": "2", "PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2)),
        ({"RANK": "\u0662", "WORLD_SIZE": "8"}, (0, 1)),
    ],
)
def test_ranks_are_as_the_launcher_says(env: dict[str, str], told: tuple[int, int]) -> None:
    assert launched(env) == told


def test_all_tasks_of_a_step_are_of_one_job() -> None:
    tasks = [{**STEP, "SLURM_PROCID": str(i)} for i in range(4)]
    assert sorted(launched(env) for env in tasks) == [(i, 4) for i in range(4)]
    assert {job_name(env) for env in tasks} == {"7.0"}


def test_a_jobs_name_is_torchruns_or_slurms_or_pmixs() -> None:
    assert job_name({"TORCHELASTIC_RUN_ID": "run", **STEP}) == "run"
    assert job_name({**STEP, "PMIX_NAMESPACE": "slurm.pmix.7.0"}) == "7.0"
    assert job_name({"PMIX_NAMESPACE": "3462725633"}) == "3462725633"
    assert job_name({}) == ""


def test_a_jobs_name_is_text_whatever_its_bytes() -> None:
    name = job_name({"TORCHELASTIC_RUN_ID": os.fsdecode(b"caf\xe9")})
    assert name == "caf\\udce9"
    encode(Open("dataset", name, 0, 1, "never"))


def test_ranks_are_on_one_node_where_the_launcher_says_so() -> None:
    assert on_one_node(1, {})
    assert on_one_node(4, {"LOCAL_WORLD_SIZE": "4"})
    assert on_one_node(4, {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
    assert on_one_node(4, {**STEP, "SLURM_STEP_NUM_NODES": "1"})
    assert not on_one_node(8, {"LOCAL_WORLD_SIZE": "4"})
    assert not on_one_node(2, {})
    assert not on_one_node(4, {**STEP, "SLURM_STEP_NUM_NODES": "2"})


def test_a_step_on_each_node_that_starts_torchrun_is_not_the_whole_job() -> None:
    step = {**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_NTASKS": "2"}
    assert not on_one_node(16, {**step, "LOCAL_WORLD_SIZE": "8"})
    assert not on_one_node(2, {**step, "LOCAL_WORLD_SIZE": "1"})
