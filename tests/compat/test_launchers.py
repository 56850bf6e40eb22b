"""What starts the ranks of a training: torchrun with a restart, Ray Train, Kubeflow's TrainJob."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_frameworks import framework
from torch.utils.data import DataLoader, DistributedSampler

from creel.loader.client.client import Client

pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.timeout(600),  # Ray starts some ten processes
    pytest.mark.filterwarnings("ignore"),  # the frameworks' own warnings
]

ROOT = Path(__file__).parents[2]
N, BATCH, EPOCHS, WORLD = 48, 4, 3, 2
ONE_THREAD = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
#: Else a restarted rank of torch may find the other's address of before the restart, and give up.
NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    folder = tmp_path / "digits"
    folder.mkdir()
    for i in range(N):
        np.save(folder / f"{i:02}.npy", np.full(8, i))
    return folder


def dealt(rank: int) -> list[list[list[int]]]:
    """Return the samples of each batch of each epoch that torch gives a rank."""
    sampler: Any = DistributedSampler(range(N), WORLD, rank, seed=3)  # type: ignore[arg-type]
    loader: Any = DataLoader(range(N), BATCH, sampler=sampler)  # type: ignore[arg-type]
    epochs = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        epochs.append([batch.tolist() for batch in loader])
    return epochs


def rows(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- torchrun, elastic ----------------------------------------------------------------------------

#: Rank 1 is killed in its second epoch, two steps after the last checkpoint.
ELASTIC = f"""
import io, json, os, signal, sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

import creel

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def first(data):
    return int(np.load(io.BytesIO(data))[0])


paths = sorted((folder / "digits").iterdir())
data = creel.FileDataset(paths, decode=first)
loader = creel.DataLoader(
    data, {BATCH}, sampler=DistributedSampler(data, seed=3), num_workers=1,
    creel={{"loader.direct": "never"}},
)
checkpoint, began = folder / "checkpoint.pt", 0
if checkpoint.exists():
    saved = torch.load(checkpoint)
    began = saved["epoch"]
    loader.load_state_dict(saved["loader"])
with (folder / f"{{rank}}-{{attempt}}").open("w") as out:
    for epoch in range(began, {EPOCHS}):
        loader.set_epoch(epoch)
        for batch in loader:
            print(json.dumps([epoch, batch.tolist()]), file=out, flush=True)
            dist.all_reduce(torch.zeros(1))
            taken = loader.state_dict()["batches"]
            if taken == 2:  # of this epoch
                if rank == 0:
                    torch.save({{"epoch": epoch, "loader": loader.state_dict()}}, checkpoint)
                dist.barrier()
            if (rank, attempt, epoch, taken) == (1, 0, 1, 4):
                os.kill(os.getpid(), signal.SIGKILL)
dist.destroy_process_group()
"""


@pytest.mark.usefixtures("digits")
def test_after_an_elastic_restart_training_goes_on_with_the_rows_that_torch_would_give(
    tmp_path: Path, served: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(ELASTIC)
    launch = ("--standalone", f"--nproc-per-node={WORLD}", "--max-restarts=1")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *launch, str(script), str(tmp_path)],
        env=os.environ | ONE_THREAD | NEW_STORE,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"exitcode: -{int(signal.SIGKILL)}" in done.stderr
    for rank in range(WORLD):
        before, after = (rows(tmp_path / f"{rank}-{attempt}") for attempt in range(2))
        kept = before[: N // WORLD // BATCH + 2]  # up to the checkpoint; the others come again
        assert len(before) > len(kept)
        expected = [batch for epoch in dealt(rank) for batch in epoch]
        assert [batch for _, batch in kept + after] == expected
    with Client.connect(served, "cli") as client:
        (source,) = client.ask("stats")["sources"]
    assert source["opens"] == N, "the daemon outlives the ranks, with what it holds"


# --- Ray Train ------------------------------------------------------------------------------------


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch, served: str) -> Iterator[str]:
    """The address of a Ray cluster of two nodes on this machine, a core each."""
    del served
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    framework("ray.train")
    if " " in sys.executable:
        pytest.skip("Ray starts no nodes by a Python below a folder with a space")
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, num_gpus=0, object_store_memory=100 << 20)
        yield cluster.address
    finally:
        cluster.shutdown()


DIGITS = """
import json
import os
import numpy as np
import torch
from pathlib import Path
from torch.utils.data import Dataset


