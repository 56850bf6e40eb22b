"""Programs that keep decoded samples: in a memory cgroup, and below `creel verify`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

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


def test_creel_verify_compares_with_samples_that_are_decoded_anew(tmp_path: Path) -> None:
    for i in range(N):
        (tmp_path / f"{i:02}.bin").write_bytes(bytes([i] * 200))
    paths = sorted(map(str, tmp_path.glob("*.bin")))
    (tmp_path / "train.py").write_text(_SCRIPT)
    command = [sys.executable, "-m", "creel", "verify", "--json", "train.py", *paths]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    told = json.loads(done.stdout)
    assert (told["equal"], told["batches"]) == (True, 3 * N // 4)
