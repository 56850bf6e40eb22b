"""Write the part "The tree" of docs/architecture.md, from the first line of each room's docstring.

    python scripts/tree.py            # write it
    python scripts/tree.py --check    # end with 1 if it is out of date

A room is a folder; its files are named behind its line.
"""

from __future__ import annotations

import ast
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/architecture.md"
BEGIN, END = "<!-- rooms: python scripts/tree.py -->\n", "<!-- end of rooms -->\n"
TOPS = ("src/creel", "policies", "cache", "daemon", "loader")


def rooms() -> Iterator[Path]:
    """Yield the folders of the tree, each before those in it."""
    for top in TOPS:
        for path in sorted((ROOT / top).rglob("__init__.py")):
            room = path.parent
            links = {*TOPS} & {*room.relative_to(ROOT / top).parts[:1]} if top == TOPS[0] else set()
            if not links:
                yield room


def line(room: Path) -> str:
    """Return the line of a room: its path, its first sentence, its files."""
    text = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
    files = sorted(path.stem for path in room.glob("*.py") if path.stem != "__init__")
    named = " ".join(f"`{name}`" for name in files)
    depth = len(room.relative_to(ROOT).parts) - (2 if room.is_relative_to(ROOT / TOPS[0]) else 1)
    first = text.split("\n", maxsplit=1)[0]
    item = f"* **{room.relative_to(ROOT)}/** {first}{' ' if named else ''}{named}"
    margin = "  " * depth
    return (
        textwrap.fill(
            item,
            118,
            initial_indent=margin,
            subsequent_indent=f"{margin}  ",
            break_on_hyphens=False,
        )
        + "\n"
    )


def page() -> str:
    """Return the page with the part as it should be."""
    before, _, then = PAGE.read_text().partition(BEGIN)
    _, _, after = then.partition(END)
    return f"{before}{BEGIN}{''.join(map(line, rooms()))}{END}{after}"


def main() -> None:
    new = page()
    if "--check" in sys.argv[1:]:
        sys.exit(PAGE.read_text() != new)
    PAGE.write_text(new)


if __name__ == "__main__":
    main()
