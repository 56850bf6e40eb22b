"""Layouts that people train from: creel.wrap never reads more from the source than torch.

Only to fill the cache it may read each file once more, and open a mapped one.
What Python opens, or a library that takes a file object, is read no more once it is in memory.
"""

from __future__ import annotations

import io
import json
import mmap
import os
import sqlite3
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import creel
from daemons import Running
from testbed.http_server import Server
from testbed.same import needs_fuse, same
from testbed.slowfs import SlowFS

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore"),  # of files that a dataset keeps open
    needs_fuse,
]

N, LENGTH = 12, 25_000  # samples of 100 kB
EPOCHS = 4
#: From this epoch on all is in memory.
FILLED = 2
#: The daemon reads at most so much at once.
PIECE_NBYTES = 1 << 20


def library(name: str) -> Any:
    return pytest.importorskip(name)


def row(i: int) -> Any:
    return np.random.default_rng(i).integers(0, 1 << 30, LENGTH).astype(np.int32)


def rows() -> Any:
    return np.stack([row(i) for i in range(N)])


class Samples(Dataset[Any]):
    """Reads sample i by `read(self, i)`; what it keeps open is in `file`."""

    def __init__(self, folder: str | Path, read: Read) -> None:
        self.folder, self.read = str(folder), read
        self.file: Any = None

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return torch.from_numpy(np.array(self.read(self, i)))

    def path(self, name: object) -> str:
        return f"{self.folder}/{name}"

    def kept(self, opening: Callable[[str], Any]) -> Any:
        """Return the one file, which stays open."""
        if self.file is None:
            self.file = opening(self.path("all"))
        return self.file


Read: TypeAlias = Callable[[Samples, int], Any]


# --- how they are written -------------------------------------------------------------------------


def each(write: Callable[[str, Any], object]) -> Callable[[Path], None]:
    """Write a file for each sample."""

    def writing(folder: Path) -> None:
        for i in range(N):
            write(f"{folder}/{i}", row(i))

    return writing


def hdf5(folder: Path) -> None:
    with library("h5py").File(folder / "all", "w") as f:
        f["x"] = rows()


def hdf5_file(path: str, x: Any) -> None:
    with library("h5py").File(path, "w") as f:
        f["x"] = x


def parquet(folder: Path) -> None:
    table = library("pyarrow").table({"x": rows().ravel()})
    library("pyarrow.parquet").write_table(table, folder / "all", row_group_size=LENGTH)


def parquet_file(path: str, x: Any) -> None:
    library("pyarrow.parquet").write_table(library("pyarrow").table({"x": x}), path)


def raw(folder: Path) -> None:
    rows().tofile(folder / "all")


def npy(folder: Path) -> None:
    with (folder / "all").open("wb") as f:
        np.save(f, rows())


def npy_file(path: str, x: Any) -> None:
    with open(path, "wb") as f:  # noqa: PTH123
        np.save(f, x)


def npz(folder: Path) -> None:
    with (folder / "all").open("wb") as f:
        np.savez(f, **{str(i): row(i) for i in range(N)})


def zipped(folder: Path) -> None:
    with zipfile.ZipFile(folder / "all", "w") as z:
        for i in range(N):
            z.writestr(str(i), row(i).tobytes())


def tarred(folder: Path) -> None:
    with tarfile.open(folder / "all", "w") as tar:
        for i in range(N):
            info = tarfile.TarInfo(str(i))
            info.size = 4 * LENGTH
            tar.addfile(info, io.BytesIO(row(i).tobytes()))


def jsonl(folder: Path) -> None:
    """Write lines, and where each of them begins."""
    begins = [0]
    with (folder / "all").open("wb") as f:
        for i in range(N):
            f.write(json.dumps(row(i)[:4000].tolist()).encode() + b"\n")
            begins.append(f.tell())
    (folder / "begins").write_text(json.dumps(begins))


def sqlite(folder: Path) -> None:
    database = sqlite3.connect(folder / "all")
    database.execute("create table samples (i integer primary key, x blob)")
    database.executemany("insert into samples values (?, ?)", enumerate(map(bytes, rows())))
    database.commit()
    database.close()


