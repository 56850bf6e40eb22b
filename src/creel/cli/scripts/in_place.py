"""Run a script with creel's DataLoader in torch's place: `python -m creel.cli.scripts.in_place`.

Scripts that name creel's class keep it. For `creel explain`, which names a file in the environment:
each epoch of a loader adds a line to it that says how much it reads.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import runpy
import sys
import sysconfig
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from creel.loader.data.maps.ranges import ranges_of
from creel.loader.dataloader import DataLoader

#: The variable with the path of that file.
NOTES = "CREEL_EXPLAIN_NOTES"
#: Folders of code that nobody edits for a training.
_PACKAGES = {"site-packages", "dist-packages"}
_FOREIGN = (sysconfig.get_path("stdlib"), Path(__file__).parents[2])


def replace_loader() -> None:
    """Let `DataLoader`, imported from torch from now on, be creel's in this process."""
    for name in ("torch.utils.data", "torch.utils.data.dataloader"):
        setattr(importlib.import_module(name), "DataLoader", DataLoader)  # noqa: B010


def note_epochs(path: str) -> None:
    """Have each epoch of creel's loaders noted in a file."""
    begin: Any = DataLoader.__iter__
    make: Any = DataLoader.__init__
    places: MutableMapping[DataLoader[Any], str] = WeakKeyDictionary()

    def placed(loader: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
        places[loader] = _caller()
        make(loader, *args, **kwargs)

    def noted(loader: DataLoader[Any]) -> Any:
        with suppress(Exception):  # a dataset or sampler without a length
            note = {
                "pid": os.getpid(),
                "dataset": type(loader.dataset).__name__,
                "where": places.get(loader, ""),
                "ahead": ranges_of(loader.dataset) is not None,
                "samples": len(loader.dataset),  # type: ignore[arg-type]  # it may lack one
                "batches": len(loader),
            }
            with Path(path).open("a", encoding="utf-8") as f:
                f.write(json.dumps(note) + "\n")
        return begin(loader)

    DataLoader.__iter__ = noted  # type: ignore[method-assign, assignment]
    DataLoader.__init__ = placed  # type: ignore[method-assign, assignment]


def _caller() -> str:
    """Return file and line of the code outside packages that makes a loader; "": there is none."""
    frame = inspect.currentframe()
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        others = _PACKAGES & set(path.parts) or any(
            path.is_relative_to(folder) for folder in _FOREIGN
        )
        if path.is_file() and not others:
            return f"{path.name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


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
