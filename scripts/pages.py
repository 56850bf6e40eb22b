"""What mkdocs.yml does to the pages of docs/: they are written as a forge shows them.

On a forge a page may link to any file of the repository (`../deploy/creeld.service`), and a list
may be nested by two spaces. The site gets a copy of each linked file, and its parser wants four
spaces.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add each file outside docs/ that a page links to, under its path in the repository."""
    pages = [page.content_string for page in files.documentation_pages()]
    for path in sorted({path for page in pages for path in _OUTSIDE.findall(page)}):
        if (ROOT / path).is_file():  # else the check of links says so
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Lead links to where the site has their files, and nest lists as its parser wants it."""
    markdown = _OUTSIDE.sub(r"](\1", markdown).replace("](docs/", "](")
    return re.sub(r"^( +)(?=\* )", r"\1\1", markdown, flags=re.MULTILINE)
