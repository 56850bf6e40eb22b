"""Libraries that make loaders of torch's class make creel's, once torch's name is another's.

Each training runs in a process of its own, as the swap is for a whole process.
"""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import libraries
import pytest

from programs import Program

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


def trained(name: str, way: str, folder: Path) -> Any:
    """Return what `libraries.py` prints."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    program = Program(Path(libraries.__file__).read_text(), name, way, str(folder), env=environment)
    output, errors = program.communicate()
    assert program.returncode == 0, errors[-3000:]
    return json.loads(output.splitlines()[-1])


@pytest.mark.parametrize("name", libraries.LIBRARIES)
def test_a_library_trains_alike_with_either_class(
    name: str, tmp_path: Path, daemon_name: str
) -> None:
    del daemon_name
    optional = os.environ.get("FRAMEWORKS") != "required" or name in libraries.BY_HAND
    if optional and find_spec(name.split(".", maxsplit=1)[0]) is None:
        pytest.skip(f"{name} is not installed")
    libraries.write(tmp_path)
    theirs = trained(name, "torch", tmp_path)
    assert len(theirs["seen"]) > 10
    assert theirs["creels"] == []
    for way in ("swap", "wrap"):
        ours = trained(name, way, tmp_path)
        assert ours["seen"] == theirs["seen"], way
        assert bool(ours["creels"]) == (name not in libraries.OWN_ITERATORS), way
