"""Common data formats, read by their own libraries: creel gives torch's batches.

CI installs the libraries of the groups `frameworks` and `shards`; missing ones are skipped.
docs/formats.md says what creel gains for each.
"""

from __future__ import annotations

import copy
import gc
import importlib
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import creel
from creel.loader.data.tracing import observed
from daemons import Running
from testbed.pages import check_read_ahead, slow_pages
from testbed.same import needs_fuse, same

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(90),
    pytest.mark.filterwarnings("ignore"),  # the libraries' own warnings
]

N, LENGTH, BATCH = 24, 4000, 5
IN_CI = {"datasets", "h5py", "lmdb", "pandas", "pyarrow.parquet", "pydicom", "zarr"} | {
    "safetensors",
    "safetensors.torch",
    "megatron.core.datasets.indexed_dataset",
    "megatron.core.datasets.gpt_dataset",
}


def library(name: str) -> Any:
    """Import a module; without it the test is skipped, or fails if CI should have it."""
    if name in IN_CI and os.environ.get("FRAMEWORKS") == "required":
        return importlib.import_module(name)
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as e:  # RuntimeError: a torchvision for another torch
        pytest.skip(f"{name}: {e}")


def row(i: int, n: int = LENGTH) -> Any:
    return np.random.default_rng(i).integers(0, 1 << 15, n).astype(np.int64)


class Samples(Dataset[Any]):
    """N samples; a subclass reads them."""

    def __len__(self) -> int:
        return N


# --- a file for each sample -----------------------------------------------------------------------


class Files(Samples):
    """Each sample is a file, opened and closed."""

    suffix = ""

    def __init__(self, folder: Path) -> None:
        self.paths = [str(folder / f"{i}{self.suffix}") for i in range(N)]
        for i, path in enumerate(self.paths):
            self.write(path, i)

    def write(self, path: str, i: int) -> None:
        raise NotImplementedError


class Hdf5Files(Files):
    suffix = ".h5"

    def write(self, path: str, i: int) -> None:
        with library("h5py").File(path, "w") as f:
            f.create_dataset("x", data=row(i), compression="gzip", chunks=(1000,))

    def __getitem__(self, i: int) -> torch.Tensor:
        with library("h5py").File(self.paths[i], "r") as f:
            return torch.from_numpy(f["x"][:])


class ParquetFiles(Files):
    suffix = ".parquet"

    def write(self, path: str, i: int) -> None:
        library("pandas").DataFrame({"x": row(i)}).to_parquet(path)

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor(library("pandas").read_parquet(self.paths[i])["x"].to_numpy())


# --- many samples in a file -----------------------------------------------------------------------


class RowGroups(Samples):
    """Sample i is row group i of a Parquet file."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "rows.parquet")
        table = library("pyarrow").table({"x": np.concatenate([row(i) for i in range(N)])})
        library("pyarrow.parquet").write_table(table, self.path, row_group_size=LENGTH)

    def __getitem__(self, i: int) -> torch.Tensor:
        with library("pyarrow.parquet").ParquetFile(self.path) as f:
            return torch.tensor(f.read_row_group(i)["x"].to_numpy())


class Hdf5Rows(Samples):
    """One HDF5 file, kept open from sample to sample in each process."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "rows.h5")
        self.file: Any = None
        with library("h5py").File(self.path, "w") as f:
            f["x"] = np.stack([row(i) for i in range(N)])

    def __getitem__(self, i: int) -> torch.Tensor:
        if self.file is None:
            self.file = library("h5py").File(self.path, "r")
        return torch.from_numpy(self.file["x"][i])


class ZarrRows(Samples):
    """A Zarr array, version 3 of the format, in chunks of two samples."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "rows.zarr")
        array = library("zarr").create_array(
            self.path, shape=(N, LENGTH), chunks=(2, LENGTH), dtype="i8", zarr_format=3
        )
        array[:] = np.stack([row(i) for i in range(N)])

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.from_numpy(library("zarr").open_array(self.path, mode="r")[i])


class Lmdb(Samples):
    """An LMDB environment, opened by each process at its first sample."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "lmdb")
        self.env: Any = None
        with library("lmdb").open(self.path, map_size=1 << 26) as env, env.begin(write=True) as t:
            for i in range(N):
                t.put(b"%d" % i, row(i).tobytes())

    def __getitem__(self, i: int) -> torch.Tensor:
        if self.env is None:
            self.env = library("lmdb").open(self.path, readonly=True, lock=False, readahead=False)
        with self.env.begin() as t:
            return torch.tensor(np.frombuffer(t.get(b"%d" % i), np.int64))


