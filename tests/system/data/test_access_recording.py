"""A dataset that declares nothing: its reads are recorded in the first epoch."""

from __future__ import annotations

import errno
import io
import os
import resource
import tarfile
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from test_wrap import BATCH, HOW, N, batches, folder
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

import creel
from creel.loader.data.tracing import recorder
from creel.loader.data.tracing.journal import JOURNAL
from daemons import Running
from folders import folder as torchvision
from kit import descriptors

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

#: Enough epochs for all to be cached. Reads recorded at an epoch's end may come too late for the
#: next one, some batches of which were made ahead and may be read directly once more.
EPOCHS = 5


class Own(Dataset[bytes]):
    """A user's own dataset: two files per sample, one of them shared by all."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __len__(self) -> int:
        return N - 1

    def __getitem__(self, i: int) -> bytes:
        if not 0 <= i < len(self):
            raise IndexError(i)
        with creel.open(self.path / f"{i + 1:03}.raw") as f:
            return f.read() + creel.read(self.path / "000.raw")


class Around(Dataset[bytes]):
    """A user's own wrapper, as for giving one part of a split its transform."""

    def __init__(self, *parts: Any) -> None:
        self.inside = {"parts": parts}

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> bytes:
        samples = [part[i] for part in self.inside["parts"]]
        return b"".join(map(content, samples))[::-1]


def content(sample: Any) -> bytes:
    if isinstance(sample, dict):
        return b"".join(content(sample[key]) for key in sorted(sample))
    return sample.numpy().tobytes() if isinstance(sample, torch.Tensor) else str(sample).encode()


class Batched(Own):
    """A dataset whose reads cannot be assigned to samples."""

    def __getitems__(self, indices: list[int]) -> tuple[bytes, ...]:
        return tuple(self[i] for i in indices)


def kind_and_items(samples: Any) -> tuple[type, list[Any]]:
    return type(samples), list(samples)


@pytest.fixture
def never_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve objects in memory although their files have changed, which shows what memory serves."""
    monkeypatch.setenv("CREEL_LOADER__RECHECK", "never")


def reads(daemon: Running) -> list[int]:
    """Return the daemon's reads of each dataset."""
    with daemon.client("cli") as client:
        datasets = client.ask("stats")["core"]["datasets"]
    return [d["reads"] for d in datasets.values()]


@pytest.mark.parametrize("mode", ["here", "fork", "fork, persistent"])
def test_from_the_second_epoch_on_the_cache_serves(
    daemon: Running, tmp_path: Path, mode: str
) -> None:
    bare = Own(folder(tmp_path / "data"))
    same = HOW["fork, persistent"] if "persistent_workers" in HOW[mode] else {}
    ours, theirs = batches(creel.wrap(bare), **HOW[mode]), batches(bare, **same)
    assert list(ours) == list(theirs)
    assert reads(daemon) in ([], [0])  # a trace may be known, but nothing was read by it
    assert list(ours) == list(theirs)
    (first,) = reads(daemon)
    assert 0.85 * N < first <= N
    assert list(ours) == list(theirs)
    assert list(ours) == list(theirs)
    assert reads(daemon) == [N]
    for path in tmp_path.glob("data/*.raw"):
        path.write_bytes(b"read anew")
    assert next(iter(ours))[0] == 2 * b"read anew"


def files(path: Path) -> Any:
    return creel.FileDataset(folder(path / "files"))


def records(path: Path) -> Any:
    np.random.default_rng(0).integers(0, 256, (N, 300), np.uint8).tofile(path / "records")
    return creel.RecordDataset(path / "records", np.uint8, 300)


