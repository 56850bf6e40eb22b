"""Decoded samples under a name: a later job finds them, and never gets one that is not its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import creel
from creel.cache.disk import named
from creel.cache.storage.stores.store import version_at
from creel.errors import ConfigError
from kit import until
from programs import Program

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("daemon"),
]

N, LOOKS = 40, 4
#: Samples that the first job makes twice: one in 16.
TWICE = 3

#: A job of two epochs: prints what it read, as the sums of the samples of each file.
JOB = """
import json, os, sys
import numpy as np
import torch
import creel
from creel.loader.data.decoded.stores import named_store

named_store._SLOW_NS = 1 << 60  # a busy machine is slow
folder, how, given, epochs = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
paths = sorted(f"{folder}/{one}" for one in os.listdir(folder) if one.endswith(".bin"))
hidden, seen = int(os.environ.get("HIDDEN", "0")), int(os.environ.get("SEEN", "0"))

def decoder(seen):
    def decode(data):
        with open(f"{folder}/calls", "a") as calls:
            calls.write(".")
        return np.frombuffer(data, np.uint8).astype(np.int64) + seen + hidden
    return decode

class Plain(torch.utils.data.Dataset):
    def __init__(self, seen):
        self.seen = seen
    def __len__(self):
        return len(paths)
    def __getitem__(self, i):
        with open(paths[i], "rb") as file:
            return decoder(self.seen)(file.read())

keep = creel.Decoded("64MiB", name=given)
if how == "dataset":
    data = creel.FileDataset(paths, decode=decoder(seen), keep_decoded=keep)
else:
    data = creel.kept(Plain(seen), keep)
more = {"num_workers": 2, "persistent_workers": True}
loader = creel.DataLoader(data, 4, shuffle=True, collate_fn=list, **more)
for _ in range(epochs):
    print(json.dumps(sorted(int(one.sum()) for batch in loader for one in batch)), flush=True)
sys.stdin.readline()
"""


class Said(NamedTuple):
    epochs: list[list[int]]
    calls: int
    log: str


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    data = tmp_path / "data"
    data.mkdir()
    for i in range(N):
        write(data, i)
    return data


def write(data: Path, i: int, more: int = 0) -> None:
    path = data / f"{i:02}.bin"
    path.write_bytes(np.random.default_rng([i, more]).bytes(3000))
    until(lambda: version_at(str(path)) > 0)


def sums(data: Path, more: int = 0) -> list[int]:
    paths = sorted(data.glob("*.bin"))
    return sorted(sum(path.read_bytes()) + 3000 * more for path in paths)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    path = tmp_path / "disk"
    path.mkdir()
    return path


def begin(data: Path, disk: Path | None, mode: str, name: str, epochs: int, **more: str) -> Any:
    env = {k: v for k, v in os.environ.items() if not k.startswith("CREEL_DISK")} | more
    env |= {"CREEL_DISK__KEEP_FREE": "0"} | ({"CREEL_DISK__PATH": str(disk)} if disk else {})
    return Program(JOB, str(data), mode, name, str(epochs), env=env)


def job(data: Path, disk: Path | None, mode: str, name: str = "n", **more: str) -> Said:
    """Run a job of two epochs; it must read what is there now."""
    before = calls(data)
    out, log = begin(data, disk, mode, name, 2, **more).communicate()
    epochs = [json.loads(line) for line in out.splitlines()]
    assert epochs == [sums(data, sum(map(int, more.values())))] * 2, log
    return Said(epochs, calls(data) - before, log)


def calls(data: Path) -> int:
    return (data / "calls").stat().st_size if (data / "calls").exists() else 0


both = pytest.mark.parametrize("mode", ["dataset", "kept"])
#: Where the two differ in nothing that the test is of.
dataset = pytest.mark.parametrize("mode", ["dataset"])
kept = pytest.mark.parametrize("mode", ["kept"])


@both
def test_the_next_job_decodes_a_few_samples_again_and_no_others(
    folder: Path, disk: Path, mode: str
) -> None:
    assert job(folder, disk, mode).calls == N + TWICE
    for _ in range(2):
        again = job(folder, disk, mode)
        assert again.calls == LOOKS
        assert "'n' is" not in again.log
    (entry,) = named.listed(str(disk))
    assert (entry.name, entry.samples, entry.kept) == ("n", N, N)
    assert job(folder, disk, mode, "another").calls == N + TWICE


@dataset
def test_files_that_were_rewritten_between_jobs_are_decoded_anew(
    folder: Path, disk: Path, mode: str
) -> None:
    job(folder, disk, mode)
    for i in range(0, N, 4):
        write(folder, i, more=1)
    assert N // 4 <= job(folder, disk, mode).calls <= N // 4 + LOOKS + 1
    assert job(folder, disk, mode).calls == LOOKS


@both
def test_what_is_seen_to_be_made_otherwise_is_another_dataset_of_that_name(
    folder: Path, disk: Path, mode: str
) -> None:
    """Here a number that a function closes over, or an attribute; both stay."""
    job(folder, disk, mode)
    assert job(folder, disk, mode, SEEN="3").calls == N + TWICE
    assert job(folder, disk, mode).calls == LOOKS
    assert [entry.kept for entry in named.listed(str(disk))] == [N, N]


@both
def test_samples_that_differ_where_nobody_looks_are_dropped_with_one_sentence(
    folder: Path, disk: Path, mode: str
) -> None:
    """By a global. The promise is broken: no sample of it reaches a batch of the first look on."""
    job(folder, disk, mode)
    before = calls(folder)
    out, log = begin(folder, disk, mode, "n", 2, HIDDEN="5").communicate()
    assert json.loads(out.splitlines()[-1]) == sums(folder, 5)
    assert log.count("'n' is dropped: sample") == 1, log
    assert calls(folder) - before >= N
    assert named.listed(str(disk)) == []
    assert job(folder, disk, mode).calls >= N


def test_creel_verify_looks_at_more_samples_than_a_job(folder: Path, disk: Path) -> None:
    """A broken promise of few samples is found, and the dataset dropped."""
    (folder / "train.py").write_text(_TRAINED)
    env = {**os.environ, "CREEL_DISK__PATH": str(disk), "CREEL_DISK__KEEP_FREE": "0"}
    paths = sorted(map(str, folder.glob("*.bin")))

    for hidden in ("0", "7"):
        program = Program(_RUN, str(folder / "train.py"), *paths, env=env | {"HIDDEN": hidden})
        assert "'n' is" not in program.communicate()[1]
        assert program.returncode == 0
    command = [sys.executable, "-m", "creel", "verify", "--json", str(folder / "train.py"), *paths]
    more = env | {"HIDDEN": "7"}
    done = subprocess.run(command, env=more, capture_output=True, text=True, check=True)
    assert done.stderr.count(f"'n' is dropped: sample {N - 1} is not what") == 1, done.stderr
    assert json.loads(done.stdout)["equal"]
    assert named.listed(str(disk)) == []


#: As `python WORDS`.
_RUN = """
import runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
_TRAINED = """
import os, sys, torch, creel
from creel.loader.data.decoded.stores import named_store

named_store._SLOW_NS = 1 << 60  # a busy machine is slow

def decode(data):
    wrong = data == open(sys.argv[-1], "rb").read()
    return torch.tensor(list(data[:50])) + int(os.environ["HIDDEN"]) * wrong

if __name__ == "__main__":
    data = creel.FileDataset(sys.argv[1:], decode=decode, keep_decoded=creel.Decoded(name="n"))
    for batch in torch.utils.data.DataLoader(data, 4):
        pass
"""


