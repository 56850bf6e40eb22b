"""Workers of creel.DataLoader: dead, hung and left ones, and their leftovers."""

from __future__ import annotations

import errno
import itertools
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import pickle
import platform
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

import creel
from creel.cache.memory.slots.reader import SlotReader
from creel.loader.line.batches import iterator as iterators
from creel.loader.making.batch_times import StallWarning
from creel.loader.making.places.processes import WorkerPool
from kit import descriptors, gone, stopped, until
from programs import Program
from squares import Pids, Squares, pids

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("nothing_stays_behind")]


class Act(Squares):
    """Does something drastic at sample 5."""

    def __init__(self, act: str, gate: Path = Path()) -> None:
        super().__init__()
        self.act = act
        self.gate = gate

    def __getitem__(self, i: int) -> Any:
        if i == 5:
            acts: dict[str, Callable[[], object]] = {
                "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
                "exit": lambda: os._exit(3),
                "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
                "wait": lambda: until(self.gate.exists),
                "leave a child": self.leave_a_child,
            }
            acts[self.act]()
        return i

    def leave_a_child(self) -> None:
        """Exit, but leave a child that has inherited all descriptors."""
        if os.fork() == 0:
            until(self.gate.exists)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_live_on_where_torchs_do(persistent: bool) -> None:
    """Two for each of three epochs; persistent workers are the same two."""
    loader = creel.DataLoader(Pids(), 4, num_workers=2, persistent_workers=persistent)
    seen = {int(p) for _ in range(3) for b in loader for p in b}
    assert len(seen) == (2 if persistent else 6)


def slots() -> set[int]:
    """Return the slots that this process has mapped, by inode."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {int(line.split()[4]) for line in lines if "creel-slot" in line}


def test_the_next_epochs_workers_write_where_the_last_ones_did() -> None:
    """Except where a batch is still held, which must not be overwritten."""
    rows = torch.arange(64 * 5000).view(64, 5000)
    loader = creel.DataLoader(torch.utils.data.TensorDataset(rows), 4, num_workers=2)
    held, before = next(iter(loader))[0], set[int]()
    for _ in range(4):
        for i, (batch,) in enumerate(loader):
            assert torch.equal(batch, rows[4 * i : 4 * i + 4])
        del batch  # held when the workers ended, so its slot was not passed on
        now = slots()
        assert len(before - now) <= 1
        before = now
    assert len(before) > 1
    assert torch.equal(held, rows[:4])


def test_workers_of_a_left_iterator_end_with_it() -> None:
    loader = creel.DataLoader(Squares(), 4, num_workers=2)
    first = iter(loader)
    next(first)
    before = pids(first)
    del first
    assert all(map(gone, before))
    assert [int(b[0]) for b in loader] == [(4 * i) ** 2 for i in range(10)]


def test_left_iterators_leave_no_workers_and_no_descriptors() -> None:
    loader = creel.DataLoader(Squares(), 4, num_workers=1)
    next(iter(loader))
    fds = len(descriptors())
    for _ in range(30):
        assert int(next(iter(loader))[1]) == 1
    assert not multiprocessing.active_children()
    assert len(descriptors()) <= fds


@pytest.mark.parametrize(("owner", "moment"), [(BaseProcess, "start"), (WorkerPool, "task")])
def test_ctrl_c_as_an_epoch_begins_leaves_no_workers(
    owner: type, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = creel.DataLoader(Squares(), 4, num_workers=2)
    first = list(map(int, torch.cat(list(loader))))
    method, calls = getattr(owner, moment), itertools.count()

    def interrupted(*args: Any, **more: Any) -> Any:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return method(*args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(owner, moment, interrupted)
        with pytest.raises(KeyboardInterrupt):
            iter(loader)
    assert not multiprocessing.active_children()
    assert list(map(int, torch.cat(list(loader)))) == first


class Uneven(Squares):
    """Worker 0 delays its first batch until worker 1's fourth; each takes a slot."""

    def __init__(self, gate: Path) -> None:
        super().__init__()
        self.gate = gate

    def __getitem__(self, i: int) -> Any:
        if i == 7:
            self.gate.touch()
        if i == 0:
            until(self.gate.exists)
        return torch.full((10_000,), float(i))


