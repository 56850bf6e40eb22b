"""If torch lacks a private name that creel builds on, its own loader is used, with a warning."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

PROGRAM = """
import importlib, os, sys, warnings
import torch.utils.data
*others, lacking = sys.argv[1:]
for lacking in others:  # each in a process of its own, which has not imported creel
    if not os.fork():
        break
    assert os.wait()[1] == 0, lacking
else:
    lacking = sys.argv[-1]
module, _, name = lacking.rpartition(":")
delattr(importlib.import_module(module), name)
import creel, torch
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    loader = creel.DataLoader(torch.arange(10), 4, creel={"memory.budget": "16MiB"})
    batches = [b.tolist() for b in loader]
assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]], batches
said = [str(w.message) for w in caught]
assert len([s for s in said if name in s and "torch's" in s]) == 1, said
assert loader.stats()["batches"] == 0
with warnings.catch_warnings(record=True):
    loader.load_state_dict(loader.state_dict())
"""


NAMES = (
    "torch.utils.data._utils.worker:_generate_state",
    "torch.utils.data._utils.signal_handling:_set_worker_signal_handlers",
    "torch.utils.data._utils:MP_STATUS_CHECK_INTERVAL",
)


def test_a_torch_that_lacks_a_private_name_serves_its_own_batches() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM, *NAMES], check=True, timeout=100)
