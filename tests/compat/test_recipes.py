"""The code of docs/recipes runs as it stands there, and its batches are torch's.

`make frameworks` has the libraries that the other tests lack; there a missing one of `IN_CI` fails.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import socket
import subprocess
import sys
import tarfile
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import creel
from creel.counters import CAUSES
from testbed.s3_server import KEY, S3, SECRET
from testbed.same import same

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore"),  # the libraries' own warnings
    pytest.mark.usefixtures("served"),
]

RECIPES = Path(__file__).parents[2] / "docs/recipes"
N = 12
IN_CI = {
    "accelerate",
    "av",
    "datasets",
    "h5py",
    "lightning",
    "pydicom",
    "tensorboard",
    "transformers",
    "zarr",
}


def library(name: str) -> Any:
    """Import a module; without it the test is skipped, or fails if CI should have it."""
    if name in IN_CI and os.environ.get("FRAMEWORKS") == "required":
        return importlib.import_module(name)
    try:
        return importlib.import_module(name)
    except ImportError as e:
        pytest.skip(f"{name}: {e}")


def blocks(page: str) -> list[str]:
    """Return the Python of a recipe, block by block."""
    text = (RECIPES / page).read_text()
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


# --- data, in the working directory ---------------------------------------------------------------


def row(i: int) -> Any:
    return np.random.default_rng(i).integers(0, 255, 8).astype(np.int64)


def picture(i: int) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(i).integers(0, 255, (8, 8, 3)).astype("uint8")
    library("PIL.Image").fromarray(pixels).save(file, "jpeg")
    return file.getvalue()


def folder(name: str) -> Path:
    path = Path(name)
    path.mkdir(parents=True)
    return path


def images() -> None:
    for kind in ("cat", "dog"):
        path = folder(f"train/{kind}")
        for i in range(N // 2):
            (path / f"{i}.jpg").write_bytes(picture(i + len(kind)))


def shards() -> None:
    for shard in range(2):
        with tarfile.open(f"train-{shard}.tar", "w") as tar:
            for i in range(N // 2):
                for suffix, data in (("jpg", picture(i)), ("cls", b"%d" % i)):
                    member = tarfile.TarInfo(f"{i:04d}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


def rows_of_datasets() -> None:
    rows = {"x": [row(i).tolist() for i in range(N)]}
    library("datasets").Dataset.from_dict(rows).save_to_disk("rows")


def tables() -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"x": np.concatenate([row(i) for i in range(N)])}), "rows.parquet", 8)
    path = folder("tables")
    for i in range(N):
        pq.write_table(pa.table({"x": row(i)}), path / f"{i}.parquet")


def hdf5() -> None:
    with library("h5py").File("rows.h5", "w") as file:
        file["x"] = np.stack([row(i) for i in range(N)])
    path = folder("files")
    for i in range(N):
        with library("h5py").File(path / f"{i}.h5", "w") as file:
            file["x"] = row(i)


def zarr_rows() -> None:
    array = library("zarr").create_array("rows.zarr", shape=(N, 8), chunks=(2, 8), dtype="i8")
    array[:] = np.stack([row(i) for i in range(N)])


def tokens() -> None:
    np.concatenate([row(i) for i in range(N)]).astype("uint16").tofile("train.bin")


def sounds() -> None:
    path = folder("sounds")
    for i in range(N):
        with wave.open(str(path / f"{i}.wav"), "wb") as sound:
            sound.setparams((1, 2, 8000, 0, "NONE", ""))
            sound.writeframes(row(i).astype("int16").tobytes())


def clips() -> None:
    av = library("av")
    path = folder("clips")
    for i in range(4):
        with av.open(str(path / f"{i}.mkv"), "w") as video:
            stream = video.add_stream("ffv1", rate=10)
            stream.width = stream.height = 32
            for k in range(3):
                pixels = np.full((32, 32, 3), 20 * i + k, "uint8")
                video.mux(stream.encode(av.VideoFrame.from_ndarray(pixels)))
            video.mux(stream.encode())


def slices() -> None:
    pydicom = library("pydicom")
    meta = pydicom.dataset.FileMetaDataset()
    meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    path = folder("slices")
    for i in range(N):
        data = pydicom.dataset.FileDataset(str(i), {}, file_meta=meta, preamble=bytes(128))
        data.PixelData = bytes([i]) * 64
        data["PixelData"].VR = "OW"
        data.save_as(path / f"{i}.dcm", enforce_file_format=False)


def digits() -> None:
    path = folder("digits")
    for i in range(N):
        np.save(path / f"{i}.npy", row(i).astype("float32"))


# --- what the pages take as given -----------------------------------------------------------------


class Files(Dataset[Any]):
    """A dataset of a person, over the .npy files of a folder."""

    def __init__(self, path: str) -> None:
        self.paths = sorted(str(file) for file in Path(path).glob("*.npy"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(np.load(self.paths[index]))


def given(**more: Any) -> dict[str, Any]:
    """Return what a page's code takes from a person, who has a dataset."""
    return {"Files": Files, "__name__": __name__, **more}


