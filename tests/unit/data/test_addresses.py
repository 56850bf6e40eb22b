"""Where a user's path or URI leads, and how a wrong one is refused."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import creel
from creel.cache.storage.stores.requests import in_threads
from creel.cache.storage.uris import absolute, addresses
from creel.errors import ConfigError, CreelError, NotFoundError
from creel.loader.data.datasets import (
    FileDataset,
    ImageFolder,
    RecordDataset,
    TarDataset,
)

pytestmark = pytest.mark.timeout(120)


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
def test_values_that_are_no_path_are_refused_in_words(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match=r"path.*not 3"):
        make()


@given(st.lists(st.sampled_from(["/", ".", "..", "~", "a", "b c", ".x", "é"]), min_size=1))
def test_a_local_address_is_an_absolute_path(parts: list[str]) -> None:
    """As from `abspath`, except for `..`, which only the file system can follow."""
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
    """A path through a symbolic link and `..`: a simplified path leads elsewhere."""
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
    """If no thread can be started, the caller lists alone."""

    def scarce(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", scarce)
    assert in_threads(str, [3, 1, 2]) == ["3", "1", "2"]
