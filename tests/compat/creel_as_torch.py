"""A pytest plugin that replaces torch's DataLoader by creel's: `pytest -p creel_as_torch`.

It runs torch's own test-suite against creel (see run_torch_suite.py).
"""

from __future__ import annotations

import torch.utils.data
import torch.utils.data.dataloader

import creel

torch.utils.data.DataLoader = creel.DataLoader  # type: ignore[misc]
