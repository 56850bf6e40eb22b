"""Every dataset against a plain oracle: torchvision, numpy, open().read(), torch's DataLoader."""

from __future__ import annotations

import functools
import http.server
import operator
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from glob import glob as globbed
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

import creel
from creel.errors import ConfigError, CreelError, NotFoundError
from creel.loader.datasets import (
    FileDataset,
    ImageFolder,
    RecordDataset,
    TarDataset,
    Transformed,
)
from creel.loader.datasets.base import Labels, addresses
from creel.loader.reading import storage
from creel.loader.reading.storage import absolute, in_threads
from folders import folder
from kit import forget_stores
from testbed.same import same

pytestmark = pytest.mark.timeout(120)


def image(path: Path, seed: int, mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 9, 3), np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three classes: nested, oddly sorting and hidden folders, modes, cases, files to skip."""
    root = tmp_path / "photos"
    names = (
        "cat/b.png cat/a.PNG cat/z/1.png cat/z-1/2.png cat/z/y/3.jpeg dog/1.jpg dog/10.jpg "
        "dog/2.bmp dog/.hidden.png Emu/ü ñ.png Emu/50%.png"
    ).replace("ü ñ", "ü_ñ")
    for i, name in enumerate(names.split()):
        image(root / name, i, "L" if i % 3 == 0 else "P" if name.endswith(".bmp") else "RGB")
    (root / "cat/readme.txt").write_text("no image")
    (root / "loose.png").write_bytes(b"not in a class")
    (root / "dog/link").symlink_to(root / "cat/z", target_is_directory=True)
    return root


def pixels(sample: tuple[Any, int]) -> tuple[Any, int]:
    return sample[0].mode, sample[0].size, sample[0].tobytes(), sample[1]  # type: ignore[return-value]


def to_tensor(picture: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(picture))


def check_in_torch(dataset: Dataset[Any]) -> None:
    """The same batches with no worker and with two forked ones; tests/system spawns them."""
    indices = list(range(len(dataset)))  # type: ignore[arg-type]
    expected = [default_collate([dataset[i] for i in indices[k : k + 3]]) for k in indices[::3]]
    assert same(list(DataLoader(dataset, 3)), expected)
    loader = DataLoader(dataset, 3, num_workers=2, multiprocessing_context="fork")
    assert same(list(loader), expected)


# --- ImageFolder ------------------------------------------------------------------------------


def test_an_image_folder_is_torchvisions(photos: Path) -> None:
    ours, theirs = ImageFolder(photos), folder.ImageFolder(photos)
    assert ours.samples == theirs.samples
    assert list(ours.samples) == theirs.samples
    assert ours.samples[2] == theirs.samples[2]
    assert ours.samples[-1] == theirs.samples[-1]
    assert ours.samples[1:4] == theirs.samples[1:4]
    assert ours.imgs == theirs.imgs
    for name in ("classes", "class_to_idx", "targets", "extensions", "root"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert len(ours) == len(theirs)
    for i in range(-len(theirs), len(theirs)):
        assert pixels(ours[i]) == pixels(theirs[i])


@pytest.mark.parametrize("form", ["{}", "{}/", "{}//", "relative", "~/photos"])
def test_paths_are_shown_as_torchvision_shows_them(
    photos: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(photos.parent))
    monkeypatch.chdir(photos.parent)
    root = photos.name if form == "relative" else form.format(photos)
    ours, theirs = ImageFolder(root), folder.ImageFolder(root)
    assert ours.samples == theirs.samples
    assert ours.root == theirs.root
    monkeypatch.chdir("/")
    assert ours.manifest.uri(0) == str(photos / "Emu/50%.png")
    assert pixels(ours[0])[0] == "RGB"  # a later chdir does no harm


def test_valid_files_and_empty_classes_are_torchvisions(photos: Path) -> None:
    def valid(path: str) -> bool:
        return path.endswith("1.png") or "Emu" in path

    args = {"is_valid_file": valid, "allow_empty": True}
    ours, theirs = ImageFolder(photos, **args), folder.ImageFolder(photos, **args)  # type: ignore[arg-type]
    assert ours.samples == theirs.samples
    assert ours.extensions is None


class _Two(folder.ImageFolder):  # type: ignore[misc]
    def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:  # noqa: ARG002
        return ["dog", "cat"], {"dog": 0, "cat": 5}


class _OurTwo(ImageFolder):
    def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:  # noqa: ARG002
        return ["dog", "cat"], {"dog": 0, "cat": 5}


def test_a_subclass_may_choose_classes(photos: Path) -> None:
    assert _OurTwo(photos).samples == _Two(photos).samples


def test_transforms_loader_and_decode(photos: Path) -> None:
    def loader(path: str) -> int:
        return Path(path).stat().st_size

    args = {"transform": lambda s: s + 1, "target_transform": str, "loader": loader}
    ours, theirs = ImageFolder(photos, **args), folder.ImageFolder(photos, **args)  # type: ignore[arg-type]
    assert [ours[i] for i in range(len(ours))] == [theirs[i] for i in range(len(theirs))]
    assert not ours.cacheable
    assert ImageFolder(photos, decode=len)[0] == ((photos / "Emu/50%.png").stat().st_size, 0)
    with pytest.raises(ConfigError, match="not both"):
        ImageFolder(photos, loader=loader, decode=len)


def test_samples_may_be_assigned_as_in_torchvision(photos: Path) -> None:
    ours, theirs = ImageFolder(photos), folder.ImageFolder(photos)
    ours.samples = theirs.samples = theirs.samples[::3]
    ours.manifest  # noqa: B018 - built before the next change, then stale
    ours.samples = ours.samples[1:]
    assert ours.samples == theirs.samples[1:]
    assert [pixels(ours[i]) for i in range(len(ours))] == [
        pixels(theirs[i + 1]) for i in range(len(ours))
    ]
    assert len(ours.manifest) == len(ours)
    again = pickle.loads(pickle.dumps(ours))
    assert again.samples == ours.samples
    with pytest.raises(ConfigError, match="path, number of the class"):
        ours.samples = [("a", "b", "c")]  # type: ignore[list-item]


@pytest.mark.parametrize("make", [ImageFolder, folder.ImageFolder])
def test_errors_of_a_folder_are_torchvisions(tmp_path: Path, make: Callable[..., object]) -> None:
    with pytest.raises(FileNotFoundError):
        make(tmp_path / "nowhere")
    (tmp_path / "a").mkdir()
    with pytest.raises(FileNotFoundError, match="Couldn't find any class folder in"):
        make(tmp_path / "a")
    (tmp_path / "a/x").mkdir()
    (tmp_path / "a/w").mkdir()
    with pytest.raises(FileNotFoundError) as e:
        make(tmp_path / "a")
    assert str(e.value) == (
        "Found no valid file for the classes w, x. Supported extensions are: "
        ".jpg, .jpeg, .png, .ppm, .bmp, .pgm, .tif, .tiff, .webp"
    )
    assert make is not ImageFolder or isinstance(e.value, ConfigError)


def test_an_image_folder_in_torchs_loader(photos: Path) -> None:
    check_in_torch(ImageFolder(photos, transform=to_tensor))


def test_an_image_that_vanished_is_a_source_error_with_its_path(photos: Path) -> None:
    images = ImageFolder(photos)
    (photos / "Emu/50%.png").unlink()
    with pytest.raises(OSError, match=r"50%\.png") as e:
        images[0]
    assert isinstance(e.value, CreelError)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors take notes since 3.11")
@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_cannot_be_decoded_is_named(photos: Path, workers: int) -> None:
    (photos / "Emu/50%.png").write_bytes(b"no image")
    batches: Any = iter(DataLoader(ImageFolder(photos, transform=to_tensor), num_workers=workers))
    with pytest.raises(OSError, match="cannot identify image file") as e:
        list(batches)
    list(batches)  # torch's iterator waits 5 s for workers of an epoch that was left
    told = [str(e.value), *getattr(e.value, "__notes__", [])]
    assert f"while decoding {photos}/Emu/50%.png (object 0 of ImageFolder)" in "\n".join(told)


def test_an_empty_path_is_not_the_working_directory() -> None:
    makers: list[Callable[[str], object]] = [ImageFolder, FileDataset, TarDataset]
    for make in (*makers, creel.open, creel.read):
        with pytest.raises(NotFoundError, match="the path is empty"):
            make("")


def test_a_scheme_alone_and_a_folder_for_a_file_are_said_to_be_that(tmp_path: Path) -> None:
    makers: list[Callable[[str], object]] = [ImageFolder, FileDataset, TarDataset]
    for make in (*makers, creel.open, creel.read):
        with pytest.raises(NotFoundError, match=r"s3:/* lacks a bucket or host: write s3://"):
            make("s3://")
    for file in (TarDataset, lambda path: RecordDataset(path, "uint8", 4)):
        with pytest.raises(NotFoundError, match="is a folder: give the files in it, as a list"):
            file(str(tmp_path))


FOLDER = str(Path(__file__).parent)


@pytest.mark.parametrize(
    "make, first, given, says",
    [
        (FileDataset, ["x"], {"nbytes": ["a"]}, "nbytes are whole numbers"),
        (FileDataset, ["x"], {"nbytes": [1.5]}, "nbytes are whole numbers"),
        (FileDataset, FOLDER, {"glob": 5}, "glob is a pattern of names"),
        (FileDataset, ["x"], {"decode": 5}, "decode is a function of one argument, not 5"),
        (ImageFolder, FOLDER, {"decode": 5}, "decode is a function of one argument, not 5"),
        (RecordDataset, __file__, {"dtype": "u1", "shape": 1, "transform": 5}, "transform is a f"),
        (TarDataset, "x", {"decode": 5}, "decode is a function for each extension"),
        (TarDataset, "x", {"decode": {"png": 5}}, "decode of png is a function"),
        (TarDataset, "x", {"extensions": "jpg"}, r"as in extensions=\['jpg'\]"),
        (TarDataset, "x", {"index": 5}, "index is 'beside', 'user' or a path"),
        (TarDataset, [5], {}, "a path is a string or a Path, not 5"),
    ],
)
def test_what_is_of_the_wrong_kind_is_named(
    make: Callable[..., object], first: object, given: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        make(first, **given)


def test_pickles_are_as_big_as_the_paths(tmp_path: Path) -> None:
    n, root = 20_000, tmp_path / "many"
    (root / "a").mkdir(parents=True)
    for i in range(200):
        (root / f"a/{i:030d}.png").touch()
    images = ImageFolder(root)
    images.samples = [(f"/data/{i:030d}.png", i % 1000) for i in range(n)]
    files = FileDataset([p for p, _ in images.samples], labels=list(range(n)))
    for dataset in (images, files):
        dataset.manifest  # noqa: B018 - built, and left out
        assert len(pickle.dumps(dataset)) < n * (len("/data/.png") + 30 + 8 + 8) + 4096
    _ = images.targets, images.imgs
    assert len(pickle.dumps(images)) < n * (len("/data/.png") + 30 + 8 + 8) + 4096
    assert pickle.loads(pickle.dumps(images)).targets == images.targets


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    """A web server of tmp_path that lists folders."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("index", ["none", "index.json", "index.arrow", "named", "list"])
def test_a_folder_over_http_is_the_local_one(photos: Path, web: str, index: str) -> None:
    local = ImageFolder(photos)
    if index in {"index.json", "index.arrow", "named"}:
        name = "other.json" if index == "named" else index
        local.save_index(photos / name)
    elif index == "list":
        names = ", ".join(f'"{os.path.relpath(p, photos)}"' for p, _ in local.samples)
        (photos / "index.json").write_text(f"[{names}]")
    other = f"{web}/photos/other.json" if index == "named" else None
    remote = ImageFolder(f"{web}/photos", index=other)
    assert remote.classes == local.classes
    assert remote.targets == local.targets
    for i in range(len(local)):
        assert pixels(remote[i]) == pixels(local[i])
    assert remote.samples[0][0] == f"{web}/photos/Emu/50%25.png"