@pytest.mark.parametrize("persistent", [False, True])
def test_batches_that_came_before_their_turn_keep_no_slot_of_an_epoch_that_is_left(
    persistent: bool, tmp_path: Path
) -> None:
    loader = creel.DataLoader(
        Uneven(tmp_path / "gate"),
        1,
        num_workers=2,
        prefetch_factor=4,
        persistent_workers=persistent,
    )
    before = slots_mapped()
    for _ in range(10):
        (tmp_path / "gate").unlink(missing_ok=True)
        assert int(next(iter(loader))[0, 0]) == 0
    assert slots_mapped() - before <= 2 * 8  # loader.slots of each worker
    del loader


def test_a_batch_whose_successor_the_sampler_fails_to_give_keeps_no_slot() -> None:
    class Ends:
        def __iter__(self) -> Iterator[list[int]]:
            yield from ([i] for i in range(2))
            raise ValueError("here")

        def __len__(self) -> int:
            return 3

    samples = [torch.full((10_000,), float(i)) for i in range(2)]
    loader: Any = creel.DataLoader(
        samples,  # type: ignore[arg-type]  # has all that is needed
        batch_sampler=Ends(),
        num_workers=1,
        persistent_workers=True,
    )
    before = slots_mapped()
    it = iter(loader)
    for _ in range(15):
        with pytest.raises(ValueError, match="here"):
            list(it)
        it = iter(loader)
    assert slots_mapped() - before <= 8


def slots_mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:creel-slot")


def test_a_batch_there_is_no_room_to_map_ends_the_epoch_and_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    samples = [torch.full((10_000,), float(i)) for i in range(8)]
    it = iter(creel.DataLoader(samples, num_workers=1, timeout=20))  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr(SlotReader, "map_slot", full)
        with pytest.raises(OSError, match="Cannot allocate"):
            next(it)
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        next(it)


def print_nothing(worker: int) -> None: ...


def test_two_live_iterators_have_workers_of_their_own() -> None:
    loader = creel.DataLoader(Squares(), 4, num_workers=1)
    a, b = iter(loader), iter(loader)
    assert not set(pids(a)) & set(pids(b))
    assert [int(x[0]) for x in a] == [int(x[0]) for x in b]


@pytest.mark.parametrize(
    "act, words", [("kill", "killed by signal: Killed"), ("exit", "exit code 3")]
)
def test_a_dead_worker_is_named_at_once(
    act: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(iterators, "POLL_S", 1000)  # no wait wakes up by itself
    loader = creel.DataLoader(Act(act), 2, num_workers=2)
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid\(s\) \d+\) exited") as e:
        list(loader)
    assert words in str(e.value.__cause__)
    assert [int(b[0]) for b in creel.DataLoader(Squares(), 2, num_workers=2)][:2] == [0, 4]


@pytest.mark.parametrize("timeout", [0, 1])
def test_a_dead_worker_is_named_whose_child_lives_on(
    timeout: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(iterators, "POLL_S", 0.5)
    gate = tmp_path / "gate"
    loader = creel.DataLoader(Act("leave a child", gate), 2, num_workers=2, timeout=timeout)
    try:
        with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid\(s\) \d+\) exited"):
            list(loader)
    finally:
        gate.touch()


def test_after_a_death_the_other_workers_batches_still_come() -> None:
    iterator = iter(creel.DataLoader(Act("kill"), 2, num_workers=2))
    got: list[int] = []
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        got += (int(b[0]) for b in iterator)
    got += (int(b[0]) for b in iterator)
    assert got[:1] == [0]
    assert got == sorted(set(range(0, 40, 2)) - {4, 8})  # without the two batches given to it