class Tokens(Samples):
    """nanoGPT's way: a new memmap for each sample, and its tokens shifted by one."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "train.bin")
        row(0, N * LENGTH + 1).astype(np.uint16).tofile(self.path)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        data, at = np.memmap(self.path, dtype=np.uint16, mode="r"), i * LENGTH
        x, y = (data[at + k : at + k + LENGTH].astype(np.int64) for k in (0, 1))
        return torch.from_numpy(x), torch.from_numpy(y)


class Megatron(Samples):
    """Indexed tokens of Megatron and NeMo: a .bin with the documents, and an .idx."""

    def __init__(self, folder: Path) -> None:
        indexed = library("megatron.core.datasets.indexed_dataset")
        prefix = str(folder / "tokens")
        builder = indexed.IndexedDatasetBuilder(prefix + ".bin", dtype=np.uint16)
        for i in range(N):
            builder.add_document(torch.from_numpy(row(i)), [LENGTH])
        builder.finalize(prefix + ".idx")
        self.tokens = indexed.IndexedDataset(prefix)

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.from_numpy(self.tokens[i].astype(np.int64))


def hugging_face(folder: Path) -> Any:
    """Return a map-style dataset of mapped Arrow files."""
    datasets = library("datasets")
    datasets.disable_progress_bars()
    data = datasets.Dataset.from_dict({"x": [row(i).tolist() for i in range(N)]})
    data.save_to_disk(str(folder / "arrow"))
    return datasets.load_from_disk(str(folder / "arrow")).with_format("torch")


class Mosaic(Samples):
    """MDS shards, read map-style."""

    def __init__(self, folder: Path) -> None:
        streaming, columns = library("streaming"), {"x": "ndarray:int64"}
        with streaming.MDSWriter(out=str(folder), columns=columns, size_limit=1 << 17) as out:
            for i in range(N):
                out.write({"x": row(i)})
        self.shards = streaming.LocalDataset(str(folder))

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor(self.shards[i]["x"])


class Lit(Samples):
    """LitData chunks, read map-style."""

    def __init__(self, folder: Path) -> None:
        litdata = library("litdata")
        writers = library("litdata.streaming.writer")
        writer = writers.BinaryWriter(str(folder), chunk_bytes=1 << 17)
        for i in range(N):
            writer.add_item(i, {"x": row(i)})
        writer.done()
        writer.merge()
        self.chunks = litdata.StreamingDataset(str(folder), max_cache_size="25GB")

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor(self.chunks[i]["x"])


#: How to make each, and whether `creel.wrap` caches its files; None: only an index or small shards.
KINDS: dict[str, tuple[Callable[[Path], Any], bool | None]] = {
    "HDF5, a file for each sample": (Hdf5Files, True),
    "Parquet, a file for each sample": (ParquetFiles, True),
    "Parquet, row groups": (RowGroups, True),
    "HDF5, one file": (Hdf5Rows, False),
    "Zarr": (ZarrRows, True),
    "LMDB": (Lmdb, False),
    "memmap": (Tokens, False),
    "Megatron": (Megatron, False),
    "Hugging Face": (hugging_face, False),
    "MDS": (Mosaic, None),
    "LitData": (Lit, None),
}


def batches(kind: Any, dataset: Any, workers: int) -> list[Any]:
    """Return the batches of three epochs, and the next number of the generator."""
    torch.manual_seed(7)
    loader = kind(dataset, BATCH, shuffle=True, num_workers=workers)
    return [copy.deepcopy(batch) for _ in range(3) for batch in loader] + [torch.rand(1)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", KINDS)
def test_batches_are_torchs_whatever_the_format(
    name: str, workers: int, tmp_path: Path, daemon: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, cached = KINDS[name]
    # A file that opens slowly is cached even if little of it is read; a busy machine is no reason.
    monkeypatch.setattr(observed, "QUICK_OPEN_NS", sys.maxsize)

    def dataset(kind: str) -> Any:
        """Return a new dataset each time, as it may keep files open."""
        (tmp_path / kind).mkdir()
        return make(tmp_path / kind)

    expected = batches(DataLoader, dataset("torch"), workers)
    assert same(batches(creel.DataLoader, dataset("creel"), workers), expected)
    assert same(batches(DataLoader, creel.wrap(dataset("wrapped")), workers), expected)
    assert same(batches(creel.DataLoader, creel.wrap(dataset("both")), workers), expected)
    with daemon.client("cli") as client:
        datasets = client.ask("stats")["core"]["datasets"].values()
    assert cached in {any(row["reads"] for row in datasets), None}


class Words:
    """What a GPTDataset asks a tokenizer."""

    vocab_size, eod, pad = 1000, 0, None
    unique_identifiers: ClassVar[dict[str, str]] = {}


def test_token_dataset_has_the_documents_and_sequences_of_megatron(tmp_path: Path) -> None:
    indexed = library("megatron.core.datasets.indexed_dataset")
    gpt = library("megatron.core.datasets.gpt_dataset")
    prefix, length = str(tmp_path / "tokens"), 16
    builder = indexed.IndexedDatasetBuilder(prefix + ".bin", dtype=np.uint16)
    for i in range(40):
        builder.add_document(torch.from_numpy(row(i, 5 + 7 * i % 50) % 999 + 1), [5 + 7 * i % 50])
    builder.finalize(prefix + ".idx")
    documents = indexed.IndexedDataset(prefix)
    ours: Any = creel.TokenDataset(prefix)
    assert len(ours) == len(documents) == 40
    assert all(np.array_equal(ours[i], documents[i]) for i in range(40))
    config = gpt.GPTDatasetConfig(
        random_seed=3,
        sequence_length=length,
        tokenizer=Words(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        mid_level_dataset_surplus=0.005,
        split="1,0,0",
        path_to_cache=str(tmp_path),
    )
    numbers, train = np.arange(40, dtype=np.int32), gpt.Split.train
    packed = gpt.GPTDataset(documents, prefix, numbers, 150, train, config)  # two epochs
    ours = creel.TokenDataset(
        prefix, length + 1, overlap=1, documents=packed.document_index.tolist()
    )
    assert len(ours) == len(packed) >= 150
    for theirs, i in zip(
        (packed[k] for k in range(len(packed))), packed.shuffle_index, strict=True
    ):
        assert torch.equal(ours[int(i)][:-1], theirs["tokens"])
        assert torch.equal(ours[int(i)][1:], theirs["labels"])


@pytest.mark.usefixtures("daemon")
def test_pydicom_reads_large_elements_later(tmp_path: Path) -> None:
    """It keeps `type(file)`, and opens the file's name by it, unless that is Python's own."""
    pydicom = library("pydicom")
    meta = pydicom.dataset.FileMetaDataset()
    meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    for i in range(4):
        data = pydicom.dataset.FileDataset(str(i), {}, file_meta=meta, preamble=bytes(128))
        data.PixelData = bytes([i]) * 80_000
        data["PixelData"].VR = "OW"
        data.save_as(tmp_path / str(i), enforce_file_format=False)

    class Dicom(Dataset[Any]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, i: int) -> Any:
            elements = [pydicom.dcmread(tmp_path / str(i), defer_size=1000, force=True)]
            for buffering in (-1, 0):
                with open(tmp_path / str(i), "rb", buffering) as f:  # noqa: PTH123
                    elements.append(pydicom.dcmread(f, defer_size=1000, force=True))
            return [element.PixelData for element in elements]

    ours = creel.DataLoader(creel.wrap(Dicom()), None, creel={"loader.direct": "never"})
    for _ in range(3):
        assert list(ours) == list(DataLoader(Dicom(), None))


def test_datasets_of_hugging_face() -> None:
    datasets = library("datasets")
    bare = datasets.Dataset.from_dict({"a": list(range(10))})
    creel.wrap(bare)
    gc.collect()
    assert bare[3] == {"a": 3}  # its `__del__` drops its table
    wrapped = creel.wrap(bare)
    twice = wrapped.with_transform(lambda batch: {"a": [2 * x for x in batch["a"]]})
    assert (wrapped[3], twice[3], bare[3]) == ({"a": 3}, {"a": 6}, {"a": 3})
    assert wrapped[2:4] == bare[2:4]
    assert wrapped["a"][3] == 3
    assert wrapped.select([4])[0] == {"a": 4}
    assert list(wrapped)[9] == {"a": 9}
    assert wrapped.map(lambda row: {"b": row["a"] + 1})[1] == {"a": 1, "b": 2}
    assert wrapped.with_format("torch")[1]["a"].item() == 1
    assert isinstance(wrapped, datasets.Dataset)
    bare.set_format("numpy")
    assert isinstance(wrapped[0]["a"], np.integer)
    assert [row["a"] for row in wrapped.shuffle(seed=1)] == [r["a"] for r in bare.shuffle(seed=1)]
    assert pickle.loads(pickle.dumps(wrapped))[5]["a"] == 5


def _rows(folder: Path) -> Any:
    """Save and map rows of 200 KB, in record batches of seven."""
    datasets = library("datasets")
    datasets.disable_progress_bars()
    if not (folder / "hf").exists():
        data = datasets.Dataset.from_dict(
            {
                "tokens": [row(i, 20_000 + i) for i in range(48)],
                "text": [f"{i} " * 20_000 for i in range(48)],
                "chat": [[{"role": "a", "content": "b" * 5000}] * (i % 4) for i in range(48)],
                "left out": ["x" * 50_000] * 48,
            }
        )
        data.save_to_disk(str(folder / "hf"), num_shards=2)
    return datasets.load_from_disk(str(folder / "hf"))


def _tensors(folder: Path) -> Any:
    safetensors = library("safetensors.torch")
    path = str(folder / "x.safetensors")
    if not Path(path).exists():
        rows = torch.arange(24 << 16).view(24, 1 << 16)
        safetensors.save_file({"x": rows, "y": torch.arange(24.0)}, path)
    return safetensors.load_file(path)


class OneByOne(Samples):
    """Tensors of a safetensors file that is kept open, and where they lie."""

    def __init__(self, folder: Path) -> None:
        safetensors = library("safetensors.torch")
        path = str(folder / "all.safetensors")
        if not Path(path).exists():
            safetensors.save_file({str(i): torch.full((1 << 15,), i) for i in range(N)}, path)
        self.file = library("safetensors").safe_open(path, "pt")

    def __getitem__(self, i: int) -> Any:
        return self.file.get_tensor(str(i)).clone()

    def ranges(self, i: int) -> Any:
        return creel.mapped_ranges(self.file.get_tensor(str(i)))


def _noted(rows: Any) -> Any:
    """Show of each text with how many others it came: those of one `__getitems__`."""
    return {"n": [len(rows["text"])] * len(rows["text"]), **rows}


class Held(Dataset[Any]):
    """A dataset of a person's over rows of Hugging Face."""

    def __init__(self, folder: Path) -> None:
        self.rows = _rows(folder)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        row = self.rows[i]
        return row["text"][:9], sum(row["tokens"]), len(row["chat"])


