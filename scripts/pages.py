"""What mkdocs.yml does to the pages of docs/: they are written as a forge shows them.

On a forge a page may link to any file of the repository (`../deploy/creeld.service`), and a list
may be nested by two spaces. The site gets a copy of each linked file, and its parser wants four
spaces.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_UPWARDS = re.compile(r"\]\((\.\./[^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add each file outside docs/ that a page links to, under its path in the repository."""
    linked = set()
    for page in files.documentation_pages():
        linked |= {_in_repository(page, link) for link in _UPWARDS.findall(page.content_string)}
    for path in sorted(linked):
        if not path.startswith("docs/") and (ROOT / path).is_file():  # else strict links say so
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Lead links to where the site has their files, and nest lists as its parser wants it."""
    here = posixpath.dirname(page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        path = _in_repository(page.file, match[1])
        return f"]({posixpath.relpath(path.removeprefix('docs/'), here or '.')}"

    if page.file.src_uri in {"CHANGELOG.md", "CONTRIBUTING.md"}:  # they lie above docs/
        markdown = markdown.replace("](docs/", "](")
    markdown = _UPWARDS.sub(moved, markdown)
    return re.sub(r"^( +)(?=\* )", r"\1\1", markdown, flags=re.MULTILINE)


def _in_repository(page: File, link: str) -> str:
    """Return the path in the repository that a page of docs/ links to."""
    return posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.src_uri), link))
