"""Programs that keep decoded samples: in a memory cgroup, and below `creel verify`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from creel.cache.storage.stores.store import version_at
from kit import until
from programs import Program
from testbed.cgroups import Cgroups, limits_of
from testbed.host import TestbedError

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

N = 24
_IN_CGROUP = """
    import sys
    import numpy as np, torch, creel
    folder = sys.argv[1]
    def decode(data):
        return np.frombuffer(data * 2000, np.uint8).copy()  # 2 MB
    dataset = creel.FileDataset(folder, decode=decode, transform=len, keep_decoded="4GiB")
    loader = creel.DataLoader(dataset, 4, num_workers=2, creel=False)
    grown, most = [], 0
    for epoch in range(3):
        for batch in loader:
            assert batch.tolist() == [2_000_000] * len(batch)
            most = max(most, dataset.keeping.store.used_nbytes)
            if epoch == 1 and len(grown) < 15:
                grown.append(bytearray(b"x" * 20_000_000))
    print(most, dataset.keeping.store.used_nbytes)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a cgroup")
def test_in_a_memory_cgroup_it_takes_what_is_free_and_gives_it_back(tmp_path: Path) -> None:
    """All samples are 1.2 GB, and the trainer grows by 300 MB: nobody is killed."""
    (tmp_path / "files").mkdir()
    for i in range(600):
        (tmp_path / "files" / f"{i:03}").write_bytes(bytes([i % 256]) * 1000)
    cgroups = Cgroups(f"decoded-{os.getpid()}")
    try:
        joins = cgroups.create("trainer", limits_of("1200M", None, None, tmp_path))
    except TestbedError as e:
        pytest.skip(str(e))
    join = "".join(f"echo $$ > {group}/cgroup.procs; " for group in joins)
    code = textwrap.dedent(_IN_CGROUP)
    command = ["sh", "-c", f'{join} exec "$@"', "sh", sys.executable, "-c", code]
    env = os.environ | {"CREEL_LOADER__EMBED": "false"}
    done = subprocess.run(
        [*command, str(tmp_path / "files")], env=env, capture_output=True, text=True, check=False
    )
    cgroups.remove(joins)
    assert done.returncode == 0, done.stderr
    most, left = map(int, done.stdout.split())
    assert most > 200_000_000
    assert left < most - 100_000_000
    assert "other processes need memory" in done.stderr


_SCRIPT = """
import sys
import torch
import creel

def decode(data):
    return torch.tensor(list(data[:100]))

def augment(sample):
    return sample * torch.rand(1)

if __name__ == "__main__":
    data = creel.FileDataset(sys.argv[1:], decode=decode, transform=augment, keep_decoded="1MiB")
    loader = torch.utils.data.DataLoader(data, 4, shuffle=True, num_workers=2)
    for epoch in range(3):
        for batch in loader:
            pass
"""


@pytest.mark.usefixtures("either_way")
def test_creel_verify_compares_with_samples_that_are_decoded_anew(tmp_path: Path) -> None:
    for i in range(N):
        (tmp_path / f"{i:02}.bin").write_bytes(bytes([i] * 200))
    paths = sorted(map(str, tmp_path.glob("*.bin")))
    (tmp_path / "train.py").write_text(_SCRIPT)
    command = [sys.executable, "-m", "creel", "verify", "--json", "train.py", *paths]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    answer = json.loads(done.stdout)
    assert (answer["equal"], answer["batches"]) == (True, 3 * N // 4)


_EXPERIMENT = """
import os, sys, creel
number, shared_as, paths = int(os.environ["SLURM_PROCID"]), sys.argv[1] or None, sys.argv[2:]

def decode(data):
    with open(f"{paths[0]}.log", "a") as log:
        log.write(".")
    return data.decode() * (number + 1 if shared_as is None else 1)

class Own:
    def __len__(self):
        return len(paths)
    def __getitem__(self, i):
        with open(paths[i], "rb") as file:
            return decode(file.read())

files = creel.FileDataset(paths, decode=decode, keep_decoded="1MiB", shared_as=shared_as)
kept = creel.kept(Own(), "1MiB", shared_as=shared_as)
print(*(sample[0] for data in (files, kept) for sample in [data] * 2), flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("shared_as", ["", "letters"])
def test_tasks_of_a_step_share_samples_only_under_a_name(tmp_path: Path, shared_as: str) -> None:
    """They may be experiments of a sweep: each has its own setting, in a global."""
    path = tmp_path / "0"
    path.write_text("x")
    until(lambda: version_at(str(path)) > 0)
    step = {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0"}
    tasks, samples = [], []
    for number in range(2):
        env = {**os.environ, **step, "SLURM_JOB_ID": "7", "SLURM_PROCID": str(number)}
        tasks.append(Program(_EXPERIMENT, shared_as, str(path), env=env))
        samples.append(tasks[-1].stdout.readline().split())
    for task in tasks:
        task.communicate("\n")
    assert samples == [["x"] * 4, [("x" if shared_as else "xx")] * 4]
    calls = 2 * 2  # of both datasets, whose only sample is made twice at first
    # Of a named store the second task compares a sample of each with its own.
    assert (tmp_path / "0.log").stat().st_size == calls + (4 if shared_as else calls)