def test_a_persistent_worker_killed_between_epochs_is_named() -> None:
    loader = creel.DataLoader(Squares(), 4, num_workers=2, persistent_workers=True)
    iterator = iter(loader)
    list(iterator)
    victim = pids(iterator)[0]
    os.kill(victim, signal.SIGKILL)
    until(lambda: gone(victim))
    with pytest.raises(RuntimeError, match=rf"pid\(s\) {victim}\) exited unexpectedly"):
        list(loader)


def test_a_timeout_says_torchs_words_and_iteration_goes_on(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    iterator: Any = iter(creel.DataLoader(Act("wait", gate), 5, num_workers=1, timeout=50))
    assert next(iterator).tolist() == [0, 1, 2, 3, 4]
    iterator._timeout = 0.3  # torch's name; the first batch may take longer to come
    with pytest.raises(RuntimeError, match=r"^DataLoader timed out after 0.3 seconds$"):
        next(iterator)
    gate.touch()
    iterator._timeout = 50
    assert next(iterator).tolist() == [5, 6, 7, 8, 9]


def test_a_stopped_worker_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iterators, "POLL_S", 0.3)
    options = {"loader.hung_s": 0.5}
    iterator = iter(creel.DataLoader(Act("stop"), 5, num_workers=1, creel=options))
    (worker,) = pids(iterator)
    until(lambda: stopped(worker))  # after it has sent the first batch
    next(iterator)
    with (
        pytest.warns(StallWarning, match=r"batch 1 .* stopped by a signal.* reading") as warned,
        woken_when(lambda: len(warned) > 0, worker),
    ):
        assert next(iterator).tolist() == [5, 6, 7, 8, 9]


@contextmanager
def woken_when(condition: Callable[[], bool], pid: int) -> Iterator[None]:
    """Let a stopped process continue as soon as the condition holds."""

    def wake() -> None:
        try:
            until(condition)
        finally:
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=wake)
    thread.start()
    yield
    thread.join()


def test_closing_kills_a_stopped_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("creel.loader.making.places.processes.GRACE_S", 0.5)
    iterator = iter(creel.DataLoader(Act("stop"), 5, num_workers=1, worker_init_fn=print_nothing))
    next(iterator)
    (worker,) = pids(iterator)
    until(lambda: stopped(worker))
    del iterator
    assert gone(worker)


def test_long_index_lists_and_many_of_them_do_not_block() -> None:
    batches = [list(range(15_000))] * 40
    loader = creel.DataLoader(
        Squares(15_000), batch_sampler=batches, num_workers=2, prefetch_factor=16, collate_fn=len
    )
    assert list(loader) == [15_000] * 40


def test_a_batch_that_cannot_be_pickled_is_an_error_not_a_hang() -> None:
    loader = creel.DataLoader(Squares(), 4, num_workers=1, collate_fn=lambda b: lambda: b)
    with pytest.raises(Exception, match="in DataLoader worker process 0"):
        next(iter(loader))


def test_an_unpicklable_index_is_an_error_in_the_trainer() -> None:
    loader = creel.DataLoader(Squares(), 4, sampler=[lambda: 0] * 4, num_workers=1)
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        iter(loader)


#: The imports of a trainer in a process of its own.
IMPORTS = f"""
import os, sys, warnings
warnings.filterwarnings("ignore", "This DataLoader will create")
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[2])]}
import creel
from squares import Squares
"""


def test_workers_end_when_the_trainer_is_killed() -> None:
    code = IMPORTS + (
        "it = iter(creel.DataLoader(Squares(), 4, num_workers=2)); next(it)\n"
        "print(*[w.pid for w in it._workers], flush=True); os.kill(os.getpid(), 9)"
    )
    said, errors = Program(code).communicate()
    workers = [int(p) for p in said.split()]
    assert len(workers) == 2, errors
    until(lambda: all(map(gone, workers)), event="the workers end")