def plain() -> Any:
    """Return `creel` without what creel does: torch's loader, and datasets as they are."""
    same_dataset = {"wrap": lambda data, **_: data, "kept": lambda data, *_, **__: data}
    names = {name: getattr(creel, name) for name in creel.__all__} | same_dataset
    return SimpleNamespace(**names | {"DataLoader": DataLoader})


def loaders(page: str, of: Any, edits: dict[str, str] | None = None) -> Iterator[Any]:
    """Yield the loader of each block of a page, run with `of` in the place of `creel`."""
    names = given(creel=of)
    codes = "\0".join(blocks(page))
    for needed in re.findall(r"^import (\S+)$", codes, re.MULTILINE):
        library(needed)
    for words, others in ({"import creel\n": ""} | (edits or {})).items():
        codes = codes.replace(words, others)
    for code in codes.split("\0"):
        names.pop("loader", None)
        exec(code, names)
        if "loader" in names:
            yield names["loader"]


def epochs(loader: Any) -> list[Any]:
    """Return the batches of three epochs: recorded, read ahead, from memory."""
    torch.manual_seed(3)
    return [list(loader) for _ in range(3)]


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """The objects of s3.md, on a server that the environment names."""
    for i in range(N):
        path = tmp_path / f"bucket/train/{i}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(row(i).tobytes())
    with S3(tmp_path) as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        yield server


DATA: dict[str, Callable[[], None]] = {
    "images.md": images,
    "webdataset.md": shards,
    "hf-datasets.md": rows_of_datasets,
    "parquet.md": tables,
    "hdf5.md": hdf5,
    "zarr.md": zarr_rows,
    "tokens.md": tokens,
    "audio.md": sounds,
    "video.md": clips,
    "medical.md": slices,
}


@pytest.mark.parametrize("page", DATA)
def test_the_batches_of_a_recipe_are_torchs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    DATA[page]()
    check(page)


def test_the_objects_of_a_bucket_are_read_as_the_recipe_says(bucket: S3) -> None:
    own = {"http://minio:9000": bucket.env["AWS_ENDPOINT_URL"]}
    own |= {'"key": "..."': f'"key": "{KEY}"', '"secret": "..."': f'"secret": "{SECRET}"'}
    check("s3.md", own)


def check(page: str, edits: dict[str, str] | None = None) -> None:
    """Compare the batches of a page's loaders with torch's over the same data."""
    pairs = zip(loaders(page, creel, edits), loaders(page, plain(), edits), strict=True)
    tried = 0
    for ours, theirs in pairs:
        assert type(ours) is creel.DataLoader
        assert type(theirs) is DataLoader
        assert same(epochs(ours), epochs(theirs))
        tried += 1
    assert tried > 0


def test_each_recipe_is_tried_and_in_the_list_of_formats() -> None:
    here = {"lightning.md", "accelerate.md", "torchrun.md", "ray.md", "jax.md", *DATA}
    here |= {"s3.md", "slurm.md", "kubernetes.md"}  # the last two: test_slurm.py, test_launchers.py
    assert {path.name for path in RECIPES.glob("*.md")} == here
    index = (RECIPES.parent / "formats.md").read_text()
    assert set(re.findall(r"\]\(recipes/([\w-]+\.md)\)", index)) == here


# --- frameworks ----------------------------------------------------------------------------------


