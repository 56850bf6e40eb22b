"""Ranks as launchers define them."""

from __future__ import annotations

import os

import pytest
from torch.utils.data import BatchSampler, DistributedSampler

import creel
from creel.errors import ConfigError
from creel.loader.client.cluster.ranks import job_name, launched, on_one_node
from creel.loader.line.observers import advice
from creel.loader.making.groups.exchange import agreed
from creel.loader.making.groups.replicate import group_of, place_of
from creel.messages import Open, encode

ALLOCATED = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_JOB_NAME": "bash"}
STEP = {**ALLOCATED, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}


@pytest.mark.parametrize(
    "env, expected",
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
def test_ranks_are_as_the_launcher_says(env: dict[str, str], expected: tuple[int, int]) -> None:
    assert launched(env) == expected


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


def test_a_launchers_ranks_may_be_programs_of_their_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As of `mpirun -n 4 sim : -n 1 train`: what costs more than speed asks for a process group."""
    for name, value in {"OMPI_COMM_WORLD_RANK": "4", "OMPI_COMM_WORLD_SIZE": "5"}.items():
        monkeypatch.setenv(name, value)
    for ranks in (1, 5):
        sampler = DistributedSampler(range(8), ranks, 0)  # type: ignore[arg-type,var-annotated]
        batches = BatchSampler(sampler, 2, drop_last=False)
        if ranks == 1:
            assert agreed(batches).node_of == (0,)
        else:
            with pytest.raises(ConfigError, match=r"remap needs torch\.distributed\.init"):
                agreed(batches)
    assert (group_of(1), place_of(2)) == ((0,), (0, 1))
    with pytest.raises(ConfigError, match=r"replicate needs torch\.distributed\.init"):
        group_of(5)
    monkeypatch.setattr(advice, "_said", set())
    same = DistributedSampler(range(8), 2, 0)  # type: ignore[arg-type,var-annotated]
    loader = creel.DataLoader(range(8), sampler=same, creel=False)  # type: ignore[arg-type,var-annotated]
    for _ in range(2):
        list(loader)
    assert "each epoch has the same order" in caplog.text


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