class Files(Dataset):
    def __init__(self, folder):
        self.paths = sorted(Path(folder).iterdir())

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return torch.from_numpy(np.load(self.paths[index]))
"""


def test_ray_train_gives_each_worker_torchs_batches_on_a_node_of_its_own(
    tmp_path: Path, digits: Path, two_nodes: str
) -> None:
    page = (ROOT / "docs/recipes/ray.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    out = tmp_path / "out"
    out.mkdir()
    note = (
        "node = ray.get_runtime_context().get_node_id()\n"
        f"            with open(f'{out}/{{torch.distributed.get_rank()}}', 'a') as file:\n"
        "                told = [node, type(loader).__module__, epoch, batch[:, 0].tolist()]\n"
        "                print(json.dumps(told), file=file)\n"
    )
    code = code.replace('"digits"', repr(str(digits))).replace("...\n", note)
    code = code.replace("DistributedSampler(data)", "DistributedSampler(data, seed=3)")
    code = code.replace("range(2)", f"range({EPOCHS})")
    script = tmp_path / "train.py"
    script.write_text(DIGITS + code)
    done = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"RAY_ADDRESS": two_nodes, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    nodes = set()
    for rank in range(WORLD):
        notes = rows(out / str(rank))
        nodes |= {node for node, *_ in notes}
        assert {module.partition(".")[0] for _, module, *_ in notes} == {"creel"}
        batches = [batch for *_, batch in notes]
        assert batches == [batch for epoch in dealt(rank) for batch in epoch]
    assert len(nodes) == WORLD


# --- Kubernetes, Kubeflow and Grafana -------------------------------------------------------------


def test_kubernetes_knows_each_key_of_the_job_and_of_the_recipe() -> None:
    """Its models, which Kubeflow has, take the files, and lose nothing: they drop unknown keys."""
    models, yaml = framework("kubeflow_trainer_api.models"), framework("yaml")
    job, service = yaml.safe_load_all((ROOT / "deploy/kubernetes.yaml").read_text())
    assert models.IoK8sApiBatchV1Job.from_dict(job).to_dict() == job
    assert models.IoK8sApiCoreV1Service.from_dict(service).to_dict() == service
    page = (ROOT / "docs/recipes/kubernetes.md").read_text()
    (lines,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    container = {"name": "train", **yaml.safe_load(lines)}
    assert models.IoK8sApiCoreV1Container.from_dict(container).to_dict() == container
    (whole,) = job["spec"]["template"]["spec"]["containers"]
    assert {name: whole[name] for name in ("env", "resources")}.items() <= container.items()
    container["envs"] = container.pop("env")
    assert models.IoK8sApiCoreV1Container.from_dict(container).to_dict() != container


def test_kubeflow_knows_each_key_of_the_trainjob() -> None:
    """Its own models take the file, and lose nothing of it: they drop keys that they don't know."""
    models = framework("kubeflow_trainer_api.models")
    job = framework("yaml").safe_load((ROOT / "deploy/trainjob.yaml").read_text())
    of = models.TrainerV1alpha1TrainJob
    assert of.from_dict(job).to_dict() == job
    job["spec"]["trainer"]["numNode"] = 3
    assert of.from_dict(job).to_dict() != job
    job["spec"]["trainer"]["numNodes"] = "three"
    with pytest.raises(ValueError, match="numNodes"):
        of.from_dict(job)


def test_grafana_knows_each_key_of_the_dashboard() -> None:
    """Its own models take the file, panel by panel and query by query, and lose nothing of it."""
    models = framework("grafana_foundation_sdk.models.dashboard")
    framework("grafana_foundation_sdk.cog.plugins").register_default_plugins()
    encoder = framework("grafana_foundation_sdk.cog.encoder").JSONEncoder()
    dashboard = json.loads((ROOT / "deploy/grafana.json").read_text())

    def lost() -> list[str]:
        known = json.loads(encoder.encode(models.Dashboard.from_json(dashboard)))
        return sorted(set(keys_of(dashboard)) - set(keys_of(known)))

    assert lost() == []
    dashboard["panels"][0]["targets"][0]["expression"] = "up"
    assert lost() == ["/panels/0/targets/0/expression: up"]


def keys_of(value: Any, path: str = "") -> Iterator[str]:
    """Yield the path of each plain value, with the value."""
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    for name, part in parts:
        if isinstance(part, dict | list) and part:
            yield from keys_of(part, f"{path}/{name}")
        else:
            yield f"{path}/{name}: {part}"