def shards(path: Path) -> Any:
    paths = [path / "0.tar", path / "1.tar"]
    for i, name in enumerate(paths):
        with tarfile.open(name, "w") as tar:
            for sample in range(i * N // 2, (i + 1) * N // 2):
                for suffix in ("raw", "txt"):
                    info = tarfile.TarInfo(f"{sample:03}.{suffix}")
                    info.size = 100
                    tar.addfile(info, io.BytesIO(b"%100d" % (sample * len(suffix))))
    return creel.TarDataset(paths)


def decoded(path: Path) -> Any:
    return creel.FileDataset(folder(path / "decoded"), decode=bytes)


@pytest.mark.parametrize(
    ("kinds", "objects", "kind", "mode"),
    [
        ((decoded,), 1, creel.DataLoader, "here"),
        ((records,), 1, DataLoader, "fork, persistent"),
        ((shards, files), 3, DataLoader, "fork, persistent"),
        ((shards, files), 3, creel.DataLoader, "here"),
    ],
)
@pytest.mark.usefixtures("never_looked_at_again")
def test_datasets_below_a_wrapper_of_ones_own_are_learnt(
    daemon: Running, tmp_path: Path, mode: str, kind: Any, kinds: tuple[Any, ...], objects: int
) -> None:
    bare = Around(*[make(tmp_path) for make in kinds])
    ours, theirs = batches(creel.wrap(bare), kind=kind, **HOW[mode]), batches(bare, **HOW[mode])
    for _ in range(EPOCHS):
        assert list(ours) == list(theirs)
    assert reads(daemon) == [objects * N]
    before = sorted(chain.from_iterable(theirs))
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.suffix != ".tar":  # a rewritten shard has no sample
            path.write_bytes(bytes(path.stat().st_size))
    assert sorted(chain.from_iterable(theirs)) != before
    assert sorted(chain.from_iterable(ours)) == before


def epochs_ahead(daemon: Running) -> list[int]:
    """Return the batches that the daemon knows of each session."""
    with daemon.client("cli") as client:
        sessions = client.ask("stats")["core"]["sessions"]
    return sorted(int(s["known"]) for s in sessions.values())


@pytest.mark.parametrize(
    ("mode", "inside"),
    [("here", False), ("here", True), ("fork", True), ("fork, persistent", False)],
)
@pytest.mark.usefixtures("never_looked_at_again")
def test_creels_loader_tells_epochs_ahead_once_they_are_learnt(
    daemon: Running, tmp_path: Path, mode: str, *, inside: bool
) -> None:
    """Also if the proxy is only a part of what the loader reads."""
    bare = Own(folder(tmp_path / "data"))
    wrapped = creel.wrap(bare)
    some = range(N - 1)
    ours = batches(Subset(wrapped, some) if inside else wrapped, kind=creel.DataLoader, **HOW[mode])
    theirs = batches(Subset(bare, some) if inside else bare, **HOW[mode])
    assert list(ours) == list(theirs)
    for _ in range(EPOCHS):
        assert list(ours) == list(theirs)
    assert reads(daemon) == [N]
    epoch = -(-(N - 1) // BATCH)
    assert epochs_ahead(daemon)[-1] >= 3 * epoch
    for path in tmp_path.glob("data/*.raw"):
        path.write_bytes(b"never read again")
    assert len(next(iter(ours))[0]) > 16 * 2


@pytest.mark.parametrize("workers", [0, 2])
def test_a_part_that_is_learnt_later_joins(daemon: Running, tmp_path: Path, workers: int) -> None:
    known = creel.FileDataset(folder(tmp_path / "known"), decode=bytes)
    bare = Own(folder(tmp_path / "learnt"))
    ours = batches(
        ConcatDataset([known, creel.wrap(bare)]), kind=creel.DataLoader, num_workers=workers
    )
    theirs = batches(ConcatDataset([known, bare]), num_workers=workers)
    for _ in range(EPOCHS):
        assert list(ours) == list(theirs)
    assert max(reads(daemon)) == 2 * N


def test_a_loader_that_drops_the_last_batch_is_learnt_too(daemon: Running, tmp_path: Path) -> None:
    ours = DataLoader(
        creel.wrap(Own(folder(tmp_path / "data"))), BATCH, collate_fn=list, drop_last=True
    )
    for _ in range(3):
        for _ in ours:
            pass
    assert reads(daemon) == [(N - 1) // BATCH * BATCH + 1]


def test_looking_at_one_sample_often_is_no_epoch(daemon: Running, tmp_path: Path) -> None:
    ours = creel.wrap(Own(folder(tmp_path / "data")))
    assert len({ours[3] for _ in range(N // 2)}) == 1
    for _ in range(2):
        for _ in batches(ours):
            pass
    assert reads(daemon) == [N]


def test_a_sample_that_reads_differently_later_is_right(daemon: Running, tmp_path: Path) -> None:
    bare = Own(folder(tmp_path / "data"))
    ours = creel.wrap(bare)
    for _ in range(2):
        for _ in batches(ours):
            pass
    (tmp_path / "other").mkdir()
    bare.path = folder(tmp_path / "other", N + 1)
    assert ours[5] == bare[5]
    assert reads(daemon) == [N]


class More(Own):
    """A dataset with more samples than its length says."""

    def __getitem__(self, i: int) -> bytes:
        return creel.read(self.path / f"{i % N:03}.raw")


class Foreign(Own):
    """Not all its files have names that a daemon can open."""

    def __getitem__(self, i: int) -> bytes:
        name = os.fsdecode(b"\xff") if i % 2 else f"{i:03}.raw"
        try:
            creel.read(f"{self.path}\0")
        except ValueError:
            return creel.read(self.path / name)
        raise AssertionError


class Mapped(Own):
    """Maps files as numpy does, by their descriptor; every other sample is read normally."""

    def __getitem__(self, i: int) -> bytes:
        with creel.open(self.path / f"{i % 7:03}.raw") as f:
            if i % 2:
                return f.read()
            f.seek(5)
            head = np.fromfile(f, np.uint8, 100).tobytes()
            ahead: bytes = f.peek(1)[:1]  # type: ignore[attr-defined]
            return head + ahead + f.read(10)


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize(
    ("own", "kind"),
    [
        (More, DataLoader),
        (More, creel.DataLoader),
        (Foreign, DataLoader),
        (Mapped, creel.DataLoader),
    ],
)
def test_samples_that_cannot_be_told_of_are_right(
    tmp_path: Path, own: type[Own], kind: Any
) -> None:
    bare = own(folder(tmp_path / "data"))
    (bare.path / os.fsdecode(b"\xff")).write_bytes(b"odd")
    order: Any = range(2 * N) if own is More else range(N - 1)
    ours = kind(creel.wrap(bare), BATCH, sampler=order, collate_fn=list)
    for _ in range(3):
        assert list(ours) == [[bare[i] for i in order[at : at + BATCH]] for at in order[::BATCH]]


def test_of_a_file_of_which_samples_read_little_only_the_blocks_are_read(
    daemon: Running, tmp_path: Path
) -> None:
    """Reading the whole file for each sample would cost a thousand times as much."""

    class Records(Own):
        def __getitem__(self, i: int) -> bytes:
            with creel.open(self.path / "big") as f:
                f.seek(i * 100)
                return f.read(100) + creel.read(self.path / f"{i:03}.raw")

    bare = Records(folder(tmp_path / "data"))
    (bare.path / "big").write_bytes(bytes(range(250)) * 1000)
    ours, theirs = batches(creel.wrap(bare)), batches(bare)
    for _ in range(3):
        assert list(ours) == list(theirs)
    # Python's buffer reads on after the last sample: four pages of 4 KiB in all.
    assert reads(daemon) == [N - 1 + 4]


@pytest.mark.parametrize(("kind", "workers"), [(DataLoader, 0), (creel.DataLoader, 2)])
def test_a_split_and_a_proxy_in_a_proxy_are_learnt(
    daemon: Running, tmp_path: Path, kind: Any, workers: int
) -> None:
    bare = Own(folder(tmp_path / "data"))
    wrapped = creel.wrap(bare)
    assert creel.wrap(wrapped) is wrapped
    half, order = range(0, N - 1, 2), torch.randperm(N // 2).tolist()
    theirs = batches(Subset(Subset(bare, half), order), num_workers=workers)
    ours = batches(creel.wrap(Subset(Subset(wrapped, half), order)), kind=kind, num_workers=workers)
    for _ in range(EPOCHS):
        assert list(ours) == list(theirs)
    assert reads(daemon) == [N // 2 + 1]


@pytest.mark.parametrize("kind", [DataLoader, creel.DataLoader], ids=["torch", "creel"])
def test_many_new_workers_each_epoch_learn_together(
    daemon: Running, tmp_path: Path, kind: Any
) -> None:
    """Each sees too few samples again to know that an epoch is over. A part reads nothing."""

    class Odd(Own):
        def __getitem__(self, i: int) -> bytes:
            return super().__getitem__(i) if i % 2 else b""

    bare = Odd(folder(tmp_path / "data"))
    some = range(5, 65)  # never all samples
    more: Any = {"num_workers": 6, "drop_last": True, "multiprocessing_context": "fork"}
    ours = batches(Subset(creel.wrap(bare), some), 1, kind=kind, **more)
    theirs = batches(Subset(bare, some), 1, num_workers=1)
    for _ in range(EPOCHS):
        assert list(ours) == list(theirs)
    assert reads(daemon)[-1] >= len(some) // 2


class Arrays(Own):
    """numpy reads a real file by its descriptor if it can."""

    def __getitem__(self, i: int) -> bytes:
        with creel.open(self.path / f"{i:03}.raw") as f:
            return bytes(np.load(f))


def test_arrays_are_cached(daemon: Running, tmp_path: Path) -> None:
    bare = Arrays(folder(tmp_path / "data"))
    for i in range(N - 1):
        with (bare.path / f"{i:03}.raw").open("wb") as f:
            np.save(f, np.full(100_000, i, np.uint8))
    ours, theirs = batches(creel.wrap(bare)), batches(bare)
    for _ in range(3):
        assert list(ours) == list(theirs)
    assert reads(daemon) == [N - 1]


class Cropped(Dataset[bytes]):
    """A user's own wrapper around torchvision's folder, which opens the files itself."""

    def __init__(self, images: Any) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> bytes:
        content: bytes = self.images[i][0].crop((0, 0, 3, 3)).tobytes()
        return content


@pytest.mark.parametrize(("kind", "workers"), [(DataLoader, 2), (creel.DataLoader, 0)])
def test_files_that_torchvision_reads_inside_are_cached(
    daemon: Running, tmp_path: Path, kind: Any, workers: int
) -> None:
    (tmp_path / "images/a").mkdir(parents=True)
    for i in range(N):
        Image.new("RGB", (5, 5), (i, 0, 0)).save(tmp_path / f"images/a/{i}.png")
    bare = Cropped(torchvision.ImageFolder(tmp_path / "images"))
    ours = batches(creel.wrap(bare), kind=kind, num_workers=workers)
    theirs = batches(bare, num_workers=workers)
    for _ in range(EPOCHS):
        assert list(ours) == list(theirs)
    assert reads(daemon) == [N]


def test_own_batches_are_left_alone(daemon: Running, tmp_path: Path) -> None:
    bare = Batched(folder(tmp_path / "data"))
    ours, theirs = (
        DataLoader(d, BATCH, collate_fn=kind_and_items) for d in (creel.wrap(bare), bare)
    )
    for _ in range(2):
        assert list(ours) == list(theirs)
    assert reads(daemon) == []


def journals() -> list[str]:
    """Return the open journals of this process."""
    return [target for _, target in descriptors() if JOURNAL in target]


def test_a_journal_goes_once_it_was_read(daemon: Running, tmp_path: Path) -> None:
    ours = batches(creel.wrap(Own(folder(tmp_path / "data"))))
    before = len(journals())
    for _ in range(2):
        for _ in ours:
            pass
    assert reads(daemon) == [N]
    assert len(journals()) == before


def test_a_journal_that_is_long_is_over(
    daemon: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = Own(folder(tmp_path / "data"))
    ours, theirs = batches(creel.wrap(bare)), batches(bare)
    monkeypatch.setattr(recorder, "MAX_JOURNAL_NBYTES", 1)
    for _ in range(3):
        assert list(ours) == list(theirs)
    assert reads(daemon) == [BATCH + 1]


def test_a_journal_that_cannot_be_written_costs_no_batch(daemon: Running, tmp_path: Path) -> None:
    bare = Own(folder(tmp_path / "data"))
    ours = creel.wrap(bare)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        got = [ours[i] for i in range(N - 1)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert got == [bare[i] for i in range(N - 1)]
    assert reads(daemon) == []


def test_where_no_journal_can_be_made_samples_are_as_without_creel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: object) -> int:
        raise OSError(errno.EMFILE, "no descriptor is left")

    bare = Own(folder(tmp_path / "data"))
    monkeypatch.setattr(os, "memfd_create", none_left)
    ours = creel.wrap(bare)
    assert [ours[i] for i in range(N - 1)] == [bare[i] for i in range(N - 1)]


@pytest.mark.usefixtures("daemon")
def test_nothing_is_kept_open(tmp_path: Path) -> None:
    before = descriptors()

    def kept() -> list[str]:
        """Return only these: a thread of an earlier test may be connecting to its daemon."""
        targets = [name for _, name in descriptors() - before]
        return [name for name in targets if any(x in name for x in (JOURNAL, str(tmp_path)))]

    dataset: Any = creel.wrap(Own(folder(tmp_path / "data")))
    with pytest.raises(IndexError):
        dataset[N]
    assert len(dataset[3]) > 0
    assert any(JOURNAL in name for _, name in descriptors())
    assert len(kept()) <= 1  # the journal: in an earlier test's file, if that is still there
    del dataset
    assert not kept()
