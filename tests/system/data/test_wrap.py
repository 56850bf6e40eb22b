"""creel.wrap below torch's own DataLoader: cached on the node, with torch's batches."""

from __future__ import annotations

import errno
import json
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset, StackDataset, Subset

import creel
from creel.addresses import first_address
from creel.errors import ConfigError
from creel.loader.client import connections
from creel.loader.client.session import Session
from creel.loader.data.binding.wrapped import is_wrapped, reads_of, unwrap
from creel.loader.data.datasets.files import FileDataset
from creel.system.unix_peers import owner_of
from daemons import Running
from folders import folder as torchvision
from kit import Cores, daemon_of, gone, until
from programs import Program

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

N, NBYTES, BATCH = 120, 20_000, 8
SEALED = "creel.loader.client.client.sealed_file"  # the memfd of a manifest


class Files(FileDataset):
    """Logs how often this process, trainer or worker, read the source."""

    log: str

    def _read_direct(self, object_id: int) -> bytes:  # a method that datasets may override
        with Path(self.log).open("ab", buffering=0) as f:
            f.write(b".")
        return super()._read_direct(object_id)


class Node:
    """A daemon and a folder of files."""

    def __init__(self, daemon: Running, path: Path) -> None:
        self.daemon = daemon
        self.path = path
        self._log = path / "log"
        self._log.touch()
        self._before = 0

    def files(self, **more: Any) -> Any:
        files = Files(self.path, "*.raw", decode=bytes, **more)
        files.log = str(self._log)
        return files

    def stats(self) -> dict[str, Any]:
        with self.daemon.client("cli") as client:
            return client.ask("stats")

    def direct(self) -> int:
        return self._log.stat().st_size

    def reads(self) -> int:
        """Return the reads of the source since the last call, by the daemon and by all readers."""
        datasets = self.stats()["core"]["datasets"].values()
        now = self.direct() + sum(int(d["reads"]) for d in datasets)
        before, self._before = self._before, now
        return now - before


def folder(path: Path, n: int = N) -> Path:
    path.mkdir(exist_ok=True)
    rng = np.random.default_rng(n)
    for i in range(n):
        (path / f"{i:03}.raw").write_bytes(rng.bytes(NBYTES))
    return path


@pytest.fixture
def node(
    daemon_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any
) -> Iterator[Node]:
    monkeypatch.setenv("CREEL_LOADER__EMBED", "false")
    share = getattr(request, "param", 1.5)
    memory = str(int(share * N * NBYTES))
    with Running(daemon_name, memory=memory) as daemon:
        yield Node(daemon, folder(tmp_path / "data"))
        connections.disconnect(daemon_name)


def batches(dataset: Any, size: int = BATCH, kind: Any = DataLoader, **more: Any) -> Any:
    """Return a loader, torch's or another, with the same order each time."""
    generator = torch.Generator().manual_seed(3)
    return kind(dataset, size, True, collate_fn=list, generator=generator, **more)


HOW: dict[str, dict[str, Any]] = {
    "here": {},
    "fork": {"num_workers": 2, "multiprocessing_context": "fork"},
    "fork, persistent": {
        "num_workers": 2,
        "multiprocessing_context": "fork",
        "persistent_workers": True,
    },
    # the second process of two that share no memory; each imports torch
    "spawn": {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True},
}


@pytest.mark.parametrize(
    "mode", ["here", "fork", "fork, persistent", pytest.param("spawn", marks=pytest.mark.slow)]
)
def test_files_that_fit_are_read_once_over_all_epochs_and_workers(node: Node, mode: str) -> None:
    files = node.files()
    loader = batches(creel.wrap(files), **HOW[mode])
    # persistent workers draw differently, so torch's loader needs them, too
    forked = HOW[mode] | {"multiprocessing_context": "fork"}
    same = forked if "persistent_workers" in forked else {}
    bare = batches(FileDataset(node.path, "*.raw", decode=bytes), **same)
    reads = []
    for _ in range(3):
        assert list(loader) == list(bare)
        reads.append(node.reads())
    assert reads == [N, 0, 0]