def test_a_folder_by_file_uri_and_by_fsspec(photos: Path) -> None:
    local = ImageFolder(photos)
    assert ImageFolder(photos.as_uri()).samples == local.samples
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    for path, _ in local.samples:
        memory.pipe_file(f"/m/{os.path.relpath(path, photos)}", Path(path).read_bytes())
    remote = ImageFolder("memory://m")
    assert remote.targets == local.targets
    assert [pixels(remote[i]) for i in range(3)] == [pixels(local[i]) for i in range(3)]
    assert remote.manifest.lengths().min() > 0  # what a listing tells for free is kept


@pytest.mark.parametrize(
    "text", ["{}", '["/etc/passwd"]', '["a/../../b"]', '{"names": ["a"], "nbytes": []}', "\xff"]
)
def test_a_bad_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "index.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"index\.json"):
        ImageFolder(tmp_path, index=tmp_path / "index.json")


# --- FileDataset ------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    rng = np.random.default_rng(3)
    paths = [tmp_path / "files" / name for name in ("b.bin", "a.bin", "s/c.bin", "s/.d.bin", "e")]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(rng.bytes(12))
    return paths


def test_raw_files_are_their_bytes(files: list[Path]) -> None:
    dataset = FileDataset(files)
    for i, path in enumerate(files):
        assert bytes(dataset[i].numpy()) == path.read_bytes()
        assert dataset[i].dtype == torch.uint8
        assert dataset.read(i) == path.read_bytes()
    dataset[0].fill_(0)  # its own memory
    assert bytes(dataset[-5].numpy()) == files[0].read_bytes()
    with pytest.raises(IndexError):
        dataset[5]
    check_in_torch(dataset)


