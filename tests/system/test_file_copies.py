"""What samples of an opaque dataset have read of slow storage is not read again by the daemon."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

import creel
from creel.loader.client import connections
from daemons import Running
from testbed.slowfs import SlowFS

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(120),
    pytest.mark.skipif(
        os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="slowfs needs root and FUSE"
    ),
]

N = 24
SIDE = 128  # of a picture: larger than what is cached however little of it is read


def pixels(seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 6), np.uint8)


def write_png(path: Path, seed: int) -> None:
    Image.fromarray(pixels(seed)[..., :3]).save(path, "png")


def write_npy(path: Path, seed: int) -> None:
    with path.open("wb") as f:
        np.save(f, pixels(seed))


def write_text(path: Path, seed: int) -> None:
    path.write_text(pixels(seed).tobytes().hex())


def write_pt(path: Path, seed: int) -> None:
    torch.save(torch.from_numpy(pixels(seed)), path)


def read_png(path: str) -> Any:
    with Image.open(path) as image:
        return np.asarray(image)


def read_text(path: str) -> Any:
    with open(path) as f:  # noqa: PTH123
        return np.frombuffer(bytes.fromhex(f.read()), np.uint8)


def write_h5(path: Path, seed: int) -> None:
    with pytest.importorskip("h5py").File(path, "w") as f:
        f["x"] = pixels(seed)


def read_h5(path: str) -> Any:
    with pytest.importorskip("h5py").File(path, "r") as f:
        return f["x"][:]


def write_raw(path: Path, seed: int) -> None:
    pixels(seed).tofile(path)


def write_bit(path: Path, seed: int) -> None:
    """Small enough to be cached, however much of it is seen to be read."""
    pixels(seed)[:50].tofile(path)


def read_raw(path: str) -> Any:
    return np.fromfile(path, np.uint8)


def read_by_fd(path: str) -> Any:
    fd = os.open(path, os.O_RDONLY)
    try:
        return np.frombuffer(os.read(fd, os.fstat(fd).st_size), np.uint8)
    finally:
        os.close(fd)


def read_cv2(path: str) -> Any:
    return pytest.importorskip("cv2").imread(path)


def read_torchvision(path: str) -> Any:
    try:
        return pytest.importorskip("torchvision.io").read_file(path).numpy()
    except (AttributeError, RuntimeError) as e:
        pytest.skip(f"torchvision's operators: {e}")


KINDS: dict[str, tuple[Callable[[Path, int], None], Callable[[str], Any]]] = {
    "npy": (write_npy, np.load),
    "png": (write_png, read_png),
    "text": (write_text, read_text),
    "h5": (write_h5, read_h5),
    "raw": (write_raw, read_raw),
    "bit": (write_bit, read_raw),
    "fd": (write_raw, read_by_fd),
    "cv2": (write_png, read_cv2),
    "torchvision": (write_png, read_torchvision),
    "pt": (write_pt, lambda path: torch.load(path).numpy()),
}


class Opaque(Dataset[Any]):
    """What people write."""

    def __init__(self, folder: str | Path, kind: str) -> None:
        self.paths = [f"{folder}/{i}" for i in range(N)]
        self.kind = kind

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return torch.from_numpy(KINDS[self.kind][1](self.paths[i]).copy())


class Slow:
    """A folder of files on slow storage."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder / "data", kind
        self.folder.mkdir()
        self.fill(0)
        KINDS[kind][1](str(self.folder / "0"))  # where its library is missing, it is skipped here
        latency = {"open_latency": 2.0, "attr_timeout": 0.0}
        self.fs = SlowFS(str(self.folder), str(folder / "mount"), **latency)  # type: ignore[no-untyped-call]

    def fill(self, generation: int) -> None:
        for i in range(N):
            KINDS[self.kind][0](self.folder / str(i), 1000 * generation + i)

    def opens(self) -> int:
        return int(self.fs.totals()["opens"])  # type: ignore[no-untyped-call]

    def loader(self, **more: Any) -> Any:
        dataset = creel.wrap(Opaque(self.fs.mountpoint, self.kind))
        return creel.DataLoader(dataset, 4, True, generator=generator(), **more)

    def torchs(self, **more: Any) -> Any:
        return DataLoader(Opaque(self.folder, self.kind), 4, True, generator=generator(), **more)