COLUMNS = ["tokens", "text"]
#: Samples of mapped files; `creel.DataLoader(dataset, ...)` is all that is to be written.
MAPPED: dict[str, Callable[[Path], Any]] = {
    "rows": lambda folder: _rows(folder).select_columns(["tokens", "text", "chat"]),
    "columns of a format": lambda folder: _rows(folder).with_format("numpy", COLUMNS),
    "tensors": lambda folder: _rows(folder).with_format("torch", COLUMNS),
    "shuffled": lambda folder: _rows(folder).shuffle(seed=1).select(range(3, 40)),
    "a transform": lambda folder: _rows(folder).with_transform(_noted),
    "two datasets": lambda folder: library("datasets").concatenate_datasets(
        [_rows(folder), _rows(folder).select([5, 4, 3])]
    ),
    "a subset": lambda folder: Subset(_rows(folder), [*range(30), *range(9)]),
    "held": Held,
    "safetensors": lambda folder: TensorDataset(*_tensors(folder).values()),
    "safetensors, kept open": OneByOne,
}


@needs_fuse
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", MAPPED)
def test_what_libraries_map_is_read_in_the_order_of_the_epoch(
    name: str, workers: int, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    theirs = MAPPED[name](tmp_path / "data")
    with slow_pages(tmp_path / "data", tmp_path / "mount") as fs:
        ours = MAPPED[name](tmp_path / "mount")
        more: Any = {"batch_size": 2, "collate_fn": list, "num_workers": workers}
        check_read_ahead(fs, ours, theirs, first=6 if name == "held" else 1, **more)
        del ours
        gc.collect()
