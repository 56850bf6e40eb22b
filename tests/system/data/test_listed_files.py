"""Files that a dataset holds in a list: each is opened once, and the first epoch is read ahead.

The list is a hypothesis. These are its laws; `tests/unit/data/test_file_lists.py` has the search.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

import creel
from creel.loader.client import connections
from creel.loader.data.binding.wrapped import reads_of
from creel.loader.data.tracing import wrapped_reads
from creel.loader.data.tracing.lists.hypothesis import LEAST
from creel.loader.line.batches import iterator_session
from creel.policies.direct import ThreadUse
from daemons import Running
from kit import seeds, until
from testbed.same import needs_fuse, opened_by_epoch, same

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

N, BATCH, NBYTES = 240, 8, 3000


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers wait for the daemon, however busy the machine is: reads are counted."""
    monkeypatch.setenv("CREEL_LOADER__DIRECT", "never")


class Source:
    """A folder of files below a slow mount that counts opens and bytes."""

    def __init__(self, folder: Path, nbytes: int = NBYTES, n: int = N) -> None:
        from testbed.slowfs import SlowFS

        self.folder = folder / "data"
        self.folder.mkdir()
        for i in range(n):
            (self.folder / f"{i:03}").write_bytes(bytes([i % 251]) * 8 + os.urandom(nbytes - 8))
        latency = {"open_latency": 1.0, "attr_timeout": 0.0}
        self.fs = SlowFS(str(self.folder), str(folder / "mount"), **latency)  # type: ignore[no-untyped-call]

    def opens(self) -> int:
        return int(self.fs.totals()["opens"])  # type: ignore[no-untyped-call]

    def nbytes(self) -> int:
        return int(self.fs.totals()["bytes"])  # type: ignore[no-untyped-call]

    def loaders(self, kind: type[Files], *args: Any, **more: Any) -> Any:
        """Return creel's loader over the mount, and torch's over the folder."""
        more = {"batch_size": BATCH, "shuffle": True, **more}
        ours: Any = kind(self.fs.mountpoint, *args)
        theirs: Any = kind(str(self.folder), *args)
        torchs = {k: v for k, v in more.items() if k != "workers"}
        return (
            creel.DataLoader(creel.wrap(ours), generator=seeded(), **more),
            DataLoader(theirs, generator=seeded(), **torchs),
        )


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Source]:
    files = Source(tmp_path)
    yield files
    files.fs.close()  # type: ignore[no-untyped-call]


def read(path: str) -> int:
    with open(path, "rb") as f:  # noqa: PTH123
        return int.from_bytes(f.read()[:16], "big") >> 70


class Files(Dataset[int]):
    """A dataset as people write it."""

    def __init__(self, folder: str) -> None:
        self.paths = sorted(os.path.join(folder, n) for n in os.listdir(folder) if n[0] != ".")  # noqa: PTH118, PTH208

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> int:
        return read(self.paths[i])


class Pairs(Files):
    """Two files a sample."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        rows = zip(self.paths[::2], self.paths[1::2], strict=True)
        self.paths: Any = [{"image": a, "label": b} for a, b in rows]

    def __getitem__(self, i: int) -> Any:
        return [read(self.paths[i][key]) for key in ("image", "label")]


class Names(Files):
    """Nothing holds a whole path."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.root, self.paths = folder, [int(os.path.basename(p)) for p in self.paths]  # type: ignore[misc]  # noqa: PTH119

    def __getitem__(self, i: int) -> int:
        return read(f"{self.root}/{self.paths[i]:03}")


class Wrong(Files):
    """The list is not what is read."""

    def __getitem__(self, i: int) -> int:
        return read(self.paths[(i * 7 + 3) % len(self)])


class Late(Files):
    """It is what the first samples read."""

    right, samples = 64, 0

    def __getitem__(self, i: int) -> int:
        self.samples += 1
        return read(self.paths[i if self.samples <= self.right else (i * 7 + 3) % len(self)])