@pytest.mark.parametrize("glob", ["**/*", "*.bin", "**/*.bin", "s/*", "?.bin", "[ab].bin", "e"])
def test_a_root_and_a_glob_are_the_glob_module(files: list[Path], glob: str) -> None:
    root = files[0].parent
    found = sorted(globbed(glob, root_dir=root, recursive=True))  # noqa: PTH207 - the oracle
    expected = [str(root / name) for name in found if (root / name).is_file()]
    assert list(FileDataset(root, glob).paths) == expected


def test_decode_labels_and_transform(files: list[Path]) -> None:
    dataset = FileDataset(files, decode=len, labels=list("vwxyz"), transform=lambda n: -n)
    assert [dataset[i] for i in range(5)] == [(-12, c) for c in "vwxyz"]
    check_in_torch(dataset)


def test_an_empty_file_is_an_empty_tensor(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    assert FileDataset([tmp_path / "x"])[0].shape == (0,)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda _: FileDataset([]), "at least one file"),
        (lambda p: FileDataset(p / "nowhere"), "there is no folder"),
        (lambda p: FileDataset(p, "*.none"), "matches"),
        (
            lambda _: FileDataset([3]),  # type: ignore[list-item]
            "a string or a Path",
        ),
        (lambda p: FileDataset([p], labels=[1, 2]), "2 labels for 1 samples"),
        (lambda p: FileDataset([p], labels=7), "a sequence"),
        (lambda p: FileDataset([p], nbytes=[-5]), "cannot have -5 bytes"),
        (lambda p: FileDataset([p], nbytes=[1, 2]), "for 1 files"),
        (lambda p: FileDataset([p / "gone"], nbytes=True), "there is no file"),
        (lambda _: FileDataset(["\udcff"]), "UTF-8"),
        (lambda p: RecordDataset(p / "gone", "f4", 3), "there is no file"),
        (lambda p: RecordDataset(p / "b10", "f4", 3), "not a multiple of the record size, 12"),
        (lambda p: RecordDataset(p / "b10", "u1", 5, offset=-1), "offset is -1"),
        (lambda p: RecordDataset(p / "b10", "u1", 5, offset=11), "fewer than the offset"),
        (lambda p: RecordDataset(p / "b10", "u1", 5, offset=10), "no records"),
        (lambda p: RecordDataset(p / "b10", "u1", (5, 0)), "at least one item"),
        (lambda p: RecordDataset(p / "b10", "u1", -2), "at least one item"),
        (lambda p: RecordDataset(p / "b10", "U4", 2), "torch has no dtype"),
        (lambda p: RecordDataset(p / "b10", ">f4", 2), "torch has no dtype"),
        (lambda p: RecordDataset(p / "b10", "float33", 2), "torch has no dtype"),
        (lambda p: RecordDataset(p / "b10", None, 2), "give dtype="),
        (lambda p: RecordDataset(p / "b10", "u1"), "give shape="),
        (lambda _: RecordDataset([], "u1", 2), "at least one file"),
        (lambda p: RecordDataset(p / "b10", "u1", 5, labels=[1]), "1 labels for 2 samples"),
        (lambda p: RecordDataset(p / "f.npy"), "Fortran order"),
        (lambda p: RecordDataset(p / "o.npy"), "torch has no dtype"),
        (lambda p: RecordDataset(p / "one.npy"), "give shape="),
        (lambda p: RecordDataset(p / "one.npy", shape=4), "not a whole number of records"),
        (lambda p: RecordDataset(p / "two.npy", dtype="f4"), "holds torch.int64, not"),
        (lambda p: RecordDataset([p / "two.npy", p / "three.npy"]), "holds records of"),
        (lambda p: RecordDataset(p / "bad.npy"), "is not a .npy"),
        (lambda p: RecordDataset(p / "cut.npy"), "before its header says"),
        (lambda p: RecordDataset(p / "torn.npy"), "damaged"),
    ],
)
def test_bad_input_gives_one_clear_sentence(
    tmp_path: Path, make: Callable[[Path], object], words: str
) -> None:
    (tmp_path / "b10").write_bytes(bytes(10))
    np.save(tmp_path / "f.npy", np.asfortranarray(np.ones((3, 4))))
    np.save(tmp_path / "o.npy", np.array([{}, {}]), allow_pickle=True)
    np.save(tmp_path / "one.npy", np.arange(10))
    np.save(tmp_path / "two.npy", np.ones((3, 4), np.int64))
    np.save(tmp_path / "three.npy", np.ones((3, 5), np.int64))
    (tmp_path / "bad.npy").write_bytes(b"nothing of the kind")
    whole = (tmp_path / "two.npy").read_bytes()
    (tmp_path / "cut.npy").write_bytes(whole[:-1])
    (tmp_path / "torn.npy").write_bytes(whole.replace(b"'descr'", b"'descx'"))
    with pytest.raises(ConfigError, match=words) as e:
        make(tmp_path)
    assert "\n" not in str(e.value)