@kept
def test_a_job_that_is_killed_and_a_disk_that_lies_leave_no_wrong_sample(
    folder: Path, disk: Path, mode: str
) -> None:
    killed = begin(folder, disk, mode, "n", 1000)
    until(lambda: calls(folder) >= N // 2)
    killed.kill()
    assert killed.wait() == -signal.SIGKILL
    for pipe in (killed.stdin, killed.stdout, killed.stderr):
        pipe.close()
    job(folder, disk, mode)
    (entry,) = named.listed(str(disk))
    path = next(disk.glob(f"creel-*/decoded/{entry.key}"))
    rng = np.random.default_rng(7)
    with path.open("r+b") as file:
        for at in rng.integers(4096 + 8 * N, path.stat().st_size, 20).tolist():
            file.seek(at)
            file.write(b"\xa5")
    assert LOOKS <= job(folder, disk, mode).calls <= LOOKS + 22
    with path.open("r+b") as file:
        file.truncate(4096 + 8 * N)  # as after a loss of power
    assert job(folder, disk, mode).calls >= N


@kept
def test_without_a_folder_on_disk_they_are_kept_for_this_job(folder: Path, mode: str) -> None:
    first = job(folder, None, mode)
    assert first.calls == N + TWICE
    assert first.log.count("'n' is kept in memory, for this job alone: without disk.path") == 1
    assert job(folder, None, mode).calls == N + TWICE


def test_the_command_line_lists_and_drops_them(folder: Path, disk: Path) -> None:
    job(folder, disk, "dataset", "resize 256")
    job(folder, disk, "dataset", "other")
    env = {**os.environ, "CREEL_DISK__PATH": str(disk), "CREEL_SOCKET": "no-such-daemon"}

    def creel_says(*words: str) -> str:
        command = [sys.executable, "-m", "creel", *words]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout

    listed = json.loads(creel_says("ls", "--json"))["decoded"]
    assert [entry["name"] for entry in listed] == ["other", "resize 256"]
    assert (listed[0]["samples"], listed[0]["kept"]) == (N, N)
    assert "resize 256" in creel_says("ls")
    assert creel_says("drop", "resize 256").startswith("dropped resize 256: ")
    assert [entry.name for entry in named.listed(str(disk))] == ["other"]


def test_a_name_keeps_the_four_datasets_that_were_used_last(disk: Path) -> None:
    for i in range(6):
        about = {"name": "n", "dataset": "d", "samples": 1}
        os.close(named.open_samples(str(disk), f"{i}", about, bytes(24), 4096))
        os.utime(next(disk.glob(f"creel-*/decoded/{i}")), (i, i))
    assert [entry.key for entry in named.listed(str(disk))] == ["5", "4", "3", "2"]


@pytest.mark.parametrize("wrong", [{"name": ""}, {"name": 3}, {"limit": "much"}, {"limit": -1}])
def test_a_name_is_a_text_and_a_limit_a_size(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        creel.Decoded(**wrong)
    with pytest.raises(ConfigError, match="shared under that one"):
        creel.kept([1], creel.Decoded(name="n"), shared_as="m")  # type: ignore[arg-type]