def test_an_interpreter_with_live_workers_exits_quietly() -> None:
    code = IMPORTS + (
        "loader = creel.DataLoader(Squares(), 4, num_workers=2)\n"
        "list(loader); it = iter(loader); next(it); print('end')"
    )
    assert Program(code).communicate() == ("end\n", "")


def test_a_module_that_another_thread_is_importing_holds_up_no_worker() -> None:
    code = (
        IMPORTS
        + """
import importlib, sys, threading, time
import numpy

class Slow:
    def find_spec(self, name, *_):
        if name == "numpy.ma":
            begun.set()
            time.sleep(1)

for name in [name for name in sys.modules if name.startswith("numpy.ma.")] + ["numpy.ma"]:
    sys.modules.pop(name, None)
vars(numpy).pop("ma", None)
sys.meta_path.insert(0, Slow())
begun = threading.Event()
threading.Thread(target=importlib.import_module, args=("numpy.ma",)).start()
begun.wait()
options = {"loader.direct": "never", "loader.embed": False}  # what is read is recorded
loader = creel.DataLoader(creel.wrap(Squares()), 4, num_workers=1, timeout=30, creel=options)
print(len(list(loader)))
"""
    )
    out, _ = Program(code).communicate()
    assert out == "10\n"


def test_a_forked_child_may_drop_or_use_the_loader() -> None:
    loader = creel.DataLoader(Squares(), 4, num_workers=1)
    iterator = iter(loader)
    next(iterator)
    child = os.fork()
    if child == 0:
        ok = [int(b[0]) for b in loader] == [(4 * i) ** 2 for i in range(10)]
        del iterator, loader
        os._exit(0 if ok else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert int(next(iterator)[0]) == 16


def test_a_forked_child_is_told_to_begin_an_iterator_of_its_own() -> None:
    iterator = iter(creel.DataLoader(Squares(), 4, num_workers=2))
    next(iterator)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            next(iterator)
        except RuntimeError as e:
            os.write(write, str(e).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        assert pipe.read() == (
            f"this iterator belongs to process {os.getpid()} and cannot be used in the forked"
            f" process {child}: create a new one with iter(loader)"
        )
    os.waitpid(child, 0)
    assert [int(b[0]) for b in iterator] == [(4 * i) ** 2 for i in range(1, 10)]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.slow
def test_other_start_methods_make_workers_of_their_own(method: str) -> None:
    loader = creel.DataLoader(Pids(), 4, num_workers=1, multiprocessing_context=method)
    (first,), (second,) = ({int(p) for b in loader for p in b} for _ in range(2))
    assert len({first, second, os.getpid()}) == 3


class Hundred(Squares):
    """Samples of 100 KB."""

    def __getitem__(self, i: int) -> bytes:
        return bytes([i % 256]) * 100_000


def faults(_: list[bytes]) -> int:
    """Return how many pages this process has touched for the first time."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a hint to glibc")
@pytest.mark.slow
def test_a_worker_uses_what_a_batch_freed_for_the_next() -> None:
    # Spawned: a forked process inherits this process's adapted limits.
    fault_counts = list(
        creel.DataLoader(
            Hundred(1280), 64, num_workers=1, multiprocessing_context="spawn", collate_fn=faults
        )
    )
    assert fault_counts[-1] - fault_counts[4] < 64 * 15  # a sample has 24 pages, a batch 64 samples


def test_a_ctrl_c_while_workers_end_keeps_none_of_their_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each Ctrl-C kept the slots of a pool for as long as the process lived."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    before = descriptors()
    for _ in range(3):
        loader = creel.DataLoader(torch.arange(64.0), 4, num_workers=2, creel=False)  # type: ignore[arg-type, var-annotated]
        iterator = iter(loader)
        next(iterator)
        with monkeypatch.context() as patched:
            patched.setattr("multiprocessing.process.BaseProcess.join", interrupted)
            with pytest.raises(KeyboardInterrupt):
                list(iterator)
        del iterator, loader
    assert not [target for _, target in descriptors() - before if "creel-" in target]
