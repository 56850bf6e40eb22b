"""The pages: README and docs/ are short where a person begins, and lead where they say."""

from __future__ import annotations

import io
import re
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

import creel

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_CODE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?://)([^)\s]+)\)|^\[[^]]+\]: (?!https?://)(\S+)$", re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return a page's anchors as a forge makes them from its headings."""
    headings = re.findall(r"^#+ (.+)$", _CODE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_link_leads_to_a_file_of_the_repository_and_to_a_heading_of_it(page: Path) -> None:
    links = [a or b for a, b in _LINK.findall(_CODE.sub("", page.read_text()))]
    for link in links:
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_readme_has_no_more_words_than_a_newcomer_reads() -> None:
    assert len(PAGES[0].read_text().split()) <= 900


def test_each_page_is_in_the_navigation_of_the_site_once() -> None:
    """mkdocs itself is not installed where the tests run."""
    _, _, navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")
    listed = re.findall(r": (\S+\.md)$", navigation, re.MULTILINE)
    outside = {"CHANGELOG.md", "CONTRIBUTING.md"}
    assert sorted(listed) == sorted({page.name for page in PAGES[1:]} | outside)


def test_the_page_of_formats_names_tests_that_exist() -> None:
    page = (ROOT / "docs/formats.md").read_text()
    for name in set(re.findall(r"`(\w+/test_\w+\.py)`", page)):
        assert (ROOT / "tests" / name).is_file(), name


def test_the_shards_of_webdataset_are_read_by_the_code_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = pytest.importorskip("PIL.Image")
    for shard in range(128):
        with tarfile.open(tmp_path / f"train-{shard:03d}.tar", "w") as tar:
            picture = io.BytesIO()
            image.new("RGB", (2, 2), (shard, 0, 0)).save(picture, "png")
            for suffix, data in (("jpg", picture.getvalue()), ("cls", b"%d" % shard)):
                member = tarfile.TarInfo(f"{shard:04d}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # for index="user"
    page = (ROOT / "docs/coming-from.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"PIL": sys.modules["PIL"], "creel": creel, "io": io}
    exec(code, names)
    picture, label = names["data"][-1]
    assert (picture.getpixel((0, 0)), label) == ((127, 0, 0), 127)