class Seen:
    """What a loader returned, whoever iterated it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches = 0
        begin = creel.DataLoader.__iter__

        def counted(loader: Any) -> Iterator[Any]:
            for batch in begin(loader):
                self.batches += 1
                yield batch

        monkeypatch.setattr(creel.DataLoader, "__iter__", counted)


def test_lightning_trains_with_the_loader_of_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lightning = library("lightning")
    monkeypatch.chdir(tmp_path)
    digits()

    class Model(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def training_step(self, batch: Any) -> Any:
            return self.layer(batch).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.001)

    seen = Seen(monkeypatch)
    (code,) = blocks("lightning.md")
    exec(code, given(Model=Model))
    assert seen.batches == 2 * N // 4


def test_accelerate_and_trainer_keep_the_loader_of_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library("accelerate")
    transformers = library("transformers")
    monkeypatch.chdir(tmp_path)
    digits()
    seen = Seen(monkeypatch)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def forward(self, x: Any) -> dict[str, Any]:
            return {"loss": self.layer(x).mean()}

    class Named(Files):
        def __getitem__(self, index: int) -> Any:
            return {"x": super().__getitem__(index)}

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"),
        num_train_epochs=2,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    names = given(model=Model(), arguments=arguments)
    first, second = blocks("accelerate.md")
    exec(first, names)
    assert len(list(names["loader"])) == N // 4 == seen.batches
    exec(second, names | {"Files": Named})
    assert seen.batches == N // 4 + 2 * N // 4


def test_jax_keras_and_grain_take_what_the_recipe_gives_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    jax, keras, _ = library("jax"), library("keras"), library("grain")
    monkeypatch.chdir(tmp_path)
    digits()
    seen = Seen(monkeypatch)
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss=lambda _, output: keras.ops.mean(output))

    class Twice(Files):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index), torch.ones(1)

    names = given()
    first, second, third = blocks("jax.md")
    exec(first, names)
    assert isinstance(names["total"], jax.Array)
    assert seen.batches == N // 4
    taken = kept_batches(monkeypatch)
    exec(second, names | {"model": model, "data": creel.wrap(Twice("digits"))})
    assert [x.tolist() for x, _ in taken][-2 * N // 4 :] == dealt_by_torch()
    assert seen.batches == N // 4 + 1 + 2 * N // 4, "Keras looks at one, to know its shape"
    exec(third, names)
    epoch = [row.tolist() for row in names["epoch"]]
    assert [batch.tolist() for batch in names["ahead"]] == epoch
    expected = sorted(Files("digits")[i].tolist() for i in range(N))
    assert sorted(row for batch in epoch for row in batch) == expected


def kept_batches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the list to which each batch that Keras takes is added."""
    of = importlib.import_module("creel.integrations.keras").PyDataset
    take, taken = of.__getitem__, []

    def kept(batches: Any, index: int) -> Any:
        taken.append(take(batches, index))
        assert isinstance(taken[-1][0], np.ndarray)
        return taken[-1]

    monkeypatch.setattr(of, "__getitem__", kept)
    return taken


def dealt_by_torch() -> list[Any]:
    """Return the batches of two epochs of torch's loader over a sampler of one rank."""
    data = Files("digits")
    sampler: Any = DistributedSampler(data, 1, 0)
    loader: Any = DataLoader(data, 4, sampler=sampler)
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        epochs += [batch.tolist() for batch in loader]
    return epochs


def test_tensorboard_shows_the_scalars_that_the_page_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = library("tensorboard.backend.event_processing.event_accumulator")
    from torch.utils.tensorboard import SummaryWriter

    monkeypatch.chdir(tmp_path)
    digits()
    (code,) = blocks("../monitoring.md")
    loader = creel.DataLoader(creel.wrap(Files("digits")), 4)
    with SummaryWriter("log") as writer:
        for step in range(2):
            assert len(list(loader)) == N // 4
            exec(code, {"loader": loader, "writer": writer, "step": step})
    shown = read.EventAccumulator("log").Reload()
    assert [scalar.value for scalar in shown.Scalars("creel/batches/all")] == [N // 4, 2 * N // 4]
    assert {f"creel/stall_s/{cause}" for cause in CAUSES} <= set(shown.Tags()["scalars"])
    assert json.loads(json.dumps(loader.stats())) == loader.stats()  # what wandb takes


def test_torchrun_runs_the_program_of_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    digits()
    (code,) = blocks("torchrun.md")
    source = Path(__file__).read_text()
    dataset = source[source.index("class Files") : source.index("\n\ndef given")]
    head = "import numpy as np\nimport torch\nfrom pathlib import Path\nfrom typing import Any\n"
    head += "from torch.utils.data import Dataset\n"
    counted = code.replace("        ...\n", "        print(len(batch))\n")
    Path("train.py").write_text(f"{head}\n{dataset}\n\n{counted}")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port))
    done = subprocess.run(
        [sys.executable, *program, "train.py"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sum(map(int, done.stdout.split())) == 2 * N