def tensors(folder: Path) -> None:
    save = library("safetensors.numpy").save_file
    save({str(i): row(i) for i in range(N)}, folder / "all")


def tensor_file(path: str, x: Any) -> None:
    library("safetensors.numpy").save_file({"x": x}, path)


# --- how they are read ----------------------------------------------------------------------------


def hdf5_sample(data: Samples, i: int) -> Any:
    with library("h5py").File(data.path("all"), "r") as f:
        return f["x"][i]


def hdf5_over_open(data: Samples, i: int) -> Any:
    with open(data.path("all"), "rb") as file, library("h5py").File(file, "r") as f:  # noqa: PTH123
        return f["x"][i]


def hdf5_whole(data: Samples, i: int) -> Any:
    with library("h5py").File(data.path(i), "r") as f:
        return f["x"][:]


def row_group(file: Any, i: int) -> Any:
    return file.read_row_group(i)["x"].to_numpy()


def parquet_sample(data: Samples, i: int) -> Any:
    with library("pyarrow.parquet").ParquetFile(data.path("all")) as f:
        return row_group(f, i)


def parquet_kept(**options: Any) -> Read:
    def read(data: Samples, i: int) -> Any:
        opening = library("pyarrow.parquet").ParquetFile
        return row_group(data.kept(lambda path: opening(path, **options)), i)

    return read


def parquet_over_open(data: Samples, i: int) -> Any:
    opening = library("pyarrow.parquet").ParquetFile
    return row_group(data.kept(lambda path: opening(open(path, "rb"))), i)  # noqa: PTH123


def parquet_files_kept(data: Samples, i: int) -> Any:
    if data.file is None:
        opening = library("pyarrow.parquet").ParquetFile
        data.file = [opening(data.path(number)) for number in range(N)]
    return row_group(data.file[i], 0)


def parquet_dataset(data: Samples, i: int) -> Any:
    def fragments(path: str) -> Any:
        (whole,) = library("pyarrow.dataset").dataset(path, format="parquet").get_fragments()
        return whole.split_by_row_group()

    return data.kept(fragments)[i].to_table()["x"].to_numpy()


def numbers(data: bytes) -> Any:
    return np.frombuffer(data, np.int32)


def zip_sample(data: Samples, i: int) -> Any:
    with zipfile.ZipFile(data.path("all")) as z:
        return numbers(z.read(str(i)))


def tar_sample(data: Samples, i: int) -> Any:
    with tarfile.open(data.path("all")) as tar:
        return numbers(tar.extractfile(str(i)).read())  # type: ignore[union-attr]  # a file


def begins(data: Samples) -> list[int]:
    with open(data.path("begins"), encoding="ascii") as f:  # noqa: PTH123
        return list(json.load(f))


def line_kept(data: Samples, i: int) -> Any:
    f, at = data.kept(lambda path: (open(path, "rb"), begins(data)))  # noqa: PTH123, SIM115
    f.seek(at[i])
    return json.loads(f.readline())


def line_sample(mode: str, buffering: int = -1) -> Read:
    def read(data: Samples, i: int) -> Any:
        at = data.kept(lambda _: begins(data))
        with open(data.path("all"), mode, buffering) as f:  # noqa: PTH123
            f.seek(at[i])
            return json.loads(f.read(at[i + 1] - at[i]))

    return read


def mapped_sample(data: Samples, i: int) -> Any:
    return np.memmap(data.path("all"), np.int32, "r", shape=(N, LENGTH))[i]