# --- RecordDataset ----------------------------------------------------------------------------


DTYPES = ["f4", "f8", "f2", "i8", "i4", "i2", "i1", "u1", "u2", "?", "c8"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3)])
def test_records_are_rows_of_the_file(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    rows = np.random.default_rng(0).integers(0, 2, (7, *shape)).astype(dtype)
    (tmp_path / "r.bin").write_bytes(b"head" + rows.tobytes())
    dataset = RecordDataset(tmp_path / "r.bin", dtype, shape, offset=4)
    assert len(dataset) == 7
    for i in range(-7, 7):
        assert same(dataset[i], torch.from_numpy(rows.copy())[i])
    with pytest.raises(IndexError):
        dataset[7]


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_npy_files_are_np_load(tmp_path: Path, version: tuple[int, int]) -> None:
    rows = np.random.default_rng(0).standard_normal((9, 4, 2))
    with (tmp_path / "a.npy").open("wb") as f:
        np.lib.format.write_array(f, rows[:5], version)
    np.save(tmp_path / "b.npy", rows[5:])
    dataset = RecordDataset([tmp_path / "a.npy", tmp_path / "b.npy"])
    assert dataset.shape == (4, 2)
    assert same(torch.stack([dataset[i] for i in range(9)]), torch.from_numpy(rows))
    check_in_torch(dataset)


def test_a_row_of_tokens_is_cut_into_sequences(tmp_path: Path) -> None:
    tokens = np.arange(24, dtype=np.uint16)
    np.save(tmp_path / "t.npy", tokens)
    dataset = RecordDataset(tmp_path / "t.npy", shape=np.int64(8))
    assert [row.tolist() for row in map(dataset.__getitem__, range(3))] == tokens.reshape(
        3, 8
    ).tolist()


def test_bfloat16_records(tmp_path: Path) -> None:
    rows = torch.randn(4, 6).to(torch.bfloat16)
    (tmp_path / "r").write_bytes(rows.view(torch.int16).numpy().tobytes())
    for dtype in ("bfloat16", torch.bfloat16):
        dataset = RecordDataset(tmp_path / "r", dtype, 6)
        assert same(torch.stack([dataset[i] for i in range(4)]), rows)
    np.save(tmp_path / "r.npy", rows.view(torch.int16).numpy().view("V2"))
    assert same(RecordDataset(tmp_path / "r.npy", torch.bfloat16)[2], rows[2])


def test_records_with_labels_and_transform(tmp_path: Path) -> None:
    np.arange(12, dtype="f4").tofile(tmp_path / "r")
    labels = torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.int16)
    dataset = RecordDataset(tmp_path / "r", "f4", 4, labels=labels, transform=operator.neg)
    assert same(dataset[1], (-torch.arange(4.0, 8.0), labels[1]))
    dataset[1][1].fill_(0)
    assert same(dataset[1][1], labels[1])
    check_in_torch(dataset)


