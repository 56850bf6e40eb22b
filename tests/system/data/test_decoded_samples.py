"""Kept decoded samples: torch's batches, each file decoded once in a job, whatever breaks."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, get_worker_info

import creel
from creel.cache.storage.stores.store import version_at
from creel.loader.data.datasets import Transformed
from daemons import Running
from kit import until
from testbed.ranks import ranks
from testbed.same import needs_fuse, same
from testbed.slow_files import SlowFiles

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

N = 24
#: Calls of a decoder, if each file is decoded once: one sample in 16 is made twice, and compared.
ONCE = N + 2


class Decode:
    """Makes an array of a file's bytes, and writes a letter to a file for each call."""

    def __init__(self, log: Path) -> None:
        self.log = str(log)

    def __call__(self, data: bytes) -> Any:
        fd = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, b".")
        os.close(fd)
        return np.frombuffer(data, np.uint8).astype(np.float32), len(data)


class Augment:
    """Draws random numbers, and changes the sample in place."""

    def __call__(self, sample: tuple[Any, int]) -> Any:
        array, nbytes = sample
        array += np.random.rand()  # noqa: NPY002  torch seeds it in workers
        return torch.from_numpy(array) * torch.rand(1), nbytes


class Plain(Dataset[Any]):
    """What a torch user would write."""

    def __init__(self, paths: list[str], decode: Any, augment: Any) -> None:
        self.paths, self.decode, self.augment = paths, decode, augment

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        with open(self.paths[index], "rb") as file:  # noqa: PTH123  (as users do)
            sample = self.decode(file.read())
        return self.augment(sample)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def calls(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    rng = np.random.default_rng(0)
    for i in range(N):
        (tmp_path / f"{i:02}.bin").write_bytes(rng.bytes(3000))
    paths = [str(tmp_path / f"{i:02}.bin") for i in range(N)]
    until(lambda: version_at(paths[-1]) > 0)
    return paths


def by_dataset(paths: list[str], log: Path, limit: Any = "64MiB") -> Any:
    return creel.FileDataset(paths, decode=Decode(log), transform=Augment(), keep_decoded=limit)


def by_kept(paths: list[str], log: Path, limit: Any = "64MiB") -> Any:
    return Transformed(creel.kept(Plain(paths, Decode(log), as_it_is), limit), Augment())


def as_it_is(sample: Any) -> Any:
    return sample


@pytest.fixture
def direct(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether the daemon is asked for files in the page cache: the setting of that name."""
    monkeypatch.setenv("CREEL_LOADER__DIRECT", request.param)
    return str(request.param)


Make = Callable[..., Any]
#: Each pair of a way to keep samples and of a way to read files is in the first test.
both = pytest.mark.parametrize(
    ("make", "direct"), [(by_dataset, "auto"), (by_kept, "never")], indirect=["direct"]
)
IN_PAIRS = [(by_dataset, "auto"), (by_kept, "never"), (by_kept, "auto"), (by_dataset, "never")]


def check_epochs(
    ours: Any, theirs: Any, epochs: int, between: Callable[[int], object] = lambda _: None
) -> None:
    for epoch in range(epochs):
        between(epoch)
        batches = []
        for loader in (ours, theirs):
            torch.manual_seed(epoch)
            np.random.seed(epoch)  # noqa: NPY002  as above
            batches.append([copied(batch) for batch in loader])
        assert same(*batches), epoch


def copied(batch: Any) -> Any:
    return [part.clone() for part in batch]


def loaders(dataset: Any, paths: list[str], log: Path, **more: Any) -> tuple[Any, Any]:
    options = more.pop("creel", None)
    plain = Plain(paths, Decode(log.with_name("other")), Augment())
    more = {"batch_size": 4, "shuffle": True, **more}
    return creel.DataLoader(dataset, creel=options, **more), DataLoader(plain, **more)


PERSISTENT = {"num_workers": 2, "persistent_workers": True, "creel": {"loader.recheck": "never"}}


@pytest.mark.usefixtures("daemon", "direct")
@pytest.mark.parametrize(
    ("make", "direct", "more"),
    [
        *((*pair, {"num_workers": 0}) for pair in IN_PAIRS[:2]),
        *((*pair, {"num_workers": 2}) for pair in IN_PAIRS[2:]),
        *((*pair, PERSISTENT) for pair in IN_PAIRS[:2]),
        *((*pair, {"num_workers": 2, "creel": False}) for pair in IN_PAIRS[2:]),
    ],
    indirect=["direct"],
)
def test_batches_are_torchs_and_each_file_is_decoded_once(
    make: Make, paths: list[str], log: Path, more: dict[str, Any]
) -> None:
    ours, theirs = loaders(make(paths, log), paths, log, **more)
    check_epochs(ours, theirs, 4)
    assert calls(log) == ONCE


@pytest.mark.parametrize(
    ("make", "direct", "method"),
    [(by_dataset, "auto", "spawn"), (by_kept, "never", "forkserver")],
    indirect=["direct"],
)
@pytest.mark.usefixtures("daemon", "direct")
def test_spawned_workers_share_what_they_keep(
    make: Make, paths: list[str], log: Path, method: str
) -> None:
    more: dict[str, Any] = {"batch_size": 4, "shuffle": True, "num_workers": 1}
    ours = creel.DataLoader(make(paths, log), multiprocessing_context=method, **more)
    # A fork, whose batches are the same: each that is not one imports torch.
    theirs = DataLoader(Plain(paths, Decode(log.with_name("other")), Augment()), **more)
    check_epochs(ours, theirs, 2)
    assert calls(log) == ONCE


@both
@pytest.mark.usefixtures("daemon", "direct")
def test_torchs_own_loader_keeps_them_too(make: Make, paths: list[str], log: Path) -> None:
    _, theirs = loaders(make(paths, log), paths, log, num_workers=2)
    dataset = make(paths, log)
    ours = DataLoader(dataset, 4, shuffle=True, num_workers=2)
    check_epochs(ours, theirs, 3)
    assert calls(log) == ONCE


@both
@pytest.mark.usefixtures("daemon", "direct")
def test_creel_disabled_keeps_nothing(
    make: Make, paths: list[str], log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CREEL_DISABLE", "1")
    ours, theirs = loaders(make(paths, log), paths, log, num_workers=2)
    check_epochs(ours, theirs, 2)
    assert calls(log) == 2 * N


@pytest.mark.usefixtures("daemon", "direct")
@pytest.mark.parametrize(
    ("make", "workers", "direct"),
    [
        (by_dataset, 0, "auto"),
        (by_dataset, 2, "never"),
        (by_kept, 0, "never"),
        (by_kept, 2, "auto"),
    ],
    indirect=["direct"],
)
def test_files_that_were_rewritten_between_epochs_are_decoded_anew(
    make: Make, paths: list[str], log: Path, workers: int
) -> None:
    """In place, with the same size and time, and by a rename."""
    rng = np.random.default_rng(7)

    def rewrite(epoch: int) -> None:
        for i in rng.permutation(N)[: 3 * epoch].tolist():
            before = os.stat(paths[i])  # noqa: PTH116
            if i % 3:
                Path(paths[i]).write_bytes(rng.bytes(3000))
            else:
                Path(paths[i] + ".new").write_bytes(rng.bytes(3000))
                Path(paths[i] + ".new").rename(paths[i])
            if i % 2:
                os.utime(paths[i], ns=(before.st_atime_ns, before.st_mtime_ns))

    ours, theirs = loaders(make(paths, log), paths, log, num_workers=workers)
    check_epochs(ours, theirs, 5, rewrite)
    assert ONCE < calls(log) < 5 * N


@both
@pytest.mark.usefixtures("daemon", "direct")
def test_with_memory_for_a_part_that_part_is_decoded_once(
    make: Make, paths: list[str], log: Path
) -> None:
    """Law L1: no epoch after the first decodes more than what has no room."""
    ours, theirs = loaders(make(paths, log, 4096 + N * 8 + 12 * 12_800), paths, log, num_workers=2)
    check_epochs(ours, theirs, 3)
    assert calls(log) == N + 1 + 2 * (N - 12)  # one of the first 12 was made twice


@both
@pytest.mark.usefixtures("daemon", "direct")
def test_the_ranks_of_a_node_decode_each_file_once(
    make: Make, paths: list[str], log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    (tmp_path / "job").mkdir()

    def read(rank: int) -> list[int]:
        torch.set_num_threads(1)  # a fork has no OpenMP threads
        loaders = []
        for dataset in (make(paths, log), Plain(paths, Decode(log.with_name("other")), Augment())):
            sampler: Any = DistributedSampler(dataset, 2, rank, seed=3)
            kind: Any = DataLoader if isinstance(dataset, Plain) else creel.DataLoader
            loaders.append(kind(dataset, 4, sampler=sampler, num_workers=2))
        ours, theirs = loaders
        counts = []

        def begin(epoch: int) -> None:
            for loader in (ours, theirs):
                loader.sampler.set_epoch(epoch)
            dist.barrier()
            counts.append(calls(log))
            dist.barrier()

        check_epochs(ours, theirs, 4, begin)
        dist.barrier()
        return [*counts, calls(log)]

    for begin, first, _, later, last in ranks(read, tmp_path / "job"):
        assert (begin, first) == (0, ONCE)
        assert ONCE < later == last <= ONCE + 2 * 4  # a rank compares 4 samples of the other one


@pytest.mark.usefixtures("daemon")
def test_ranks_that_decode_differently_share_nothing(
    paths: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    def read(rank: int) -> bool:
        torch.set_num_threads(1)
        dataset = creel.FileDataset(
            paths, decode=lambda data: torch.tensor(data[rank]), keep_decoded="1MiB"
        )
        loader = creel.DataLoader(dataset, N, num_workers=1)
        expected = torch.tensor([Path(path).read_bytes()[rank] for path in paths])
        for _ in range(2):
            (batch,) = loader
            dist.barrier()
            if not torch.equal(batch, expected):
                return False
        return True

    assert ranks(read, tmp_path) == [True, True]


FACTOR = 1


@pytest.mark.usefixtures("daemon")
def test_ranks_whose_globals_make_their_samples_differ_get_their_own(
    paths: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that creel knows of them differs; each compares a few samples of the other one."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    def decode(data: bytes) -> int:
        return data[0] * FACTOR

    def read(rank: int) -> bool:
        torch.set_num_threads(1)
        globals()["FACTOR"] = rank + 1  # of this process
        dataset = creel.FileDataset(paths, decode=decode, keep_decoded="1MiB")
        sampler: Any = DistributedSampler(dataset, 2, rank, seed=3)
        loader = creel.DataLoader(dataset, 4, sampler=sampler, num_workers=1)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            expected = [Path(paths[i]).read_bytes()[0] * FACTOR for i in sampler]
            if torch.cat(list(loader)).tolist() != expected:
                return False
            dist.barrier()
        return True

    assert ranks(read, tmp_path) == [True, True]


@needs_fuse
def test_an_epoch_with_all_samples_kept_fetches_nothing(
    slow: SlowFiles, daemon: Running, log: Path
) -> None:
    paths = [f"{slow.fs.mountpoint}/{i}" for i in range(N)]
    dataset = creel.FileDataset(paths, decode=Decode(log), transform=Augment(), keep_decoded="auto")
    own = [f"{slow.folder}/{i}" for i in range(N)]
    options = {"loader.direct": "auto"}
    ours, theirs = loaders(dataset, own, log, num_workers=2, creel=options)

    def known() -> int:
        with daemon.client("cli") as client:
            (session,) = client.ask("stats")["sessions"]
        return int(session["known"])

    check_epochs(ours, theirs, 2)
    opened, published = slow.opens(), known()
    check_epochs(ours, theirs, 2)
    assert (slow.opens(), known()) == (opened, published)
    assert calls(log) == ONCE


class Killed:
    """Decodes, and kills its worker once, in the middle of writing what it has decoded.

    The calls are counted in memory, as a file that it looks at would be an input of its samples.
    """

    count = multiprocessing.Value("i", 0)

    def __init__(self, log: Path) -> None:
        self.decode = Decode(log)

    def __call__(self, data: bytes) -> Any:
        with self.count.get_lock():
            self.count.value += get_worker_info() is not None
            kills = self.count.value == 6
        if kills:
            write = os.pwritev

            def half(fd: int, buffers: Any, place: int) -> int:
                write(fd, [bytes(buffers[0])[:40]], place)
                os.kill(os.getpid(), signal.SIGKILL)
                return 0

            os.pwritev = half  # type: ignore[assignment]  # without its fourth argument
        return self.decode(data)


@pytest.mark.usefixtures("daemon")
def test_half_a_sample_of_a_killed_worker_is_never_read(paths: list[str], log: Path) -> None:
    Killed.count.value = 0
    decode = Killed(log)
    dataset = creel.FileDataset(paths, decode=decode, transform=Augment(), keep_decoded="64MiB")
    ours, theirs = loaders(dataset, paths, log, num_workers=2)
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        list(ours)
    check_epochs(ours, theirs, 3)
    assert calls(log) <= ONCE + 2  # and one that was decoded, but not written


@pytest.mark.usefixtures("daemon")
def test_stats_show_the_tier(paths: list[str], log: Path, daemon: Running) -> None:
    plain = creel.DataLoader(creel.FileDataset(paths), 4)
    list(plain)  # a session
    dataset = by_dataset(paths, log)
    loader = creel.DataLoader(dataset, 4, num_workers=2, creel={"loader.direct": "never"})
    for _ in range(3):
        list(loader)
    stats = loader.stats()
    assert stats["decoded_hits"] == 2 * N
    assert stats["decoded_misses"] == N
    assert stats["decoded_samples"] == N
    pace = dataset.keeping.store.pace()
    assert pace.work_s >= pace.again_s > 0, "of what was measured"
    assert pace.work_s < 1
    with daemon.client("cli") as client:
        tier = client.ask("stats")["tiers"]["decoded"]
    assert (tier["hits"], tier["misses"], tier["samples"]) == (2 * N, N, N)
    assert tier["used_nbytes"] >= N * 12_000


@pytest.mark.usefixtures("daemon")
def test_a_wrapped_dataset_may_keep_decoded_samples(paths: list[str], log: Path) -> None:
    dataset = creel.wrap(by_kept(paths, log))
    options = {"loader.direct": "never"}
    ours, theirs = loaders(dataset, paths, log, num_workers=2, creel=options)
    check_epochs(ours, theirs, 4)
    assert calls(log) == ONCE


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("kind", [creel.DataLoader, DataLoader])
def test_a_dataset_keeps_its_samples_when_it_is_wrapped_itself(
    paths: list[str], log: Path, kind: Any
) -> None:
    """Without anything between: the wrapped dataset and the one inside have one state."""
    dataset = creel.wrap(creel.kept(Plain(paths, Decode(log), as_it_is), "64MiB"))
    for _ in range(3):
        list(kind(dataset, 4, num_workers=2))
        list(kind(dataset, 4))
    assert calls(log) == ONCE