def mapped_file(data: Samples, i: int) -> Any:
    with open(data.path(i), "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as m:  # noqa: PTH123
        return numbers(m[:])


def by_descriptor(data: Samples, i: int) -> Any:
    fd = data.kept(lambda path: os.open(path, os.O_RDONLY))
    return numbers(os.pread(fd, 4 * LENGTH, 4 * LENGTH * i))


def arrow_file(data: Samples, i: int) -> Any:
    file = data.kept(library("pyarrow").OSFile)
    file.seek(4 * LENGTH * i)
    return numbers(file.read(4 * LENGTH))


def whole(data: Samples, i: int) -> Any:
    with open(data.path(i), "rb") as f:  # noqa: PTH123
        return numbers(f.read())


def third(data: Samples, i: int) -> Any:
    with open(data.path(i), "rb") as f:  # noqa: PTH123
        return numbers(f.read(1 << 15))


def head(data: Samples, i: int) -> Any:
    with open(data.path(i), "rb", 0) as f:  # noqa: PTH123
        return numbers(f.read(4096))


def select(data: Samples, i: int) -> Any:
    def connect(path: str) -> Any:
        return sqlite3.connect(f"file:{path}?immutable=1", uri=True)

    query = data.kept(connect).execute("select x from samples where i = ?", (i,))
    return numbers(query.fetchone()[0])


def safe_kept(data: Samples, i: int) -> Any:
    opening = library("safetensors").safe_open
    return data.kept(lambda path: opening(path, "np")).get_tensor(str(i))


def safe_bytes(data: Samples, i: int) -> Any:
    with open(data.path(i), "rb") as f:  # noqa: PTH123
        return library("safetensors.numpy").load(f.read())["x"]


class Layout(NamedTuple):
    """mapped: how much the kernel reads for a mapping varies, so only opens can be compared."""

    write: Callable[[Path], None]
    read: Read
    mapped: bool = False


arrays = each(lambda path, x: x.tofile(path))
LAYOUTS = {
    "HDF5, kept open": Layout(hdf5, lambda d, i: d.kept(library("h5py").File)["x"][i]),
    "HDF5, kept open, with options": Layout(
        hdf5,
        lambda d, i: d.kept(
            lambda path: library("h5py").File(
                path, "r", driver=None, libver="latest", swmr=True, rdcc_nbytes=1 << 16
            )
        )["x"][i],
    ),
    "HDF5, opened per sample": Layout(hdf5, hdf5_sample),
    "HDF5, over open()": Layout(hdf5, hdf5_over_open),
    "HDF5, a file per sample": Layout(each(hdf5_file), hdf5_whole),
    "Parquet, kept open": Layout(parquet, parquet_kept()),
    "Parquet, kept open, without pre_buffer": Layout(parquet, parquet_kept(pre_buffer=False)),
    "Parquet, kept open, mapped": Layout(parquet, parquet_kept(memory_map=True), mapped=True),
    "Parquet, kept open, over open()": Layout(parquet, parquet_over_open),
    "Parquet, many kept open": Layout(each(parquet_file), parquet_files_kept),
    "Parquet, opened per sample": Layout(parquet, parquet_sample),
    "Parquet, pyarrow.dataset": Layout(parquet, parquet_dataset),
    "Parquet, read_table": Layout(
        each(parquet_file),
        lambda d, i: library("pyarrow.parquet").read_table(d.path(i))["x"].to_numpy(),
    ),
    "zip, kept open": Layout(zipped, lambda d, i: numbers(d.kept(zipfile.ZipFile).read(str(i)))),
    "zip, opened per sample": Layout(zipped, zip_sample),
    "tar, kept open": Layout(
        tarred, lambda d, i: numbers(d.kept(tarfile.open).extractfile(str(i)).read())
    ),
    "tar, opened per sample": Layout(tarred, tar_sample),
    "jsonl, kept open": Layout(jsonl, line_kept),
    "jsonl, opened per sample": Layout(jsonl, line_sample("rb")),
    "jsonl, without a buffer": Layout(jsonl, line_sample("rb", 0)),
    "jsonl, text": Layout(jsonl, line_sample("r")),
    "npz, kept open": Layout(npz, lambda d, i: d.kept(np.load)[str(i)]),
    "npz, opened per sample": Layout(npz, lambda d, i: np.load(d.path("all"))[str(i)]),
    "npy, a file per sample": Layout(each(npy_file), lambda d, i: np.load(d.path(i))),
    "npy, mapped per sample": Layout(
        npy, lambda d, i: np.load(d.path("all"), mmap_mode="r")[i], mapped=True
    ),
    "memmap, kept": Layout(
        raw,
        lambda d, i: d.kept(lambda path: np.memmap(path, np.int32, "r", 0, (N, LENGTH)))[i],
        mapped=True,
    ),
    "memmap, made per sample": Layout(raw, mapped_sample, mapped=True),
    "mmap of a file per sample": Layout(arrays, mapped_file, mapped=True),
    "np.fromfile at an offset": Layout(
        raw, lambda d, i: np.fromfile(d.path("all"), np.int32, LENGTH, offset=4 * LENGTH * i)
    ),
    "a descriptor, kept": Layout(raw, by_descriptor),
    "pyarrow.OSFile, kept": Layout(raw, arrow_file),
    "plain files": Layout(arrays, whole),
    "plain files, a third of each": Layout(arrays, third),
    "plain files, their heads": Layout(arrays, head),
    "SQLite, kept open": Layout(sqlite, select),
    "safetensors, kept open": Layout(tensors, safe_kept, mapped=True),
    "safetensors, load_file": Layout(
        each(tensor_file),
        lambda d, i: library("safetensors.numpy").load_file(d.path(i))["x"],
        mapped=True,
    ),
    "safetensors, load": Layout(each(tensor_file), safe_bytes),
}


#: Those whose files C code or a descriptor reads.
UNSERVED = {"a descriptor, kept", "pyarrow.OSFile, kept"}
#: SQLite's own.
OWN_CACHE = {"SQLite, kept open"}


# --- the law --------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> Iterator[SlowFS]:
    """An empty folder of a file system whose opens take long enough to be worth saving."""
    folder = tmp_path / "data"
    folder.mkdir()
    with SlowFS(str(folder), str(tmp_path / "mount"), open_latency=2.0) as fs:  # type: ignore[no-untyped-call]
        yield fs


def requests(fs: SlowFS) -> dict[str, tuple[int, int, int]]:
    """Return (opens, reads, bytes) of each file since the last call."""
    paths = fs.stats()["paths"]  # type: ignore[no-untyped-call]
    fs.reset()  # type: ignore[no-untyped-call]
    return {path: tuple(counts) for path, counts in paths.items()}


def batches(
    kind: Any, dataset: Any, workers: int, between: Callable[[int], None] = lambda _: None
) -> list[Any]:
    """Return the batches of all epochs; `between` is called with the number of each that begins."""
    loader = kind(
        dataset,
        4,
        True,
        num_workers=workers,
        persistent_workers=workers > 0,
        generator=torch.Generator().manual_seed(5),
    )
    read = []
    for epoch in range(EPOCHS):
        between(epoch)
        read += list(loader)
    return read


def check(
    name: str, fs: SlowFS, daemon: Running, kind: Any = creel.DataLoader, workers: int = 0
) -> None:
    layout = LAYOUTS[name]
    folder = Path(fs.mountpoint).parent / "data"
    layout.write(folder)
    requests(fs)
    expected = batches(DataLoader, Samples(fs.mountpoint, layout.read), workers)
    torchs = requests(fs)
    wrapped = creel.wrap(Samples(fs.mountpoint, layout.read))
    last: list[int] = []

    def between(epoch: int) -> None:
        last[:] = [fs.totals()["reads"]] if epoch == FILLED else last  # type: ignore[no-untyped-call]

    assert same(batches(kind, wrapped, workers, between), expected)
    if not layout.mapped and name not in OWN_CACHE:
        idle = fs.totals()["reads"] == last[0]  # type: ignore[no-untyped-call]
        assert idle == (name not in UNSERVED), "reads of the source once all is in memory"
    for path, (opens, reads, nbytes) in requests(fs).items():
        size = (folder / path).stat().st_size
        most = torchs[path]
        # Once more to fill the cache, or to ask for pages of a mapped file.
        assert opens <= most[0] + 1
        if not layout.mapped:
            assert reads <= most[1] + 1 + size // PIECE_NBYTES
            assert nbytes <= most[2] + size
    with daemon.client("cli") as client:
        datasets = client.ask("stats")["core"]["datasets"].values()
    assert all(dataset["reads"] <= dataset["objects"] for dataset in datasets)


@pytest.mark.parametrize("name", LAYOUTS)
def test_below_wrap_no_layout_reads_more_than_torch_but_once_per_file(
    name: str, source: SlowFS, daemon: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CREEL_LOADER__DIRECT", "never")  # else the daemon is left out
    check(name, source, daemon)


KEPT_OPEN = [name for name in LAYOUTS if "kept" in name and not LAYOUTS[name].mapped]
#: One of each kind of file, opened by each sample.
PER_SAMPLE = ["HDF5, opened per sample", "Parquet, read_table", "npz, opened per sample"]
PER_SAMPLE += ["jsonl, text", "plain files, a third of each"]


@pytest.mark.parametrize(
    ("kind", "workers", "direct", "name"),
    [
        *((creel.DataLoader, 2, "auto", name) for name in KEPT_OPEN),
        *((creel.DataLoader, 2, "never", name) for name in PER_SAMPLE),
        *((DataLoader, 0, "never", name) for name in KEPT_OPEN),
    ],
)
def test_nor_do_workers_or_torchs_own_loader(
    name: str,
    kind: Any,
    workers: int,
    direct: str,
    source: SlowFS,
    daemon: Running,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CREEL_LOADER__DIRECT", direct)
    check(name, source, daemon, kind, workers)


@pytest.mark.usefixtures("daemon")
def test_a_remote_file_is_read_in_blocks_by_whoever_takes_files_from_fsspec(tmp_path: Path) -> None:
    fsspec, _ = library("fsspec"), library("aiohttp")
    spec = "creel.loader.data.files.chained.CreelFileSystem"  # by an entry point (test_wheel.py)
    fsspec.register_implementation("creel", spec, clobber=True)
    hdf5(tmp_path)

    def opened(path: str) -> Any:
        return library("h5py").File(fsspec.open(f"creel::{path}").open())

    with Server(tmp_path) as server:
        dataset = creel.wrap(Samples(server.url, lambda data, i: data.kept(opened)["x"][i]))
        loader, gets = creel.DataLoader(dataset, None, creel={"loader.direct": "never"}), []
        for _ in range(EPOCHS):
            assert same(list(loader), [torch.from_numpy(row(i)) for i in range(N)])
            gets.append(server.stats(reset=True)["gets"])
        assert gets[2:] == [0, 0]


@pytest.mark.parametrize("nbytes", [100_000, 10_000])
def test_with_memory_for_half_of_a_file_an_epoch_reads_the_other_half(
    nbytes: int, source: SlowFS, daemon_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the rows that samples read, not of much larger blocks around them."""
    monkeypatch.setenv("CREEL_LOADER__DIRECT", "never")
    many = 16_000_000 // nbytes

    class Rows(Samples):
        def __len__(self) -> int:
            return many

    def read(data: Samples, i: int) -> Any:
        file = data.kept(lambda path: open(path, "rb"))  # noqa: PTH123, SIM115
        file.seek(i * nbytes)
        return np.frombuffer(file.read(nbytes), np.uint8)

    whole = np.random.default_rng(0).bytes(many * nbytes)
    (Path(source.mountpoint).parent / "data/all").write_bytes(whole)
    more: dict[str, Any] = {"batch_size": 4 * 100_000 // nbytes, "shuffle": True}
    assert sum(map(len, DataLoader(Rows(source.mountpoint, read), **more))) == many
    ((_, torchs_reads, torchs),) = requests(source).values()
    with Running(daemon_name, memory="8MiB"):
        dataset = creel.wrap(Rows(source.mountpoint, read))
        loader = creel.DataLoader(dataset, **more, generator=torch.Generator().manual_seed(5))
        for epoch in range(4):
            assert sum(len(batch) for batch in loader) == many
            ((_, reads, got),) = requests(source).values()
            if epoch > 1:
                assert reads <= torchs_reads
                assert got <= (1 - (8 << 20) / len(whole) + 0.1) * torchs
