"""Every dataset against a plain oracle: torchvision, numpy, open().read(), torch's DataLoader."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator
from glob import glob as globbed
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import creel
from creel.cache.storage import lookup
from creel.errors import ConfigError, NotFoundError
from creel.loader.data.datasets import (
    FileDataset,
    ImageFolder,
    RecordDataset,
    TarDataset,
    Transformed,
)
from creel.loader.data.datasets.base import each
from kit import forget_stores
from testbed.same import check_in_torch, same

pytestmark = pytest.mark.timeout(120)


def test_storage_is_asked_in_several_threads_only_where_one_would_sleep() -> None:
    def ask(asleep: bool) -> int:
        if asleep:
            time.sleep(0.002)
        return threading.get_ident()

    quick, slow = each(ask, [False] * 500), each(ask, [True] * 50)
    assert set(quick) == {threading.get_ident()}
    assert len(slow) == 50
    assert len(set(slow[8:])) > 1
    assert threading.get_ident() not in slow[8:]


# --- ImageFolder ------------------------------------------------------------------------------


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
    names = sorted(globbed(glob, root_dir=root, recursive=True))  # noqa: PTH207 - the oracle
    expected = [str(root / name) for name in names if (root / name).is_file()]
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
    """No loader has set its settings yet: they are loaded while a store is opened."""
    forget_stores(monkeypatch)
    address = f"{web}/files/a.bin"
    if first == "read":
        assert creel.read(address) == files[1].read_bytes()
    else:
        assert lookup.nbytes_of(address) == len(files[1].read_bytes())


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
        "assert creel.read.__module__ == 'creel.loader.data.files.opened'; "
        "assert not {'torch', 'torchvision', 'PIL', 'fsspec'} & set(sys.modules); "
        "creel.datasets.Transformed; assert not {'torchvision', 'PIL'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_not_found_is_both() -> None:
    error = pickle.loads(pickle.dumps(NotFoundError("there is no x")))
    assert isinstance(error, FileNotFoundError)
    assert isinstance(error, ConfigError)
    assert str(error) == "there is no x"


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
def test_arguments_of_the_wrong_kind_are_named(
    make: Callable[..., object], first: object, given: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        make(first, **given)
