"""Run a script with creel's DataLoader in torch's place: `python -m creel.cli.scripts.in_place`.

Scripts that name creel's class keep it. For `creel explain`, which names a file in the environment:
each epoch of a loader adds a line to it that says how much it reads.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from creel.loader.data.maps.ranges import ranges_of
from creel.loader.dataloader import DataLoader

#: The variable with the path of that file.
NOTES = "CREEL_EXPLAIN_NOTES"


def replace_loader() -> None:
    """Let `DataLoader`, imported from torch from now on, be creel's in this process."""
    for name in ("torch.utils.data", "torch.utils.data.dataloader"):
        setattr(importlib.import_module(name), "DataLoader", DataLoader)  # noqa: B010


def note_epochs(path: str) -> None:
    """Have each epoch of creel's loaders noted in a file."""
    begin: Any = DataLoader.__iter__

    def noted(loader: DataLoader[Any]) -> Any:
        with suppress(Exception):  # a dataset or sampler without a length
            note = {
                "pid": os.getpid(),
                "dataset": type(loader.dataset).__name__,
                "ahead": ranges_of(loader.dataset) is not None,
                "samples": len(loader.dataset),  # type: ignore[arg-type]  # it may lack one
                "batches": len(loader),
            }
            with Path(path).open("a", encoding="utf-8") as f:
                f.write(json.dumps(note) + "\n")
        return begin(loader)

    DataLoader.__iter__ = noted  # type: ignore[method-assign, assignment]


def main() -> None:
    """Run the script `sys.argv[1]` with the arguments after it."""
    replace_loader()
    if os.environ.get(NOTES):
        note_epochs(os.environ[NOTES])
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