@pytest.mark.parametrize(
    "values",
    [
        [3, 1, 2],
        [True, False, True],
        [0.5, 1.5, 2.5],
        np.array([3, 1, 2], np.int16),
        np.array([0.5, 1, 2], np.float32),
        np.arange(6).reshape(3, 2),
        torch.tensor([1.0, 2, 3], dtype=torch.bfloat16),
        torch.arange(6).reshape(3, 2),
        (1, 2, 3),
    ],
    ids=str,
)
def test_labels_collate_as_torch_would(values: Any) -> None:
    labels = Labels(values, 3)
    at = np.array([2, 0, 0, 1])
    assert labels.kind is not None
    assert same(default_collate([labels[i] for i in at]), default_collate([values[i] for i in at]))
    assert same(labels.collated(at), default_collate([values[i] for i in at]))


@pytest.mark.parametrize("values", [["a", "b"], [(1, 2), (3, 4)], [1, 2.5], [2**70, 1]], ids=str)
def test_other_labels_are_kept_as_they_are(values: list[Any]) -> None:
    labels = Labels(values, 2)
    assert labels.kind is None
    assert [labels[0], labels[1]] == values
    assert [type(labels[0]), type(labels[1])] == [type(v) for v in values]


# --- open, read, wrap, Transformed -------------------------------------------------------------


