"""Run a script with creel's DataLoader in torch's place: `python -m creel.cli.scripts.in_place`.

Scripts that name creel's class keep it. For `creel explain`.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path

from creel.loader.dataloader import DataLoader


def replace_loader() -> None:
    """Let `DataLoader`, imported from torch from now on, be creel's in this process."""
    for name in ("torch.utils.data", "torch.utils.data.dataloader"):
        setattr(importlib.import_module(name), "DataLoader", DataLoader)  # noqa: B010


def main() -> None:
    """Run the script `sys.argv[1]` with the arguments after it."""
    replace_loader()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
