"""The end of a program, and what programs do with descriptors: as with torch's loader."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import creel
from creel.errors import ConfigError
from programs import Program

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

_DATASETS = """
import os, sys, threading
folder, name = sys.argv[1:3]
os.environ["CREEL_SOCKET"] = name
os.environ["CREEL_DAEMON__LINGER_S"] = "0.5"
import torch
import creel

paths = [f"{folder}/{i:02}" for i in range(24)]
for i, path in enumerate(paths):
    with open(path, "wb") as file:
        file.write(bytes([i]) * 5000)

class Own(torch.utils.data.Dataset):
    def __len__(self):
        return len(paths)
    def __getitem__(self, i):
        with open(paths[i], "rb") as file:
            return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)

made = {"own": Own, "wrapped": lambda: creel.wrap(Own()), "files": lambda: creel.FileDataset(paths)}
"""

_LAST = """
import atexit
# Registered first, it runs last: as a thread does that runs on while the program ends.
atexit.register(lambda: last())
"""

_WRITES_AT_EXIT = (
    _LAST
    + _DATASETS
    + """
dataset = creel.wrap(Own())
dataset[0]

def last():
    # They get all numbers that were closed meanwhile.
    theirs = [open(f"{folder}/theirs{i}", "w+b", buffering=0) for i in range(64)]
    got = [dataset[i] for i in range(len(paths))]
    print(sum(os.fstat(file.fileno()).st_size for file in theirs), len(got))
"""
)


def run(
    code: str, folder: Path, name: str, *flags: str, **more: Any
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *flags, "-c", code, str(folder), name]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, **more)


def test_records_at_exit_are_in_no_persons_file(tmp_path: Path, daemon_name: str) -> None:
    done = run(_WRITES_AT_EXIT, tmp_path, daemon_name)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 24\n", "")


_ITERATORS = (
    _DATASETS
    + """
kept = []
def begin(loader):
    iterator = iter(loader)
    next(iterator)
    kept.append(iterator)

for make in made.values():
    for workers, more in ((0, {}), (1, {}), (1, {"persistent_workers": True})):
        loader = creel.DataLoader(make(), 4, num_workers=workers, **more)
        begin(loader)  # a global
        loader = creel.DataLoader(make(), 4, num_workers=workers, **more)
        cycle = iter(loader)  # a reference cycle
        next(cycle)
        loader.it, cycle.own = cycle, cycle
        loader = creel.DataLoader(make(), 4, num_workers=workers, **more)
        thread = threading.Thread(target=begin, args=(loader,))
        thread.start()
        thread.join()
        loader = creel.DataLoader(make(), 4, num_workers=workers, **more)
        over = iter(loader)
        kept.append((over, list(over)))
        if workers:
            over._shutdown_workers()
        del loader, cycle, over
sys.modules["kept until modules are gone"] = kept
"""
)


def test_iterators_that_live_until_the_end_say_nothing(tmp_path: Path, daemon_name: str) -> None:
    done = run(_ITERATORS, tmp_path, daemon_name, "-X", "dev", "-W", "error")
    assert (done.returncode, done.stderr) == (0, "")


_MANY = (
    _DATASETS
    + """
import gc

def descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))

kind, several, many = sys.argv[3], 4, 40
loaders, counts = [], []
for count in (several, many):
    while len(loaders) < count:
        loaders.append(creel.DataLoader(made[kind](), 8, creel={"loader.direct": "never"}))
    for _ in range(3):
        samples = sum(len(batch) for loader in loaders for batch in loader)
    counts.append(descriptors())
print(counts[1] - counts[0])
"""
)


@pytest.mark.parametrize("kind", ["wrapped", "files"])
def test_descriptors_do_not_grow_with_datasets(tmp_path: Path, daemon_name: str, kind: str) -> None:
    program = Program(_MANY, str(tmp_path), daemon_name, kind)
    said, errors = program.communicate()
    assert program.returncode == 0, errors
    assert abs(int(said)) <= 4, errors


_BECOMES_A_DAEMON = (
    _DATASETS
    + """
options = {"creel": {"loader.direct": "never"}}  # a quick source would not be recorded
loader = creel.DataLoader(made[sys.argv[3]](), 4, num_workers=int(sys.argv[4]), **options)
before = next(iter(loader)).sum().item()
if child := os.fork():
    status = os.waitpid(child, 0)[1]
    assert sum(batch.sum().item() for batch in loader) == 5000 * sum(range(24))
    os._exit(os.waitstatus_to_exitcode(status))
os.setsid()
os.closerange(3, 256)
theirs = [open(f"{folder}/theirs{i}", "w+b", buffering=0) for i in range(100)]
got = [sum(batch.sum().item() for batch in loader) for _ in range(3)]
again = creel.DataLoader(made[sys.argv[3]](), 4, **options)
got += [sum(batch.sum().item() for batch in again) for _ in range(3)]
assert got == [5000 * sum(range(24))] * 6, got
for file in theirs:
    assert os.fstat(file.fileno()).st_size == 0
    assert os.readlink(f"/proc/self/fd/{file.fileno()}") == file.name
sys.stderr.flush()
os._exit(0)
"""
)


@pytest.mark.parametrize("workers", ["0", "1"])
@pytest.mark.parametrize("kind", ["own", "wrapped", "files"])
def test_a_program_that_becomes_a_daemon_keeps_its_own_files(
    tmp_path: Path, daemon_name: str, kind: str, workers: str
) -> None:
    """It forks, and closes all numbers: those that creel has used are its own files' from then."""
    program = Program(_BECOMES_A_DAEMON, str(tmp_path), daemon_name, kind, workers)
    _, errors = program.communicate()
    assert program.returncode == 0, errors


class ThreadProcess(threading.Thread):
    """A worker that is a thread, as MONAI's ThreadDataLoader makes."""

    pid = property(id)

    def run(self) -> None:
        try:
            super().run()
        finally:
            torch.utils.data._utils.worker._worker_info = None


class ThreadQueue(queue.Queue[Any]):
    def close(self) -> None:
        pass

    def cancel_join_thread(self) -> None:
        pass


class ThreadContext(SpawnContext):
    Process = ThreadProcess  # type: ignore[assignment]
    Queue = ThreadQueue  # type: ignore[assignment]


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_that_are_threads_are_left_to_torch(workers: int) -> None:
    def batches(kind: Any) -> list[Any]:
        context = ThreadContext()
        loader = kind(range(12), 4, num_workers=workers, multiprocessing_context=context)
        return [batch.tolist() for batch in loader]

    assert batches(creel.DataLoader) == batches(DataLoader)


def test_ranks_that_share_need_workers_that_are_processes() -> None:
    more: Any = {"num_workers": 1, "multiprocessing_context": ThreadContext(), "replicate": 1}
    with pytest.raises(ConfigError, match="that are processes"):
        iter(creel.DataLoader(range(12), 4, **more))  # type: ignore[arg-type]


_SEARCHING = """
import atexit, threading, time
# Registered before creel's own, so it runs after them.
atexit.register(lambda: print([t.name for t in threading.enumerate() if "creel" in t.name]))
from creel.loader.line.batches.reattach import StreamSearch

began = threading.Event()

def opened():
    began.set()
    time.sleep(0.3)  # as a daemon's answer takes

search = StreamSearch(opened)
began.wait()
"""


def test_no_thread_looks_for_a_daemon_while_the_interpreter_ends() -> None:
    """One that is in Arrow's code by then aborts the process."""
    ended = subprocess.run(
        [sys.executable, "-c", _SEARCHING], check=False, capture_output=True, text=True, timeout=110
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "[]\n", "")
