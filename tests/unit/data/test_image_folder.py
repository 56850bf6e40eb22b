"""ImageFolder against torchvision, on disk, over HTTP and by an index."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from creel.cache.storage.manifest import Manifest
from creel.errors import ConfigError, CreelError
from creel.loader.data.datasets import (
    FileDataset,
    ImageFolder,
)
from folders import folder
from testbed.same import check_in_torch

pytestmark = pytest.mark.timeout(120)


def image(path: Path, seed: int, mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 9, 3), np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three classes: nested, oddly sorted and hidden folders, modes, cases, files to skip."""
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


def test_a_local_image_is_read_without_a_table_of_all(photos: Path) -> None:
    """A worker that reads without the daemon would build one in each epoch."""
    data = ImageFolder(photos, decode=bytes)
    path, label = data.samples[3]
    with mock.patch.object(Manifest, "of_runs", side_effect=AssertionError("a table")):
        assert data[3] == (Path(path).read_bytes(), label)
        data.samples = [(path, 7)]
        assert data[0] == (Path(path).read_bytes(), 7)
        with pytest.raises(AssertionError, match="a table"):
            assert data.manifest


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
    assert pixels(ours[0])[0] == "RGB"  # a later chdir has no effect


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
    (tmp_path / "a/1.png").touch()
    with pytest.raises(FileNotFoundError, match="Couldn't find any class folder in") as flat:
        make(tmp_path / "a")
    assert make is not ImageFolder or "creel.FileDataset(folder, decode=...)" in str(flat.value)
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
    list(batches)  # otherwise torch's iterator waits 5 s for its workers
    messages = [str(e.value), *getattr(e.value, "__notes__", [])]
    assert f"while decoding {photos}/Emu/50%.png (object 0 of ImageFolder)" in "\n".join(messages)


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
    assert remote.manifest.lengths().min() > 0  # lengths from the listing are kept


@pytest.mark.parametrize(
    "text", ["{}", '["/etc/passwd"]', '["a/../../b"]', '{"names": ["a"], "nbytes": []}', "\xff"]
)
def test_a_bad_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "index.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"index\.json"):
        ImageFolder(tmp_path, index=tmp_path / "index.json")
