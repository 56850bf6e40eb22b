"""creel's scripts under a real slurmctld and slurmd of two nodes, with trainings of two ranks."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kit import until
from testbed import jobs, scheduler
from testbed.scheduler import NODES, PROGRAMS, Slurm

pytestmark = [
    pytest.mark.skipif((why := scheduler.unavailable() or jobs.unavailable()) != "", reason=why),
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.timeout(400),
]

ROOT = Path(__file__).parents[3]
FILES = 200
#: As a shell reads it.
BIN = shlex.quote(str(PROGRAMS))
SHOWN = f"{BIN}/creel --name $CREEL_SOCKET"


@pytest.fixture(scope="module")
def storage() -> Iterator[Any]:
    with jobs.storage(FILES) as storage:
        yield storage


@pytest.fixture(scope="module")
def secret(storage: Any) -> Path:
    """Where the administrator's secret is, if there is one: a file that all hosts see."""
    return Path(storage.mountpoint).with_name("secret")


@pytest.fixture(scope="module")
def slurm(secret: Path) -> Iterator[Slurm]:
    """The hosts: they begin after `storage` is mounted."""
    with Slurm(warm_s="15", secret=str(secret)) as slurm:
        yield slurm


@pytest.fixture(autouse=True)
def nothing_is_left(slurm: Slurm) -> Iterator[None]:
    yield
    for node in NODES:
        until(lambda node=node: slurm.left(node) == [], event=f"{node} is as before")  # type: ignore[misc]
        assert "Prolog" not in slurm.do("sinfo", "-R")


def ended(slurm: Slurm, job: str, state: str = "COMPLETED") -> str:
    """Wait for the end of a job; return its output."""
    at_end = slurm.end_of(job)
    said = (slurm.folder / f"out-{job}").read_text()
    assert at_end == state, said
    return said


def training(storage: Any, epochs: int) -> str:
    """Return the command of a training of one rank on each node, below torchrun."""
    script, folder = (shlex.quote(str(path)) for path in (jobs.SCRIPT, jobs.SCRIPT.parents[1]))
    words = f"{script} {storage.mountpoint} 8 {','.join(['step'] * epochs)}"
    return (
        f"export PYTHONPATH={folder} OMP_NUM_THREADS=1 CREEL_MEMORY__BUDGET=64MiB\n"
        f"srun --output=rank-%j-%t {BIN}/torchrun --nnodes 2 --nproc-per-node 1"
        f" --rdzv-backend c10d --rdzv-id $SLURM_JOB_ID --rdzv-endpoint n0:29500 {words}"
    )


def check_ranks(slurm: Slurm, job: str, epochs: int) -> list[dict[str, Any]]:
    """Compare what both ranks have read with torch's sampler; return their daemons' counters."""
    said = []
    for task in range(2):
        lines = (slurm.folder / f"rank-{job}-{task}").read_text().splitlines()
        said.append([json.loads(line) for line in lines if line.startswith("{")])
    read = [[line["epoch"]["digest"] for line in rank if "epoch" in line] for rank in said]
    for epoch in range(epochs):
        expected = {jobs.digest(FILES, rank, 2, epoch) for rank in range(2)}
        assert {rank[epoch] for rank in read} == expected
    return [next(line["stats"] for line in rank if "stats" in line) for rank in said]


def test_a_job_finds_a_daemon_of_its_own_and_a_key_on_each_node(slurm: Slurm, secret: Path) -> None:
    secret.write_text("not to be told\n")
    secret.chmod(0o600)
    try:
        shown = f"{SHOWN} status | head -n 1 && sha256sum $CREEL_CLUSTER__KEY_FILE"
        said = slurm.do("srun", "-N2", "sh", "-c", shown).splitlines()
    finally:
        secret.unlink()
    keys = [line for line in said if "/run/creel-slurm/" in line]
    names = {line.split()[1] for line in said if line.startswith("daemon ")}
    assert len(keys) == 2
    assert len(set(keys)) == 1
    assert "not to be told" not in str(said)
    assert {name.rstrip("0123456789") for name in names} == {"slurm-"}


