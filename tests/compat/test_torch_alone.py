"""Torch's own checkpoints, pinning, and an installation without torch."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import creel
from creel.errors import ConfigError

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(90),
    pytest.mark.filterwarnings("ignore"),  # torch's own warnings
]


CLASSES = [DataLoader, creel.DataLoader]


NUMBERS: Any = list(range(40))  # torch accepts a list as a dataset, its types do not


def resumable(workers: int = 0) -> Any:
    generator = torch.Generator().manual_seed(4)
    return creel.DataLoader(NUMBERS, 4, True, num_workers=workers, generator=generator, creel=False)


def test_a_state_survives_torchs_checkpoints_as_one_value(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

    whole = resumable(2)
    iterator = iter(whole)
    for _ in range(3):
        next(iterator)
    state = whole.state_dict()
    expected = [b.tolist() for b in iterator]

    torch.save(state, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    value: dict[str, Any] = {"loader": pickle.dumps(state)}
    state_dict_saver.save(value, checkpoint_id=tmp_path / "dcp")
    value = {"loader": b""}
    state_dict_loader.load(value, checkpoint_id=tmp_path / "dcp")
    for given in (loaded, pickle.loads(value["loader"])):
        later = resumable()
        later.load_state_dict(given)
        assert [b.tolist() for b in later] == expected


def test_a_state_that_a_checkpoint_took_apart_is_refused(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

    whole = resumable()
    next(iter(whole))
    state_dict_saver.save({"loader": whole}, checkpoint_id=tmp_path)
    with pytest.raises(ConfigError, match="lacks keys"):
        state_dict_loader.load({"loader": resumable()}, checkpoint_id=tmp_path)


@pytest.mark.parametrize("state", ["x", {"a": 1}, {"version": 1}, {"_num_yielded": 3}], ids=str)
def test_a_state_of_another_loader_is_refused_in_words(state: Any) -> None:
    with pytest.raises(ConfigError, match="state_dict"):
        resumable().load_state_dict(state)
    with pytest.raises(ConfigError, match="delivered is -1"):
        resumable().state_dict(delivered=-1)


def test_a_wrong_creel_argument_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"creel=\.\.\..*did you mean memory\.budget"):
        creel.DataLoader(NUMBERS, creel={"memory.budgt": "1GB"})
    with pytest.raises(ConfigError, match="creel=5: give None, False, a daemon's name"):
        creel.DataLoader(NUMBERS, creel=5)  # type: ignore[arg-type]


WRONG: list[Any] = [32, 3.5, "x", ["skip"], {"a": 1}, torch.zeros(99), object(), print, True]
ARGUMENTS = ["remap", "replicate", "on_error", "max_bad_samples", "rehearsal", "seeding", "workers"]


@pytest.mark.parametrize("name", [*ARGUMENTS, "creel", "creel_args", "num_workers"])
def test_a_value_of_a_wrong_type_gets_one_sentence_that_names_the_argument(name: str) -> None:
    right: dict[str, set[type]] = {
        "replicate": {int},
        "max_bad_samples": {int},
        "creel": {str, dict, bool},
    }
    right["num_workers"] = set(map(type, WRONG)) - {str}  # torch's own errors
    for value in WRONG:
        if type(value) in right.get(name, set()):
            continue
        with pytest.raises(ConfigError) as caught:
            creel.DataLoader(NUMBERS, 4, **{name: value})
        assert str(caught.value).startswith(f"{name}=")
        assert len(str(caught.value).splitlines()) == 1
        assert ": give " in str(caught.value)


@pytest.mark.parametrize(
    "call, names",
    [
        (lambda memory, _: memory.add(5), "length"),
        (lambda memory, _: memory.add(NUMBERS, [[1], [1, 2]]), "labels="),
        (lambda memory, _: memory.add(NUMBERS, order=[[1], [1, 2]]), "order="),
        (lambda memory, _: memory.add(NUMBERS, labels="x"), "labels"),
        (lambda *_: creel.Rehearsal("x"), "per_batch="),  # type: ignore[arg-type]
        (lambda *_: creel.Rehearsal(2, budget=1.5), "budget="),  # type: ignore[arg-type]
        (lambda _, loader: loader.state_dict(delivered="x"), "delivered is 'x'"),
        (lambda _, loader: loader.load_state_dict(loader.state_dict(), leave_out=5), "leave_"),
    ],
)
def test_so_does_one_of_a_method(call: Any, names: str) -> None:
    loader = resumable()
    next(iter(loader))
    with pytest.raises(ConfigError) as caught:
        call(creel.Rehearsal(2), loader)
    assert names in str(caught.value)


def test_without_torch_the_command_line_works_and_the_rest_says_what_to_install(
    tmp_path: Path,
) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('no torch', name='torch')")
    (tmp_path / "train.py").write_text("")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    for args, code in ((["--version"], 0), (["verify", "train.py"], 2)):
        done = subprocess.run(
            [sys.executable, "-m", "creel", *args],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
        assert done.returncode == code
        assert "Traceback" not in done.stderr
        assert not code or "pip install 'creel-data[torch]'" in done.stderr
    done = subprocess.run(
        [sys.executable, "-c", "import creel; creel.DataLoader"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert "creel.DataLoader needs torch: pip install 'creel-data[torch]'" in done.stderr


def test_pinning_without_an_accelerator_warns_as_torch_does() -> None:
    if getattr(torch, "accelerator", torch.cuda).is_available():  # torch >= 2.6 has the former
        pytest.skip("there is an accelerator")
    said = []
    for cls in CLASSES:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            list(cls(NUMBERS, pin_memory=True))
        said.append([str(w.message) for w in caught])
    assert said[0] == said[1]  # some releases of torch do not warn