def test_open_and_read_are_the_file(files: list[Path]) -> None:
    data = files[0].read_bytes()
    assert creel.read(files[0]) == data
    assert creel.read(files[0].as_uri()) == data
    with creel.open(files[0]) as f:
        f.fileno()
        assert f.read() == data
    with pytest.raises(ConfigError, match="'rb'"):
        creel.open(files[0], "w")
    for call in (creel.open, creel.read):
        with pytest.raises(FileNotFoundError):
            call("/nowhere/at/all")


def test_open_over_http_is_in_memory(files: list[Path], web: str) -> None:
    with creel.open(f"{web}/files/a.bin") as f:
        f.seek(3)
        assert f.read() == files[1].read_bytes()[3:]
    with pytest.raises(OSError, match="gone"):
        creel.read(f"{web}/files/gone")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("first", ["read", "size"])
def test_the_first_read_of_a_process_may_be_far(
    files: list[Path], web: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No loader has told its settings by then: they are found while a store is opened."""
    forget_stores(monkeypatch)
    address = f"{web}/files/a.bin"
    if first == "read":
        assert creel.read(address) == files[1].read_bytes()
    else:
        assert storage.nbytes_of(address) == len(files[1].read_bytes())


class _Squares(Dataset[int]):
    scale = 1

    def __len__(self) -> int:
        return 7

    def __getitem__(self, i: int) -> int:
        return i * i * self.scale


class _Many(_Squares):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [-i for i in indices]


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(())


@pytest.mark.parametrize("make", [_Squares, _Many])
def test_a_wrapped_dataset_is_the_dataset(make: type[_Squares]) -> None:
    dataset = make()
    proxy = creel.wrap(dataset)
    assert isinstance(proxy, make)
    assert len(proxy) == 7
    assert proxy[3] == 9
    proxy.scale = 2
    assert dataset.scale == proxy.scale == 2
    assert not hasattr(proxy, "nothing")
    assert same(list(DataLoader(proxy, 3)), list(DataLoader(dataset, 3)))
    loader = DataLoader(proxy, 3, num_workers=2, multiprocessing_context="fork")
    assert same(list(loader), list(DataLoader(dataset, 3)))
    again = pickle.loads(pickle.dumps(proxy))
    assert type(again) is type(proxy)
    assert again.scale == 2


def test_wrap_refuses_what_has_no_samples() -> None:
    for thing in (3, _Stream()):
        with pytest.raises(ConfigError, match=r"map-style|takes a dataset"):
            creel.wrap(thing)


def test_transformed_is_map(files: list[Path]) -> None:
    dataset = Transformed(FileDataset(files), torch.sum)
    assert same([dataset[i] for i in range(5)], [torch.sum(dataset.dataset[i]) for i in range(5)])
    check_in_torch(dataset)
    assert next(iter(DataLoader(Transformed(_Many(), abs), 7))).tolist() == list(range(7))


def test_names_of_the_package_are_lazy() -> None:
    import subprocess
    import sys

    code = (
        "import creel, sys; dir(creel); assert 'torch' not in sys.modules; "
        "assert {'open', 'wrap', 'ImageFolder'} <= set(dir(creel)); "
        "assert creel.read.__module__ == 'creel.loader.reading.opened'; "
        "assert not {'torch', 'torchvision', 'PIL', 'fsspec'} & set(sys.modules); "
        "creel.datasets.Transformed; assert not {'torchvision', 'PIL'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_not_found_is_both() -> None:
    error = pickle.loads(pickle.dumps(NotFoundError("there is no x")))
    assert isinstance(error, FileNotFoundError)
    assert isinstance(error, ConfigError)
    assert str(error) == "there is no x"


@pytest.mark.parametrize(
    "make",
    [
        lambda: creel.ImageFolder(3),  # type: ignore[arg-type]
        lambda: creel.FileDataset(3),  # type: ignore[arg-type]
        lambda: creel.RecordDataset(3, torch.uint8, 1),  # type: ignore[arg-type]
        lambda: creel.TarDataset(3),  # type: ignore[arg-type]
        lambda: creel.read(3),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_path_is_refused_in_words(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match=r"path.*not 3"):
        make()


def test_an_npy_says_itself_where_its_rows_begin(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.arange(6).reshape(3, 2))
    with pytest.raises(ConfigError, match=r"rows\.npy has a header that says where its rows begin"):
        RecordDataset(tmp_path / "rows.npy", offset=8)


def test_a_shape_or_offset_that_is_no_number_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "r").write_bytes(bytes(16))
    with pytest.raises(ConfigError, match="shape is '8': give whole numbers"):
        creel.RecordDataset(tmp_path / "r", torch.uint8, "8")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="offset is '4': give the bytes before"):
        creel.RecordDataset(tmp_path / "r", torch.uint8, 8, "4")  # type: ignore[arg-type]


@given(st.lists(st.sampled_from(["/", ".", "..", "~", "a", "b c", ".x", "é"]), min_size=1))
def test_a_local_address_is_an_absolute_path(parts: list[str]) -> None:
    """As `abspath` gives it, but for `..`, which only the file system can follow."""
    text = os.path.expanduser("".join(parts))  # noqa: PTH111
    steps = [step for step in Path.cwd().joinpath(text).parts if step.strip("/")]
    assert absolute("".join(parts)) == "/" + "/".join(steps)
    if ".." not in steps:
        assert absolute("".join(parts)) == os.path.abspath(text).replace("//", "/")  # noqa: PTH100


_ADDRESSES = st.one_of(
    st.text(alphabet="/.aé:~", min_size=1, max_size=8),
    st.sampled_from(["/a/b.jpg", "s3://bucket/a", "file:///a%20b", "/a", "/a/.hidden"]),
    st.just("/a/b").map(Path),
)


@given(st.lists(_ADDRESSES, max_size=4))
def test_many_addresses_are_made_absolute_as_each_is(values: list[str | Path]) -> None:
    try:
        each = [absolute(value) for value in values]
    except CreelError as e:
        with pytest.raises(type(e)):
            addresses(values)
    else:
        assert addresses(values).to_pylist() == each


@pytest.fixture(params=["absolute", "relative"])
def behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A folder behind a symbolic link, left by `..`: where a simpler path leads elsewhere."""
    for data, text in (("far/data/cat", b"right!!!"), ("data/cat", b"wrong!!!")):
        (tmp_path / data).mkdir(parents=True)
        (tmp_path / data / "a.jpg").write_bytes(text)
    (tmp_path / "far/inner").mkdir()
    (tmp_path / "link").symlink_to("far/inner")
    monkeypatch.chdir(tmp_path)
    return f"{tmp_path}/link/../data" if request.param == "absolute" else "./link//../data/"


def test_dots_behind_a_symbolic_link_lead_where_open_goes(behind: str) -> None:
    with open(f"{behind}/cat/a.jpg", "rb") as f:  # noqa: PTH123
        wanted = f.read()
    assert wanted == b"right!!!"
    path = f"{behind}/cat/a.jpg"
    assert creel.read(path) == wanted
    with creel.open(path) as real:
        assert real.read() == wanted
    files = FileDataset(behind, "**/*.jpg")
    assert "link" in files.paths[0]
    datasets = [
        files,
        FileDataset([path], nbytes=True),
        RecordDataset(path, torch.uint8, 8),
        creel.ImageFolder(behind, loader=lambda p: Path(p).read_bytes()),
        creel.ImageFolder(behind, decode=bytes),
    ]
    for dataset in datasets:
        sample = dataset[0]
        assert bytes(sample[0] if isinstance(sample, tuple) else sample) == wanted


def test_a_listing_needs_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none can be started, the caller does it alone."""

    def scarce(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", scarce)
    assert in_threads(str, [3, 1, 2]) == ["3", "1", "2"]