@pytest.mark.parametrize("node", [0.5], indirect=True)
@pytest.mark.parametrize("mode", ["here", "fork"])
def test_half_the_memory_gives_nearly_half_the_hits(node: Node, mode: str) -> None:
    """Less the objects that two workers hold or just held: 1/15 of the room, in batches of 2."""
    loader = batches(creel.wrap(node.files()), 2, **HOW[mode])
    for _ in loader:
        pass
    node.reads()
    for _ in range(3):
        for _ in loader:
            pass
    assert 0.5 * N <= node.reads() / 3 <= 0.62 * N  # LRU would read 0.85 N


@pytest.mark.parametrize("node", [0.5], indirect=True)
def test_files_that_do_not_fit_are_read_by_the_daemon_all_the_same(node: Node) -> None:
    loader = batches(creel.wrap(node.files()))
    for _ in range(3):
        for _ in loader:
            pass
    assert node.direct() == 0


class Squares(Dataset[bytes]):
    """A dataset of which nothing is known."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, i: int) -> bytes:
        return b"%d" % (i * i)


@pytest.mark.parametrize("node", [9.0], indirect=True)  # each tree is a dataset of its own
def test_torchs_wrappers_may_be_inside_and_outside(node: Node) -> None:
    def tree(a: Any, b: Any, outside: Any) -> Any:
        return outside(ConcatDataset([Subset(a, range(5, 50)), b, Squares()]))

    def plain(x: Any) -> Any:
        return x

    whole = batches(tree(node.files(), node.files(), plain))
    node.reads()
    for dataset, workers in (
        (tree(node.files(), node.files(), creel.wrap), 2),
        (tree(creel.wrap(node.files()), creel.wrap(node.files()), plain), 0),
        (Subset(tree(node.files(), creel.wrap(node.files()), creel.wrap), range(45 + N + 30)), 2),
    ):
        expected = sorted(chain.from_iterable(whole))
        got = batches(dataset, num_workers=workers)
        assert sorted(chain.from_iterable(got)) == expected
        node.reads()
        assert sorted(chain.from_iterable(got)) == expected
        assert node.reads() == 0


def other_samples(dataset: Any) -> None:
    dataset.dataset.samples = dataset.dataset.samples[::-1]


def other_indices(dataset: Any) -> None:
    dataset.indices = dataset.indices[::-1]


@pytest.mark.parametrize(("change", "mode"), [(other_samples, "fork"), (other_indices, "here")])
def test_a_dataset_that_was_changed_gives_its_new_samples(
    node: Node, tmp_path: Path, mode: str, change: Callable[[Any], None]
) -> None:
    """A user may assign other contents to its samples; objects get other numbers then."""
    images = tmp_path / "images"
    images.mkdir()
    for name in "ab":
        for path in folder(images / name).iterdir():
            path.rename(path.with_suffix(".jpg"))

    def dataset() -> Any:
        return Subset(creel.ImageFolder(images, decode=bytes), range(7, 150))

    ours, theirs = dataset(), dataset()
    loader, plain = batches(creel.wrap(ours), **HOW[mode]), batches(theirs, **HOW[mode])
    assert list(loader) == list(plain)
    change(ours)
    change(theirs)
    for _ in range(2):
        assert list(loader) == list(plain)
    assert len(node.stats()["core"]["sessions"]) == (mode == "here")


def one_way(stacked: Any) -> Any:
    return 1, stacked[0][0].tobytes()


def other_way(stacked: Any) -> Any:
    return 2, stacked[0][0].tobytes()


@pytest.mark.usefixtures("either_way", "node")
@pytest.mark.parametrize("kind", [None, creel.DataLoader], ids=["wrap", "creel"])
def test_paths_around_a_folder_may_change_at_any_time(tmp_path: Path, kind: Any) -> None:
    """torchvision's folders are read through a copy of their wrappers."""
    folders = []
    for name, gray in (("one", 0), ("other", 9)):
        (tmp_path / name / "a").mkdir(parents=True)
        for i in range(8):
            Image.new("L", (4, 4), gray + i).save(tmp_path / name / "a" / f"{i}.png")
        folders.append(torchvision.ImageFolder(tmp_path / name))
    first, other = folders
    inner = StackDataset(first)
    around: Any = creel.datasets.Transformed(inner, one_way)
    got: Any
    if kind is None:
        wrapped: Any = creel.wrap(around)
        got = (wrapped.__getitems__([i]) for i in range(8))
    else:
        got = iter(kind(around, 1, collate_fn=list))
    assert next(got) == [around[0]]
    around.fn = other_way
    assert next(got) == [around[1]]
    inner.datasets = (other,)
    assert next(got) == [around[2]]
    around.dataset = StackDataset(first)
    assert next(got) == [around[3]]


