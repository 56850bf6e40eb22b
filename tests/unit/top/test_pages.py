"""The pages: README and docs/ are short where a person begins, and lead where they say."""

from __future__ import annotations

import ast
import inspect
import io
import pydoc
import re
import runpy
import sys
import tarfile
import textwrap
from pathlib import Path
from typing import Any

import pytest

import creel
from creel.cli.main import creel as commands
from creel.counters import COUNTERS

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))
#: Parts that scripts write.
MADE = re.compile(r"<!-- (?:made by|rooms).*?<!-- end[^>]*-->\n", re.DOTALL)
#: The pages of each shelf of the site.
SHELVES = {
    title: [DOCS / path for path in re.findall(r": (\S+\.md)$", part, re.MULTILINE)]
    for title, part in re.findall(
        r"^  - ([^:\n]+):\n((?: {6}.*\n)+)",
        (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2],
        re.MULTILINE,
    )
}
HOW_TO = SHELVES["How-to"]
#: Looked up, not read.
REFERENCE = SHELVES["Reference"]
_CODE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?://)([^)\s]+)\)|^\[[^]]+\]: (?!https?://)(\S+)$", re.MULTILINE)


def name_of(page: Path) -> str:
    return str(page.relative_to(DOCS)) if page.is_relative_to(DOCS) else page.name


every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


def text_of(page: Path) -> str:
    """Return what a person wrote on a page, without code."""
    return _CODE.sub("", MADE.sub("", page.read_text()))


def words(text: str) -> int:
    return len(re.findall(r"[^\s|]*\w[^\s|]*", text))


def sentences(text: str) -> list[str]:
    """Return the sentences of paragraphs and lists; a row of a table is none."""
    text = re.sub(r"^(?:\[[^]]+\]: |#|\|).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    pieces = []
    for part in re.split(r"\n\s*\n|\n(?= *(?:\*|\d+\.) )", text):
        pieces += re.split(r"(?<=[.!?:;])[*)\"`]*\s+(?=[A-Z*`\[0-9(])", " ".join(part.split()))
    return [piece for piece in pieces if words(piece)]


def anchors(page: Path) -> set[str]:
    """Return a page's anchors as a forge makes them from its headings."""
    headings = re.findall(r"^#+ (.+)$", _CODE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings}


@every_page
def test_a_link_leads_to_a_file_of_the_repository_and_to_a_heading_of_it(page: Path) -> None:
    links = [a or b for a, b in _LINK.findall(_CODE.sub("", page.read_text()))]
    for link in links:
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_readme_has_no_more_words_than_a_newcomer_reads() -> None:
    assert len(PAGES[0].read_text().split()) <= 900


@every_page
def test_a_page_is_short_and_its_lines_and_sentences_are(page: Path) -> None:
    text = text_of(page)
    long = [line for line in page.read_text().splitlines() if len(line) > 120]
    assert not long
    most = 200 if page.parent.name == "recipes" else 500 if page in HOW_TO else 1200
    assert page in REFERENCE or words(text) <= most
    said = [words(sentence) for sentence in sentences(text)]
    assert sum(said) / len(said) <= 18


@every_page
def test_a_page_says_first_what_it_is_for(page: Path) -> None:
    title, first = page.read_text().split("\n\n", maxsplit=2)[:2]
    assert re.fullmatch(r"# .+", title)
    assert first[0].isalpha() or first.startswith(("**", "`"))


def test_all_pages_together_are_a_small_book() -> None:
    read = [page for page in PAGES if page not in REFERENCE]
    assert sum(words(text_of(page)) for page in read) <= 30_000


def test_the_reference_is_made_from_the_code() -> None:
    pages = runpy.run_path(str(ROOT / "scripts/reference.py"))["pages"]()
    stale = [path.name for path, text in pages.items() if path.read_text() != text]
    assert not stale, "python scripts/reference.py writes them"


def test_the_keys_that_the_page_of_json_promises_are_in_the_code() -> None:
    """One that is renamed there, where "keys are added, never renamed", stands here no more."""
    code = "".join(
        path.read_text()
        for part in ("src/creel", "daemon", "loader", "policies")
        for path in sorted((ROOT / part).rglob("*.py"))
    )
    written = set(re.findall(r"[\"'](\w+)[\"']|^    (\w+): |\b(\w+)=", code, re.MULTILINE))
    there = {name for names in written for name in names} | {counter.key for counter in COUNTERS}
    there |= {f"{name}_nbytes" for name in there}  # as peers' traffic is named
    page = (DOCS / "json.md").read_text().partition("\n## JSON\n")[2]
    named = {part for name in re.findall(r"`([a-z][\w.]+)`", page) for part in name.split(".")}
    assert len(named) > 150
    assert named <= there


def test_each_page_is_in_the_navigation_of_the_site_once() -> None:
    """mkdocs itself is not installed where the tests run."""
    listed = [name_of(page) for pages in SHELVES.values() for page in pages]
    outside = {"CHANGELOG.md", "CONTRIBUTING.md", "examples/SKILL.md"}
    assert list(SHELVES) == ["Start", "How-to", "Reference", "Why it works"]
    assert sorted(listed) == sorted({name_of(page) for page in PAGES[1:]} | outside)


def test_what_coding_agents_read_names_what_there_is() -> None:
    index, skill = (DOCS / "llms.txt").read_text(), (ROOT / "examples/SKILL.md").read_text()
    links = re.findall(r"\]\(([\w-]+\.md)\)", index)
    assert {"api.md", "formats.md", "waiting.md"} <= set(links)
    assert [(DOCS / link).is_file() for link in links].count(False) == 0
    assert re.match(r"---\nname: creel\ndescription: ", skill)
    names = re.findall(r"`creel\.(\w+)", skill)
    assert {"wrap", "kept", "TarDataset"} <= set(names) <= {*dir(creel), "integrations"}
    named = set(re.findall(r"`creel (\w+)", skill))
    assert {"explain", "verify", "stats"} <= named <= set(commands.commands)
    keywords = re.findall(r"creel\.(\w+)\([^)]*?\b(\w+)=", skill)
    assert all(word in inspect.signature(getattr(creel, of)).parameters for of, word in keywords)
    assert words(skill) <= 600


@every_page
def test_code_on_a_page_parses_and_calls_what_there_is(page: Path) -> None:
    """The recipes' code is run, by tests/compat/test_recipes.py."""
    by_hand = MADE.sub("", page.read_text())
    blocks = re.findall(r"^ *```python\n(.*?)^ *```$", by_hand, re.DOTALL | re.MULTILINE)
    for code in blocks:
        tree = ast.parse(textwrap.dedent(code))
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            name = ast.unparse(call.func)
            if not name.startswith("creel.") or "(" in name:
                continue
            called: Any = pydoc.locate(name)
            assert called is not None, name
            takes = inspect.signature(called).parameters
            given = {keyword.arg for keyword in call.keywords if keyword.arg}
            assert given <= set(takes), name


def test_the_page_of_formats_names_tests_that_exist() -> None:
    page = (DOCS / "formats.md").read_text()
    for name in set(re.findall(r"`((?:\w+/)?test_\w+\.py)`", page)):
        assert list((ROOT / "tests").rglob(name)), name


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
    page = (DOCS / "coming-from.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"PIL": sys.modules["PIL"], "creel": creel, "io": io}
    exec(code, names)
    picture, label = names["data"][-1]
    assert (picture.getpixel((0, 0)), label) == ((127, 0, 0), 127)
