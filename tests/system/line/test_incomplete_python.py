"""A Python built against an old glibc (conda's, uv's), or a system without memfds."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import creel
from creel.loader import dataloader
from testbed.same import same

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

#: Functions that such a Python lacks; its `preadv` takes no flags.
LACKING = """
import fcntl, os
for name in dir(os):
    if name.startswith(("MFD_", "RWF_")) or name in {"memfd_create", "pidfd_open"}:
        delattr(os, name)
for name in dir(fcntl):
    if name.startswith("F_SEAL") or name in {"F_ADD_SEALS", "F_GET_SEALS"}:
        delattr(fcntl, name)
preadv = os.preadv
def without_flags(fd, buffers, offset, flags=0):
    if flags:
        raise NotImplementedError
    return preadv(fd, buffers, offset)
os.preadv = without_flags
"""

PROGRAM = """
import logging, os, sys, torch, creel
from creel.loader.client.client import Client
assert not hasattr(os, "memfd_create")
logging.basicConfig()

class Mine(torch.utils.data.Dataset):
    def __len__(self):
        return len(files)

    def __getitem__(self, i):
        with open(files[i], "rb") as file:
            return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)

def batches(loader):
    return [(torch.manual_seed(epoch), [b.tolist() for b in loader])[1] for epoch in range(3)]

files = sorted(sys.argv[1:])
given = dict(batch_size=4, shuffle=True)
wanted = batches(torch.utils.data.DataLoader(Mine(), **given))
for workers in (0, 2):
    for dataset in (Mine(), creel.wrap(Mine()), creel.FileDataset(files)):
        settings = {"memory.budget": "16MiB", "loader.direct": "never"}
        loader = creel.DataLoader(dataset, **given, num_workers=workers, creel=settings)
        assert batches(loader) == wanted
with Client.connect(os.environ["CREEL_SOCKET"], "cli") as client:
    assert client.ask("stats")["tiers"]["memory"]["hits"] > 0
"""


def test_a_python_without_memfd_create_trains_and_is_served(
    tmp_path: Path, daemon_name: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(LACKING)
    files = [tmp_path / f"{i}.bin" for i in range(12)]
    for i, file in enumerate(files):
        file.write_bytes(bytes([i]) * 100)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "CREEL_SOCKET": daemon_name}
    command = [sys.executable, "-c", PROGRAM, *map(str, files)]
    out = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env, check=False)
    assert (out.returncode, out.stderr) == (0, "")


def test_where_the_system_gives_no_memfd_workers_are_torchs_and_it_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if seccomp filtered it: `num_workers=0` needs none, and reads directly."""
    refusing = mock.Mock(side_effect=OSError(errno.ENOSYS, "Function not implemented"))
    monkeypatch.setattr(os, "memfd_create", refusing)
    monkeypatch.setattr(dataloader, "_warned", False)  # once in a process
    dataloader._refused_memfds.cache_clear()
    try:
        with pytest.warns(UserWarning, match="no memfd"):
            loader: Any = creel.DataLoader(torch.arange(10), 4, num_workers=1)  # type: ignore[arg-type]
        assert same([b.tolist() for b in loader], [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]])
    finally:
        dataloader._refused_memfds.cache_clear()