def broken(data: bytes) -> bytes:
    raise ZeroDivisionError(f"no sense in {data[:1]!r}")


@pytest.mark.usefixtures("either_way")
def test_exceptions_are_the_datasets_own(node: Node) -> None:
    files = node.files()
    cases: list[tuple[Any, Any]] = [(files, N), (files, -N - 1), (files, "a"), (files, None)]
    cases += [(files, 1.5), (Squares(), "x"), (Subset(files, [N + 3]), 0)]
    cases += [(FileDataset(node.path, "*.raw", decode=broken), 3)]
    for dataset, index in cases:
        with pytest.raises(Exception) as theirs:  # noqa: PT011  (any error)
            dataset[index]
        with pytest.raises(theirs.type) as ours:
            creel.wrap(dataset)[index]
        assert str(ours.value) == str(theirs.value)
        with pytest.raises(theirs.type):
            creel.wrap(dataset).__getitems__([index])


def test_a_failure_leaves_no_step_open(node: Node) -> None:
    flaky = creel.wrap(FileDataset(node.path, "*.raw", decode=broken))
    for i in range(20):
        with pytest.raises(ZeroDivisionError):
            flaky[i]
    (session,) = node.stats()["core"]["sessions"].values()
    assert session["known"] == 20
    assert session["done"] >= 19


@pytest.mark.usefixtures("either_way")
def test_a_vanished_file_fails_as_without_creel(node: Node) -> None:
    bare, files = node.files(), creel.wrap(node.files())
    (node.path / "007.raw").unlink()
    with pytest.raises(OSError) as theirs:  # noqa: PT011
        bare[7]
    with pytest.raises(type(theirs.value)):
        files[7]
    assert files[8] == (node.path / "008.raw").read_bytes()


def test_a_copy_begins_without_a_connection(node: Node) -> None:
    files = creel.wrap(node.files())
    sample = files[1]
    twin = pickle.loads(pickle.dumps(files))
    assert bool(is_wrapped(twin))
    assert twin[1] == sample
    assert len(node.stats()["core"]["sessions"]) == 2
    assert unwrap(twin) is not unwrap(files)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("mode", ["here", "fork"])
def test_a_killed_daemon_costs_no_sample(node: Node, mode: str) -> None:
    files = node.files()
    bare = batches(FileDataset(node.path, "*.raw", decode=bytes))
    loader = batches(creel.wrap(files), **HOW[mode])
    got = []
    for i, batch in enumerate(loader):
        got.append(batch)
        if i == 3:
            node.daemon.signal(signal.SIGKILL)
    assert got == list(bare)
    assert list(loader) == list(bare)