class Parts(Opaque):
    """Each file has several samples, and is opened for each of them."""

    def __init__(self, folder: str | Path, read: int) -> None:
        super().__init__(folder, "npy")
        self.read = read

    def __getitem__(self, i: int) -> Any:
        with open(self.paths[i // 6], "rb") as f:  # noqa: PTH123
            f.seek(self.read * (i % 6))
            return torch.frombuffer(bytearray(f.read(self.read)), dtype=torch.uint8)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


@pytest.fixture
def slow(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Slow]:
    made = Slow(tmp_path, getattr(request, "param", "npy"))
    yield made
    made.fs.close()  # type: ignore[no-untyped-call]


@pytest.fixture
def daemon(daemon_name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setenv("CREEL_LOADER__EMBED", "false")
    monkeypatch.setenv("CREEL_LOADER__DIRECT", "never")
    with Running(daemon_name, memory="32MB") as daemon:
        yield daemon
        connections.disconnect(daemon_name)


def same(ours: Any, theirs: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("slow", ["npy", "png", "text", "pt"], indirect=True)
def test_every_file_is_opened_at_the_source_once(slow: Slow, workers: int) -> None:
    ours, theirs, opens = slow.loader(num_workers=workers), slow.torchs(num_workers=workers), []
    for _ in range(3):
        before = slow.opens()
        assert same(ours, theirs)
        opens.append(slow.opens() - before)
    assert opens == [N, 0, 0]


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("slow", ["h5", "raw", "bit", "fd", "cv2", "torchvision"], indirect=True)
def test_files_that_c_reads_are_too_but_for_the_first(slow: Slow, workers: int) -> None:
    """Each process has to see first that they are read whole."""
    ours, theirs, opens = slow.loader(num_workers=workers), slow.torchs(num_workers=workers), []
    for _ in range(3):
        before = slow.opens()
        assert same(ours, theirs)
        opens.append(slow.opens() - before)
    first = max(workers, 1)
    more = first if slow.kind == "cv2" else 0  # it opens a file twice, some versions of it
    assert N <= opens[0] <= N + more
    assert opens[1:] == [first, 0]


def test_with_a_disk_tier_they_are_opened_once_more(
    slow: Slow, daemon_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is kept, as another job could not find it on disk; memory and disk hold it then."""
    (tmp_path / "disk").mkdir()
    for name, value in (("LOADER__EMBED", "false"), ("LOADER__DIRECT", "never")):
        monkeypatch.setenv(f"CREEL_{name}", value)
    for name, value in (("DISK__PATH", str(tmp_path / "disk")), ("DISK__BUDGET", "16MiB")):
        monkeypatch.setenv(f"CREEL_{name}", value)
    with Running(daemon_name, memory="1MiB"):  # for less than half of them
        ours, theirs, opens = slow.loader(), slow.torchs(), []
        for _ in range(4):
            before = slow.opens()
            assert same(ours, theirs)
            opens.append(slow.opens() - before)
        connections.disconnect(daemon_name)
    assert opens[0] == N
    assert N <= opens[1] < 2 * N  # some leave again before they are on disk
    assert sum(opens[2:]) < N / 2


@pytest.mark.usefixtures("daemon")
def test_files_that_have_changed_since_they_were_copied_give_their_new_bytes(slow: Slow) -> None:
    ours, theirs = slow.loader(), slow.torchs()
    for epoch in range(3):
        assert same(ours, theirs)
        slow.fill(epoch + 1)
    assert slow.opens() == 3 * N


def test_a_daemon_that_ends_takes_its_copies_along(slow: Slow, daemon: Running) -> None:
    """The next one reads the source: what its predecessor took is not there any more."""
    ours, theirs = slow.loader(), slow.torchs()
    assert same(ours, theirs)
    for i, (batch, expected) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(batch, expected)
        if i == 2:
            daemon.process.kill()
            daemon.process.wait()
    with Running(daemon.name, memory="32MB") as another:
        for _ in range(2):
            assert same(ours, theirs)
        assert another.process.poll() is None
        connections.disconnect(daemon.name)


def by_two_threads(path: str) -> Any:
    """The first half in another thread, the rest here."""
    found: list[bytes] = []
    with open(path, "rb") as f:  # noqa: PTH123
        thread = threading.Thread(target=lambda: found.append(f.read(50_000)))
        thread.start()
        thread.join()
        found.append(f.read())
    return np.frombuffer(b"".join(found), np.uint8)


def twice(path: str) -> Any:
    return np.stack([np.load(path), np.load(path)])


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize(("read", "opens"), [(by_two_threads, [N, N, 0]), (twice, [2 * N, 0, 0])])
def test_odd_ways_of_reading_give_what_they_give(
    slow: Slow, read: Any, opens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "npy", (write_npy, read))
    ours, theirs, found = slow.loader(), slow.torchs(), []
    for _ in range(3):
        before = slow.opens()
        assert same(ours, theirs)
        found.append(slow.opens() - before)
    assert found == opens


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("read", "opens"), [(10_000, [N, N // 6, 0]), (2_000, [N, N, N])])
def test_a_file_of_several_samples_is_kept_if_they_read_a_quarter_of_it_together(
    slow: Slow, read: int, opens: list[int], workers: int
) -> None:
    """It has 98,432 bytes: a copy takes less time than the open."""
    ours: Any = creel.DataLoader(
        creel.wrap(Parts(slow.fs.mountpoint, read)), 4, num_workers=workers
    )
    theirs, found = DataLoader(Parts(slow.folder, read), 4), []
    for _ in range(3):
        before = slow.opens()
        assert same(ours, theirs)
        found.append(slow.opens() - before)
    assert found == opens


@pytest.mark.usefixtures("daemon")
def test_copies_take_no_more_than_the_budget(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest is read by the daemon, as it was without any."""
    monkeypatch.setenv("CREEL_MEMORY__BUDGET", "1MiB")
    ours, theirs, opens = slow.loader(), slow.torchs(), []
    for _ in range(3):
        before = slow.opens()
        assert same(ours, theirs)
        opens.append(slow.opens() - before)
    kept = (1 << 20) // (SIDE * SIDE * 6 + 128)
    assert opens[0] == N
    assert N - kept <= opens[1] <= N - kept + 1
    assert opens[2] == 0