class Unread(Files):
    """A second list is read by nobody."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.masks = self.paths[::-1]


class Hidden(Files):
    """No list has the paths."""

    def __init__(self, folder: str) -> None:
        self.root = folder

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> int:
        return read(f"{self.root}/{(i * 7 + 3) % N:03}")


@needs_fuse
@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize(("kind", "workers"), [(Files, 0), (Files, 2), (Pairs, 2)])
def test_each_file_is_opened_once_in_the_whole_job(
    source: Source, kind: type[Files], workers: int
) -> None:
    ours, theirs = source.loaders(kind, num_workers=workers)
    assert opened_by_epoch(source.opens, ours, theirs) == [N, 0, 0]


@needs_fuse
@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("workers", [0, 2])
def test_each_file_is_opened_once_below_torchs_loader(source: Source, workers: int) -> None:
    ours, theirs = source.loaders(Files, num_workers=workers)
    ours = DataLoader(ours.dataset, BATCH, True, generator=seeded(), num_workers=workers)
    assert opened_by_epoch(source.opens, ours, theirs) == [N, 0, 0]


@needs_fuse
@pytest.mark.usefixtures("daemon")
def test_a_class_incremental_job_opens_each_file_once(source: Source) -> None:
    """Folder after folder, some epochs each; one that comes back is in memory."""
    folders = []
    for task in range(3):
        (source.folder / f"task{task}").mkdir()
        for path in sorted(source.folder.glob("[0-9]*"))[:80]:
            path.rename(source.folder / f"task{task}" / path.name)
        folders.append(f"task{task}")
    opens = []
    for name in (*folders, folders[0]):
        before = source.opens()
        dataset = creel.wrap(Files(f"{source.fs.mountpoint}/{name}"))
        ours: Any = creel.DataLoader(dataset, BATCH, shuffle=True, generator=seeded())
        theirs = DataLoader(Files(f"{source.folder}/{name}"), BATCH, True, generator=seeded())
        for _ in range(2):
            assert same(list(ours), list(theirs))
        opens.append(source.opens() - before)
    assert opens == [80, 80, 80, 0]


@needs_fuse
def test_memory_for_a_part_saves_that_part_from_the_second_epoch_on(
    source: Source, daemon_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CREEL_LOADER__EMBED", "false")
    nbytes = 1 << 17  # the memory of a daemon has a minimum
    for path in sorted(source.folder.iterdir()):
        path.write_bytes(path.read_bytes()[:8] + os.urandom(nbytes - 8))
    with Running(daemon_name, memory="16MiB"):
        ours, theirs = source.loaders(Files)
        opens = opened_by_epoch(source.opens, ours, theirs, 4)
        connections.disconnect(daemon_name)
    share = (16 << 20) / (N * nbytes)
    assert N <= opens[0] <= N + LEAST
    assert max(opens[2:]) <= (1 - share) * N * 1.1 + 8


@needs_fuse
@pytest.mark.parametrize("workers", [0, 2])
def test_names_made_of_columns_are_read_ahead_from_the_middle_of_the_first_epoch_on(
    source: Source, daemon: Running, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On busy cores samples are read sooner than names are explained and a session is open."""
    monkeypatch.setattr(iterator_session, "_FOLLOW_NS", 0)

    def served() -> bool:
        with daemon.client("cli") as client:
            return bool(client.ask("stats")["core"]["datasets"])

    ours, theirs = source.loaders(Names, num_workers=workers)
    batches = iter(ours)
    got = [next(batches) for _ in range(N // BATCH // 2)]
    until(lambda: reads_of(ours.dataset).supposed() is not None, event="the columns are known")
    got.append(next(batches))  # it begins to look for a session
    until(served, event="the daemon knows the files")
    got += batches
    first = source.opens()
    assert same(got, list(theirs))
    second, third = opened_by_epoch(source.opens, ours, theirs, 2)
    assert (first + second < 2 * N, third) == (True, 0)


@needs_fuse
@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize(
    ("kind", "proved", "workers"),
    [
        (Wrong, 0, 0),
        (Wrong, 0, 2),
        (Hidden, 0, 2),
        (Unread, 0, 0),
        (Late, 64, 0),
    ],
)
def test_a_wrong_list_costs_few_reads_and_only_in_the_first_epoch(
    source: Source, kind: type[Files], proved: int, workers: int
) -> None:
    """Those of batches that are requested in any case, and as many as were proved, and 64."""
    ours, theirs = source.loaders(kind, num_workers=workers)
    opens = opened_by_epoch(source.opens, ours, theirs)
    useless = 2 * max(workers, 1) * BATCH + (proved and proved + 64)
    assert opens[0] + opens[1] <= 2 * N + useless + proved  # which read others then
    assert opens[2] <= proved


class Rewriting(Files):
    """Samples read what they or others have just written, in many ways."""

    def __init__(self, folder: str, seed: int) -> None:
        super().__init__(folder)
        self.rng = random.Random(seed)
        self.lock = threading.Lock()
        self.content = {path: Path(path).read_bytes() for path in self.paths}

    def write(self, path: str, kind: int) -> None:
        data = os.urandom(len(self.content[path]) + self.rng.randrange(2))
        if kind == 0:
            Path(path).write_bytes(data)
        elif kind == 1:
            Path(f"{path}.new").write_bytes(data)
            os.replace(f"{path}.new", path)  # noqa: PTH105
        elif kind == 2:  # under another name
            with suppress(FileExistsError):
                os.link(path, f"{path}.link")
            Path(f"{path}.link").write_bytes(data)
        elif kind == 3:  # by another process
            pid = os.fork()
            if not pid:
                fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
                os.write(fd, data)
                os._exit(0)
            os.waitpid(pid, 0)
        elif kind == 4:  # with the old times
            status = os.stat(path)  # noqa: PTH116
            Path(path).write_bytes(data)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        else:
            return
        if kind == 2 and not Path(path).samefile(f"{path}.link"):  # it was replaced since
            return
        self.content[path] = data

    def __getitem__(self, i: int) -> bool:
        path = self.paths[i]
        with self.lock:
            for other, kinds in ((path, 6), (self.rng.choice(self.paths), 10)):
                self.write(other, self.rng.randrange(kinds))
            with open(path, "rb") as f:  # noqa: PTH123
                return f.read() == self.content[path]


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("seed", seeds(1))
def test_no_sample_gets_other_bytes_than_its_own_open_would_have_read(
    tmp_path: Path, seed: int
) -> None:
    for i in range(48):
        (tmp_path / f"{i:02}").write_bytes(os.urandom(500))
    dataset = Rewriting(str(tmp_path), seed)
    stop = threading.Event()

    def rewrite() -> None:
        rng = random.Random(seed)
        while not stop.wait(0.002):
            with dataset.lock:
                dataset.write(rng.choice(dataset.paths), rng.randrange(5))

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        ours: Any = creel.DataLoader(creel.wrap(dataset), 4, shuffle=True, generator=seeded())
        assert all(bool(batch.all()) for _ in range(3) for batch in ours)
    finally:
        stop.set()
        writer.join()


class RewritingRows(Dataset[bool]):
    """Parts of one large file, kept open or opened anew, which samples rewrite."""

    writes = False

    def __init__(self, path: Path, seed: int, *, stays: bool) -> None:
        self.path, self.stays, self.rng = path, stays, random.Random(seed)
        self.content = bytearray(self.rng.randbytes(40 * 70_000))
        self.path.write_bytes(self.content)
        self.opened: Any = None

    def __len__(self) -> int:
        return 40

    def write(self) -> None:
        """Change some bytes in place, or put another file there."""
        at, data = self.rng.randrange(len(self.content)), self.rng.randbytes(5000)
        replaces = self.rng.random() < 0.3
        if replaces:
            self.content = bytearray(self.content)
        self.content[at : at + 5000] = data[: len(self.content) - at]
        if replaces:
            other = self.path.with_suffix(".new")
            other.write_bytes(self.content)
            other.replace(self.path)
        else:
            with open(self.path, "r+b") as f:  # noqa: PTH123
                f.seek(at)
                f.write(data[: len(self.content) - at])

    def __getitem__(self, i: int) -> bool:
        if self.writes and self.rng.random() < 0.1:
            self.write()
        if self.opened is None or not self.stays:
            self.opened = open(self.path, "rb", buffering=0), self.content  # noqa: PTH123, SIM115
        file, content = self.opened
        file.seek(70_000 * i)
        return bool(file.read(70_000) == content[70_000 * i : 70_000 * (i + 1)])


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("seed", seeds(2))
def test_parts_of_a_file_are_those_of_their_moment_also_when_the_daemon_is_killed(
    tmp_path: Path, daemon_name: str, seed: int
) -> None:
    with Running(daemon_name) as daemon:
        dataset = RewritingRows(tmp_path / "rows", seed, stays=seed % 2 == 0)
        ours: Any = creel.DataLoader(creel.wrap(dataset), 4, shuffle=True, generator=seeded())
        for epoch in range(6):
            dataset.writes = epoch >= 3  # a file that changes while it is recorded is left out
            if epoch == 3:
                with daemon.client("cli") as client:
                    assert client.ask("stats")["core"]["datasets"]
            for i, batch in enumerate(ours):
                if (epoch, i) == (4, 5):
                    daemon.process.kill()
                assert batch.all()
        daemon.process.wait()
    connections.disconnect(daemon_name)


def test_files_of_a_quick_source_stay_alone(
    tmp_path: Path, embedded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is bound, nor a daemon started, for one wait: of an import, or for a processor."""
    monkeypatch.setenv("CREEL_LOADER__DIRECT", "auto")
    calls = iter(range(10**6))

    def thread_use() -> ThreadUse:
        """Return what a thread has used that sleeps while it reads the second batch."""
        call = next(calls)
        return ThreadUse((call + 10 * (call > 2)) * 10**6, call * 10**6, int(call > 2), 0)

    monkeypatch.setattr(wrapped_reads, "thread_use", thread_use)
    for i in range(64):
        (tmp_path / f"{i:02}").write_bytes(os.urandom(500))
    dataset = creel.wrap(Files(str(tmp_path)))
    ours: Any = creel.DataLoader(dataset, 4)
    for _ in range(2):
        assert same(list(ours), list(DataLoader(Files(str(tmp_path)), 4)))
        assert reads_of(dataset).supposed() is None  # type: ignore[arg-type]  # wrapped
    assert connections.connected(embedded) is None


@needs_fuse
@pytest.mark.usefixtures("daemon")
def test_files_that_are_in_the_page_cache_by_now_are_left_to_samples(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each open is looked at before it is served; reading a small file takes less."""
    monkeypatch.setenv("CREEL_LOADER__DIRECT", "auto")
    monkeypatch.setattr("creel.loader.data.tracing.wrapped_reads.remote", lambda _: True)
    ours, theirs = source.loaders(Files)
    opens = []
    for epoch in range(4):
        near = epoch > 1
        monkeypatch.setattr(
            "creel.loader.data.binding.bind.in_page_cache", lambda _, near=near: near
        )
        before = source.opens()
        assert same(list(ours), list(theirs))
        opens.append(source.opens() - before)
    assert opens[1] < N / 4, "in memory"
    assert opens[3] == N, "none is served, although memory has them"


class Parts(Files):
    """Of each file a sample reads little."""

    def __getitem__(self, i: int) -> int:
        with open(self.paths[i], "rb", 0) as f:  # noqa: PTH123
            return int.from_bytes(f.read(4), "big")


class Gaps(Files):
    """Some of the files do not exist."""

    def __getitem__(self, i: int) -> int:
        try:
            return read(self.paths[i])
        except FileNotFoundError:
            return -1


@needs_fuse
@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("workers", [0, 2])
def test_files_of_a_list_that_are_missing_are_missing_as_in_torch(
    source: Source, workers: int
) -> None:
    ours, theirs = source.loaders(Gaps, num_workers=workers)
    for path in sorted(source.folder.iterdir())[1:-1:20]:
        if path.name != f"{N // 2:03}":
            path.unlink()
    first, *later = opened_by_epoch(source.opens, ours, theirs)
    assert first <= N
    assert later[-1] == 0


class Shared(Files):
    """Six samples have one file."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.paths = [path for path in self.paths for _ in range(6)]


@needs_fuse
@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_large_file_is_not_fetched_because_a_list_has_it(tmp_path: Path, workers: int) -> None:
    """It is once some samples were seen to read it whole."""
    source = Source(tmp_path, 1 << 17, 64)
    try:
        ours, theirs = source.loaders(Parts, num_workers=workers)
        opened_by_epoch(source.opens, ours, theirs, 1)
        assert source.nbytes() <= 64 * 4096
        ours, theirs = source.loaders(Files, num_workers=workers)
        first, second, third = opened_by_epoch(source.opens, ours, theirs)
        assert (64 < first + second <= 64 + LEAST, third) == (True, 0)
    finally:
        source.fs.close()  # type: ignore[no-untyped-call]


@needs_fuse
@pytest.mark.usefixtures("daemon")
def test_samples_that_share_a_listed_file_open_it_no_more_often_than_torchs(
    tmp_path: Path,
) -> None:
    source = Source(tmp_path, n=16)
    try:
        ours, theirs = source.loaders(Shared)
        first, second, third = opened_by_epoch(source.opens, ours, theirs)
        assert (first <= 6 * 16 + 16, second <= 16, third) == (True, True, 0)
    finally:
        source.fs.close()  # type: ignore[no-untyped-call]


class Sparse(Files):
    """Samples open no entry but those that are regular files."""

    def __getitem__(self, i: int) -> int:
        return read(self.paths[i]) if i % 5 != 1 else -1


@pytest.mark.usefixtures("daemon")
def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    """The daemon would wait for who writes into a FIFO."""
    for i in range(48):
        path = tmp_path / f"{i:02}"
        if i % 5 == 1:
            os.mkfifo(path)
        else:
            path.write_bytes(os.urandom(500))
    for _ in range(2):
        ours: Any = creel.DataLoader(creel.wrap(Sparse(str(tmp_path))), 4)
        for _ in range(3):
            assert same(list(ours), list(DataLoader(Sparse(str(tmp_path)), 4)))


class MadeInWorkers(Files):
    """A worker_init_fn makes the list, as DLIO does."""

    def __init__(self, folder: str) -> None:
        self.folder, self.paths = folder, []

    def __len__(self) -> int:
        return N

    def fill(self) -> None:
        super().__init__(self.folder)


def fill(_: int) -> None:
    info: Any = get_worker_info()
    info.dataset.fill()


@needs_fuse
@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("persistent", [False, True])
def test_a_list_that_workers_make_is_found_there(source: Source, *, persistent: bool) -> None:
    more = {"num_workers": 2, "worker_init_fn": fill, "persistent_workers": persistent}
    ours, theirs = source.loaders(MadeInWorkers, **more)
    first, second, third = opened_by_epoch(source.opens, ours, theirs)
    assert (first + second < 2 * N, third) == (True, 0)


class Failing(Files):
    def __getitem__(self, i: int) -> int:
        if i == 100:
            raise KeyError(self.paths[i])
        return super().__getitem__(i)


def outcomes(loader: Any) -> list[Any]:
    """Return the batches of an epoch up to its exception, and that."""
    values: list[Any] = []
    try:
        values.extend(loader)
    except KeyError as e:
        values.append(str(e).strip().splitlines()[-1].replace("/mount/", "/data/"))
    return values


@needs_fuse
@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (Failing, {}),
        (Failing, {"num_workers": 2}),
        (Failing, {"num_workers": 2, "workers": "shared"}),
        (Names, {"num_workers": 2, "workers": "shared"}),
    ],
    ids=["inline", "forked", "shared", "shared, names"],
)
def test_batches_and_exceptions_are_torchs(
    source: Source, kind: type[Files], more: dict[str, Any]
) -> None:
    """Tests above compare the batches of other lists, too (`opened_by_epoch`)."""
    ours, theirs = source.loaders(kind, **more)
    for _ in range(3):
        assert same(outcomes(ours), outcomes(theirs))


@needs_fuse
@pytest.mark.usefixtures("daemon")
def test_spawned_workers_read_what_the_list_says(source: Source) -> None:
    more = {"num_workers": 1, "multiprocessing_context": "forkserver", "persistent_workers": True}
    (ours, _), (_, theirs) = source.loaders(Files, **more), source.loaders(Files)
    assert opened_by_epoch(source.opens, ours, theirs, 1) == [N]
    assert len(list(ours)) == N // BATCH
    assert source.opens() == N


@needs_fuse
@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_is_resumed_in_its_middle(source: Source, workers: int) -> None:
    ours, theirs = source.loaders(Files, num_workers=workers)
    expected = list(theirs)
    some: Callable[[Any, int], list[Any]] = lambda it, n: [next(it) for _ in range(n)]  # noqa: E731
    begun = iter(ours)
    assert same(some(begun, 7), expected[:7])
    resumed, _ = source.loaders(Files, num_workers=workers)
    resumed.load_state_dict(ours.state_dict())
    del begun
    assert same(list(resumed), expected[7:])


@needs_fuse
@pytest.mark.parametrize(("kind", "workers"), [(Files, 2), (Names, 0)])
def test_a_daemon_that_ends_in_the_first_epoch_changes_no_batch(
    source: Source, daemon_name: str, kind: type[Files], workers: int
) -> None:
    with Running(daemon_name) as daemon:
        ours, theirs = source.loaders(kind, num_workers=workers)
        for i, (mine, wanted) in enumerate(zip(ours, theirs, strict=True)):
            if i == 12:
                daemon.process.kill()
            assert same(mine, wanted)
        assert same(list(ours), list(theirs))
        daemon.process.wait()
    connections.disconnect(daemon_name)