def test_a_stopped_daemon_is_not_waited_for_again_and_again(node: Node) -> None:
    bare = batches(FileDataset(node.path, "*.raw", decode=bytes))
    loader = iter(batches(creel.wrap(node.files())))
    got = [next(loader)]
    node.daemon.signal(signal.SIGSTOP)
    start, cores = time.monotonic(), Cores()
    got += loader
    took = time.monotonic() - start
    node.daemon.signal(signal.SIGCONT)
    assert got == list(bare)
    cores.skip_unless_spare()
    assert took < 20  # it takes 2 s; waiting for each batch would take 28


def test_a_stopped_daemon_that_goes_on_serves_again(node: Node, daemon_name: str) -> None:
    files = creel.wrap(node.files())
    files.__getitems__([0, 1])
    node.daemon.signal(signal.SIGSTOP)
    client = connections.connected(daemon_name)
    assert client is not None
    (session,) = client.sessions
    until(lambda: not session.alive, event="it counts as lost")
    assert files[2] == (node.path / "002.raw").read_bytes()
    assert node.direct() == 1
    node.daemon.signal(signal.SIGCONT)
    until(lambda: session.alive, event="it serves again")
    files.__getitems__([3, 4])
    assert node.direct() == 1


def test_disabled_means_not_there(
    node: Node, daemon_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CREEL_DISABLE", "1")
    for _ in batches(creel.wrap(node.files()), num_workers=1, multiprocessing_context="fork"):
        pass
    assert node.stats()["core"]["datasets"] == {}
    assert connections.connected(daemon_name) is None


def test_a_typo_in_the_settings_is_said(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CREEL_MEMORY__BUGDET", "1GB")
    with pytest.raises(ConfigError, match="bugdet"):
        creel.wrap(node.files())[0]


@pytest.mark.usefixtures("daemon_name", "either_way")
def test_without_any_daemon_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CREEL_LOADER__EMBED", "false")
    files: Any = FileDataset(folder(tmp_path / "data", 20), "*.raw", decode=bytes)
    assert creel.wrap(files).__getitems__([3, 4]) == [files[3], files[4]]


@pytest.mark.parametrize("lacking", ["creel.loader.client.client.LocationTable", SEALED])
def test_a_session_that_finds_no_memory_or_descriptor_means_direct_reads(
    node: Node, caplog: pytest.LogCaptureFixture, lacking: str
) -> None:
    """A large dataset's location table under `ulimit -v`; the manifest's descriptor."""
    files = creel.wrap(node.files())
    with mock.patch(lacking, side_effect=OSError(errno.ENOMEM, "Cannot allocate memory")):
        got = [files.__getitems__([i]) for i in range(3)]
    assert got == [[(node.path / f"{i:03}.raw").read_bytes()] for i in range(3)]
    warned = [r.getMessage() for r in caplog.records]
    assert warned == ["creel reads directly, without a cache: [Errno 12] Cannot allocate memory"]


def test_ctrl_c_amid_a_request_costs_no_later_read(node: Node, daemon_name: str) -> None:
    """In a notebook: whether the daemon got the request is unknown, so its session is lost."""
    files = creel.wrap(node.files())
    files.__getitems__([0, 1])
    client = connections.connected(daemon_name)
    pressed = mock.patch.object(client, "send", side_effect=KeyboardInterrupt)
    with pressed, pytest.raises(KeyboardInterrupt):
        files.__getitems__([2])
    node.reads()
    files.__getitems__([3, 4])
    assert node.direct() == 0
    assert node.reads() == 2
    assert len(node.stats()["core"]["sessions"]) == 1


def test_a_plan_that_does_not_arrive_is_waited_for_once_in_a_while(
    node: Node, daemon_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if libzmq found no descriptor: another session's plan would not arrive, either."""
    monkeypatch.setattr("creel.loader.client.session.ARRIVAL_S", 0.2)
    files = creel.wrap(node.files())
    files[0]
    client = connections.connected(daemon_name)
    with mock.patch.object(client, "send") as send:
        files[1]
        sent = send.call_count
        assert sent
        files[2]
        assert send.call_count == sent
    reads: Any = reads_of(files)
    reads._not_before = 0.0  # as after half a minute
    files[3]
    assert node.direct() == 2


def test_creels_own_loader_goes_through_it(node: Node) -> None:
    loader = creel.DataLoader(creel.wrap(node.files()), BATCH, collate_fn=list)
    for _ in range(2):
        for _ in loader:
            pass
    assert node.reads() == N
    assert len(node.stats()["core"]["sessions"]) == 1


def test_a_wait_that_is_interrupted_pins_nothing(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    wrapped = creel.wrap(node.files())
    with monkeypatch.context() as patch:
        patch.setattr(Session, "ready", lambda *_: False)
        patch.setattr(Session, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            wrapped[0]
    for i in range(1, 5):
        wrapped[i]
    (session,) = node.stats()["core"]["sessions"].values()
    assert session["known"] == 5
    until(lambda: next(iter(node.stats()["core"]["sessions"].values()))["done"] == 5)


def test_threads_may_share_one(node: Node) -> None:
    before = threading.active_count()
    files = creel.wrap(node.files())
    steps = [list(range(i, N, 12)) for i in range(12)]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(files.__getitems__, steps))
    assert got == [[(node.path / f"{i:03}.raw").read_bytes() for i in s] for s in steps]
    assert node.reads() == N
    (session,) = node.stats()["core"]["sessions"].values()
    assert session["known"] <= 12
    assert threading.active_count() <= before


_TRAINER = """
import json, os, sys
import torch
import creel
from creel.loader.client.client import Client
from creel.loader.client import connections
from torch.utils.data import DataLoader
files = creel.wrap(creel.FileDataset(sys.argv[1], "*.raw", decode=bytes))
loader = DataLoader(files, 8, True, num_workers=2, collate_fn=list, multiprocessing_context="fork")
for _ in range(2):
    for _ in loader:
        pass
    print("epoch", flush=True)
    sys.stdin.readline()
assert connections.connected(os.environ["CREEL_SOCKET"]) is None
with Client.connect(os.environ["CREEL_SOCKET"], "cli") as client:
    told = client.ask("stats")
    reads = sum(d["reads"] for d in told["core"]["datasets"].values())
    direct = sum(r["direct_reads"] for r in told["ranks"])
    print(json.dumps([client.daemon_pid, reads, direct]), flush=True)
sys.stdin.readline()
"""


def test_a_daemon_stays_between_the_epochs_of_torchs_workers_and_goes_with_their_trainer(
    daemon_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CREEL_DAEMON__LINGER_S", "0.1")
    monkeypatch.setenv("CREEL_MEMORY__BUDGET", "16MB")
    trainer = Program(_TRAINER, str(folder(tmp_path / "data")))
    pids = set()
    for _ in range(2):
        assert trainer.stdout.readline() == "epoch\n"
        pid = daemon_of(daemon_name).pid
        with pytest.raises(AssertionError):
            until(lambda pid=pid: gone(pid), 0.5)  # type: ignore[misc]
        pids.add(pid)
        trainer.stdin.write("\n")
        trainer.stdin.flush()
    answer = json.loads(trainer.stdout.readline())
    assert answer == [pids.pop(), N, 0]
    assert not pids
    trainer.communicate("\n")
    until(lambda: gone(answer[0]), event="it goes with the trainer")


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_starts_and_asks_nothing(
    daemon_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forks of any kind: a daemon is started only when something is read."""

    asked: list[object] = []

    def note(*_: object, **__: object) -> None:
        asked.append(os.getpid())

    files: Any = creel.wrap(FileDataset(folder(tmp_path / "data", 20), "*.raw", decode=bytes))
    monkeypatch.setattr(connections, "connect_or_start", note)
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not asked
    assert owner_of(first_address(daemon_name)) is None
    assert files[0] == (tmp_path / "data/000.raw").read_bytes()
    assert asked == [os.getpid()]
