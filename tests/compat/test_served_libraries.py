"""Libraries that read large files in their own ways, unedited below creel.wrap, and by `creel::`.

Each is read from the source no more once it is in memory, and gives torch's batches.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import creel
from testbed.same import needs_fuse, same
from testbed.slowfs import SlowFS

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore"),  # the libraries' own warnings, and files left open
    needs_fuse,
]

N, LENGTH = 12, 25_000  # samples of 100 kB


def library(name: str) -> Any:
    """Import a module; without it the test is skipped, or fails if CI should have it."""
    if os.environ.get("FRAMEWORKS") == "required":
        return importlib.import_module(name)
    return pytest.importorskip(name)


def row(i: int) -> Any:
    return np.random.default_rng(i).integers(0, 1 << 15, LENGTH).astype(np.int32)


def rows() -> Any:
    return np.stack([row(i) for i in range(N)])


class Samples(Dataset[Any]):
    """Reads sample i by `read(self, i)`; what it keeps open is in `file`."""

    def __init__(self, folder: str, read: Read) -> None:
        self.folder, self.read = folder, read
        self.file: Any = None

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return torch.from_numpy(np.array(self.read(self, i)))

    def kept(self, opening: Callable[[str], Any]) -> Any:
        if self.file is None:
            self.file = opening(f"{self.folder}/all")
        return self.file


Read: TypeAlias = Callable[[Samples, int], Any]


class Layout(NamedTuple):
    write: Callable[[str], object]
    read: Read


def sharded(folder: str, **more: Any) -> None:
    library("zarr").create_array(f"{folder}/all", data=rows(), chunks=(1, LENGTH), **more)


def zarr_row(data: Samples, i: int) -> Any:
    return data.kept(lambda path: library("zarr").open(path, mode="r"))[int(i)]


def videos(folder: str) -> None:
    for i in range(N):
        pictures = np.random.default_rng(i).integers(0, 255, (12, 128, 128, 3), np.uint8)
        with library("av").open(f"{folder}/{i}.mp4", "w") as out:
            stream = out.add_stream("mpeg4", rate=25, options={"b": "4000000"})
            stream.width = stream.height = 128
            stream.pix_fmt = "yuv420p"
            for picture in [*pictures, None]:
                frame = None
                if picture is not None:
                    frame = library("av").VideoFrame.from_ndarray(picture, format="rgb24")
                out.mux(stream.encode(frame))


def first_picture(data: Samples, i: int) -> Any:
    with library("av").open(f"{data.folder}/{i}.mp4") as video:
        return next(video.decode(video=0)).to_ndarray(format="rgb24")


def decoded(data: Samples, i: int) -> Any:
    return library("decord").VideoReader(f"{data.folder}/{i}.mp4", num_threads=1)[0].asnumpy()


def sounds(folder: str) -> None:
    for i in range(N):
        library("soundfile").write(f"{folder}/{i}.flac", row(i).astype(np.int16), 16_000)


def sound(data: Samples, i: int) -> Any:
    path = f"{data.folder}/{i}.flac"
    with library("soundfile").SoundFile(path) as file:
        assert file.name == path
        return file.read(dtype="int16")


def tensors(folder: str) -> None:
    for i in range(N):
        library("safetensors.numpy").save_file({"x": row(i)}, f"{folder}/{i}")


def tensor(data: Samples, i: int) -> Any:
    return library("safetensors.torch").load_file(f"{data.folder}/{i}")["x"]


def model(folder: str) -> None:
    library("safetensors.numpy").save_file({str(i): row(i) for i in range(N)}, f"{folder}/all")


def model_kept(data: Samples, i: int) -> Any:
    file = data.kept(lambda path: library("safetensors").safe_open(path, "pt"))
    assert (sorted(map(int, file.keys())), file.metadata()) == (list(range(N)), None)
    return file.get_tensor(str(int(i)))


def safe_tensor(data: Samples, i: int) -> Any:
    with library("safetensors").safe_open(f"{data.folder}/{i}", framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}["x"]  # noqa: SIM118  no dict


def tensor_slice(data: Samples, i: int) -> Any:
    with library("safetensors").safe_open(f"{data.folder}/{i}", framework="numpy") as file:
        return file.get_slice("x")[1000:3000]


def volumes(folder: str) -> None:
    nibabel = library("nibabel")
    for i in range(N):
        nibabel.save(
            nibabel.Nifti1Image(row(i).reshape(50, 50, 10), np.eye(4)), f"{folder}/{i}.nii"
        )


def volume(data: Samples, i: int) -> Any:
    return library("nibabel").load(f"{data.folder}/{i}.nii").get_fdata()


def raw(folder: str) -> None:
    rows().tofile(f"{folder}/all")
    Path(folder, "begins").write_text(json.dumps([4 * LENGTH * i for i in range(N)]))


def part(data: Samples, i: int) -> bytes:
    with open(f"{data.folder}/all", "rb") as file:  # noqa: PTH123
        file.seek(4 * LENGTH * i)
        return file.read(4 * LENGTH)


def in_a_pool(data: Samples, i: int) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return np.frombuffer(pool.submit(part, data, i).result(), np.int32)


def by_fsspec(data: Samples, i: int) -> Any:
    fsspec = library("fsspec")
    file = data.kept(lambda path: fsspec.open(f"creel::file://{path}").open())
    file.seek(4 * LENGTH * i)
    return np.frombuffer(file.read(4 * LENGTH), np.int32)


def hdf5(folder: str) -> None:
    with library("h5py").File(f"{folder}/all", "w") as f:
        f["x"] = rows()


def hdf5_by_fsspec(data: Samples, i: int) -> Any:
    def opening(path: str) -> Any:
        return library("h5py").File(library("fsspec").open(f"creel::file://{path}").open())

    return data.kept(opening)["x"][i]


def parquet(folder: str) -> None:
    table = library("pyarrow").table({"x": rows().ravel()})
    library("pyarrow.parquet").write_table(table, f"{folder}/all", row_group_size=LENGTH)


def parquet_by_fsspec(data: Samples, i: int) -> Any:
    system = library("fsspec").filesystem("creel")
    (file,) = library("pyarrow.dataset").dataset(f"{data.folder}/all", filesystem=system).files
    with system.open(file) as opened:
        return library("pyarrow.parquet").ParquetFile(opened).read_row_group(i)["x"].to_numpy()


def tables(folder: str) -> None:
    for i in range(N):
        library("pandas").DataFrame({"x": row(i)}).to_parquet(f"{folder}/{i}")


def table_by_fsspec(data: Samples, i: int) -> Any:
    return library("pandas").read_parquet(f"creel::file://{data.folder}/{i}")["x"].to_numpy()


def zarr_by_fsspec(data: Samples, i: int) -> Any:
    zarr = library("zarr")
    return data.kept(lambda path: zarr.open(f"creel::file://{path}", mode="r"))[int(i)]


LAYOUTS = {
    "zarr, a file per chunk": Layout(sharded, zarr_row),
    "zarr, shards": Layout(lambda folder: sharded(folder, shards=(4, LENGTH)), zarr_row),
    "av": Layout(videos, first_picture),
    "decord": Layout(videos, decoded),
    "soundfile": Layout(sounds, sound),
    "safetensors, load_file": Layout(tensors, tensor),
    "safetensors, safe_open": Layout(tensors, safe_tensor),
    "safetensors, get_slice": Layout(tensors, tensor_slice),
    "safetensors, safe_open kept": Layout(model, model_kept),
    "nibabel": Layout(volumes, volume),
    "a pool of threads": Layout(raw, in_a_pool),
    "creel::, kept open": Layout(raw, by_fsspec),
    "creel::, h5py": Layout(hdf5, hdf5_by_fsspec),
    "creel::, pyarrow": Layout(parquet, parquet_by_fsspec),
    "creel::, pandas": Layout(tables, table_by_fsspec),
    "creel::, zarr": Layout(sharded, zarr_by_fsspec),
}


@pytest.fixture
def source(tmp_path: Path) -> Iterator[SlowFS]:
    (tmp_path / "data").mkdir()
    with SlowFS(str(tmp_path / "data"), str(tmp_path / "mount"), open_latency=2.0) as fs:  # type: ignore[no-untyped-call]
        yield fs


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_library_reads_from_the_source_what_torch_does_and_then_nothing(
    name: str, source: SlowFS, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CREEL_LOADER__DIRECT", "never")
    spec = "creel.loader.data.files.chained.CreelFileSystem"  # by an entry point (test_wheel.py)
    library("fsspec").register_implementation("creel", spec, clobber=True)
    LAYOUTS[name].write(str(Path(source.mountpoint).parent / "data"))
    batches, reads, opens = [], [], []
    for kind in (DataLoader, creel.DataLoader):
        dataset: Any = Samples(source.mountpoint, LAYOUTS[name].read)
        order = torch.Generator().manual_seed(5)
        if kind is creel.DataLoader:
            dataset = creel.wrap(dataset)
        loader: Any = kind(
            dataset, 4, True, num_workers=1, persistent_workers=True, generator=order
        )
        samples = []
        for _ in range(4):
            source.reset()  # type: ignore[no-untyped-call]
            samples += list(loader)
            reads.append(source.totals()["reads"])  # type: ignore[no-untyped-call]
            opens.append(source.totals()["opens"])  # type: ignore[no-untyped-call]
        batches.append(samples)
    assert same(batches[0], batches[1])
    # A file that decord, in C, has opened is read once more to fill the cache: at times at once. Of
    # a mapped file the kernel reads what lies around.
    most = {"decord": 2 * reads[0], "safetensors, safe_open kept": N + 2}
    assert reads[4] <= most.get(name, reads[0])
    assert reads[6:] == [0, 0]
    assert opens[6:] == [0, 0] or not name.startswith("creel::")
