"""A pytest plugin that puts creel's DataLoader in the place of torch's: `pytest -p creel_as_torch`.

For running torch's own test-suite against creel (see run_torch_suite.py beside this file).
"""

from __future__ import annotations

import torch.utils.data
import torch.utils.data.dataloader

import creel

torch.utils.data.DataLoader = creel.DataLoader  # type: ignore[misc]