def test_a_job_that_asks_for_it_begins_with_its_data_in_memory(slurm: Slurm, storage: Any) -> None:
    before = storage.totals()["opens"]
    reads = (
        "import creel, json, time; from creel.config import Config;"
        "from creel.loader.client.connections import client_of;"
        f"data = creel.FileDataset({str(storage.mountpoint)!r});"
        "client = client_of(Config.load()[0]);"
        "opens = lambda: sum(one['opens'] for one in client.ask('stats')['sources']);"
        "held = client.ask('datasets')['datasets'][0]['resident_objects']; first = opens();"
        "batch = next(iter(creel.DataLoader(data, 16, shuffle=True)));"
        "said = {'held': held, 'opens': opens() - first, 'batch': len(batch)};"
        "print(json.dumps(said))"
    )
    comment = f"--comment=creel:warm={storage.mountpoint}"
    said = slurm.do("srun", "-N1", comment, str(PROGRAMS / "python"), "-c", reads)
    assert json.loads(said.splitlines()[-1]) == {"held": FILES, "opens": 0, "batch": 16}
    assert storage.totals()["opens"] - before == FILES


@pytest.mark.parametrize("target", ["/no/such/folder", "http://10.77.9.9/never-answers"])
def test_datasets_that_cannot_be_loaded_ahead_delay_a_job_by_no_more_than_allowed(
    slurm: Slurm, target: str
) -> None:
    before = time.monotonic()
    assert slurm.do("srun", "-N1", f"--comment=creel:warm={target}", "hostname").strip() == "n0"
    assert time.monotonic() - before < 45


def test_each_task_of_an_array_and_each_run_of_a_requeued_job_has_a_daemon(slurm: Slurm) -> None:
    said = f"{SHOWN} status | head -n 1"
    array = slurm.submit(said, "--array=0-1")
    texts = [ended(slurm, str(int(array) + i)) for i in range(2)]
    assert len({text.split()[1] for text in texts}) == 2
    assert all(text.split()[1].startswith("slurm-") for text in texts)
    job = slurm.submit(f"{said}\n[ $SLURM_RESTART_COUNT ] || sleep 600", "--open-mode=append")
    until((slurm.folder / f"out-{job}").exists, 60, event="it runs")
    until(lambda: "slurm-" in (slurm.folder / f"out-{job}").read_text(), 60, event="its daemon")
    slurm.do("scontrol", "requeue", job)
    lines = ended(slurm, job).splitlines()
    runs = [line.split()[1] for line in lines if line.startswith("daemon ")]
    assert runs == [f"slurm-{job}"] * 2


def test_a_training_on_two_nodes_needs_no_administrator(slurm: Slurm, storage: Any) -> None:
    """The script of the recipe: files that a node holds the other one does not read again."""
    page = (ROOT / "docs/recipes/slurm.md").read_text()
    (script,) = re.findall(r"^```sh\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    exports, _, command = training(storage, 2).partition("\n")
    program = command.partition("n0:29500 ")[2]
    begin = f"srun --output=rank-%j-%t {BIN}/creel run -- {BIN}/torchrun "
    script = script.replace("srun creel run -- torchrun ", begin).replace("train.py", program)
    job = slurm.submit(script.replace("\nhead=", f"\n{exports}\nhead="), "--cpus-per-task=2")
    ended(slurm, job)
    stats = check_ranks(slurm, job, 2)
    read = sum(source["reads"] for node in stats for source in node["sources"])
    assert FILES <= read < 1.4 * FILES, "each for itself would read half of the files twice"


def test_killed_daemons_and_a_restarted_slurmd_fail_no_training(slurm: Slurm, storage: Any) -> None:
    epochs = 6
    job = slurm.submit(f"export STEP_S=0.2\n{training(storage, epochs)}", "-N2")
    out = slurm.folder / f"rank-{job}-0"
    until(lambda: out.exists() and '"epoch"' in out.read_text(), 120, event="an epoch has ended")
    kill = f'kill -9 $(ps -ww -eo pid,args | awk "/[c]reeld --name slurm-{job}/ {{print \\$1}}")'
    slurm.on("n0", "sh", "-c", kill)
    slurm.on(
        "n1",
        "sh",
        "-c",
        "kill $(cat $(scontrol show config | awk '/SlurmdPidFile/{print $3}' | sed s/%n/n1/))",
    )
    slurm.on("n1", "slurmd")
    ended(slurm, job)
    check_ranks(slurm, job, epochs)
