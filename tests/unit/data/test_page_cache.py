"""Which files of a local file system are in the page cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from creel.loader.data.page_cache import in_page_cache
from kit import dropped

NBYTES = 20_000


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / name for name in ("a", "b", "blank name", "empty")]
    for path in paths:
        path.write_bytes(b"" if path.name == "empty" else os.urandom(NBYTES))
    if not in_page_cache([*map(str, paths)]):
        pytest.skip("this file system does not say what is in the page cache")
    return paths


def test_pages_just_written_are_there_and_dropped_ones_are_not(paths: list[Path]) -> None:
    if not dropped(paths[1]):
        pytest.skip("this file system keeps its pages")
    assert in_page_cache([str(paths[0])])
    assert not in_page_cache([*map(str, paths)])  # asking may make the kernel read them
    paths[1].read_bytes()
    assert in_page_cache([*map(str, paths)])


@pytest.mark.parametrize("gone", [2, 3])
def test_a_few_files_may_have_been_given_up(tmp_path: Path, gone: int) -> None:
    """Else one file in a hundred would have all others copied, too."""
    paths = [tmp_path / f"{i:02}" for i in range(64)]
    for path in paths:
        path.write_bytes(os.urandom(NBYTES))
    if not in_page_cache([*map(str, paths)]) or not all(map(dropped, paths[7 : 7 + gone])):
        pytest.skip("this file system does not say what is in the page cache, or keeps its pages")
    assert in_page_cache([*map(str, paths)]) == (gone == 2)


def test_links_are_followed(paths: list[Path], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(paths[0])
    (tmp_path / "folder").symlink_to(tmp_path)
    assert in_page_cache([f"{tmp_path}/link", f"{tmp_path}/folder/a"])
    (tmp_path / "away").symlink_to("/proc/self")
    assert not in_page_cache([f"{tmp_path}/away/status"])


def test_addresses_of_no_local_file_are_not_there(paths: list[Path]) -> None:
    nowhere = (
        "http://127.0.0.1:9/a",
        "s3://bucket/a",
        f"{paths[0]}.none",
        "/proc/self/status",
        "",
        "/a\0b",
    )
    for path in nowhere:
        assert not in_page_cache([str(paths[0]), path])


def test_memory_file_systems_are_memory() -> None:
    path = Path(f"/dev/shm/creel-test-{os.getpid()}")
    try:
        path.write_bytes(b"1")
    except OSError:
        pytest.skip("no /dev/shm to write to")
    try:
        assert in_page_cache([str(path)])
    finally:
        path.unlink()
