"""Write the reference pages of docs/ from the code that they are about.

    python scripts/reference.py            # write them
    python scripts/reference.py --check    # end with 1 if one is out of date

`api.md` is made from docstrings, `cli.md` from the commands' own help, `configuration.md` from
`settings.py`, `metrics.md` from `counters.py`. What stands above the first marker of such a page is
written by hand.
"""

from __future__ import annotations

import inspect
import pydoc
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from creel import errors
from creel.cli.main import creel as commands
from creel.config import fields
from creel.counters import COUNTERS, Counter
from creel.units import format_size

DOCS = Path(__file__).parents[1] / "docs"
BEGIN, END = "<!-- made by: python scripts/reference.py -->\n", "<!-- end -->\n"
_WIDTH = 116

#: What `api.md` has, in this order, with the methods of each that a person calls.
_API: dict[str, tuple[str, ...]] = {
    "DataLoader": ("state_dict", "load_state_dict", "set_epoch", "stats", "indices", "replayed"),
    "wrap": (),
    "kept": (),
    "Decoded": (),
    "ImageFolder": ("save_index",),
    "FileDataset": (),
    "RecordDataset": (),
    "TarDataset": (),
    "TokenDataset": ("ranges",),
    "mapped_ranges": (),
    "datasets.Transformed": (),
    "open": (),
    "read": (),
    "prefetch_to": (),
    "integrations.accelerate.prepare": (),
    "integrations.accelerate.skip_first_batches": (),
    "integrations.grain.DataSource": (),
    "Rehearsal": ("add", "over", "dataset", "uids"),
    "Producer": ("put", "flush", "close"),
    "Stream": ("batches", "leave"),
    "stats": (),
}
_SECTIONS = {
    "memory": "How much of the node's memory may hold samples. In a cgroup its limit counts.",
    "disk": "A tier on local disk; there is none unless `disk.path` is set ([disk](disk.md)).",
    "fetch": "How the source is read.",
    "window": "How far creel reads ahead in each stream of batches.",
    "daemon": "The service itself ([service](service.md)).",
    "cluster": "The nodes of a job, which serve each other ([several nodes](nodes.md)).",
    "loader": "What happens inside a training process.",
}
_HEADS = {"Args:": "Arguments"}
_OWNERS = {
    "tier": "Of a tier: `memory`, `disk`, `decoded` or `peers`",
    "source": "Of a source of the daemon: a dataset's storage",
    "node": "Of the daemon",
    "rank": "Of a rank, summed over its loaders",
}


def wrapped(text: str, indent: str = "") -> str:
    """Return one paragraph, or item of a list, in lines that fit; links are not broken."""
    later = indent + ("  " if text.startswith("* ") else "")
    return textwrap.fill(
        " ".join(text.split()),
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )


def linked(text: str) -> str:
    """Lead to a page that a docstring names.

    >>> linked("kept (docs/decode-once.md)")
    'kept ([decode-once](decode-once.md))'
    """
    return re.sub(r"docs/([\w/-]+)\.md", r"[\1](\1.md)", text)


def prose(docstring: str) -> Iterator[str]:
    """Yield the parts of a docstring as Markdown: paragraphs, lists of arguments, code."""
    for block in re.split(r"\n\s*\n", inspect.cleandoc(docstring)):
        head, _, below = block.partition("\n")
        if head in {"Args:", "Returns:", "Raises:", "Attributes:", "Yields:"}:
            yield f"**{_HEADS.get(head, head[:-1])}**"
            yield "\n".join(_items(textwrap.dedent(below)))
        elif block.startswith(("    ", ">>> ")):
            yield f"```text\n{textwrap.dedent(block)}\n```"
        else:
            yield wrapped(linked(block))


def _items(text: str) -> Iterator[str]:
    """Yield the entries of a section; a line that begins at its margin begins one."""
    for entry in re.split(r"\n(?=\S)", text):
        name, colon, about = entry.partition(": ")
        named = colon and re.fullmatch(r"[\w, ]+", name)
        yield wrapped(linked(f"* `{name}`: {about}" if named else f"* {entry}"))


def signature(name: str, thing: Any) -> str:
    """Return how a thing is called; the types of its arguments are in the text."""
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(thing).parameters.values()
        if parameter.name not in {"self", "kwargs"}
    ]
    called = f"{name}{inspect.Signature(parameters)}".replace("'", '"')  # as ruff writes them
    if len(called) <= 76:  # what the site shows of a line of code
        return called
    inside = ", ".join(str(parameter).replace("'", '"') for parameter in parameters)
    if any(p.kind is p.KEYWORD_ONLY for p in parameters):
        first = next(str(p).replace("'", '"') for p in parameters if p.kind is p.KEYWORD_ONLY)
        inside = inside.replace(first, f"*, {first}", 1)
    body = textwrap.fill(inside, 76, initial_indent="    ", subsequent_indent="    ")
    return f"{name}(\n{body}\n)"


def _api() -> Iterator[str]:
    for name, methods in _API.items():
        thing: Any = pydoc.locate(f"creel.{name}")
        yield f"## creel.{name}"
        yield f"```text\n{signature(f'creel.{name}', thing)}\n```"
        yield from prose(thing.__doc__)
        for method in methods:
            yield from _method(thing, method)
    yield "## creel.errors"
    yield f"```\n{inspect.cleandoc(errors.__doc__ or '').partition(chr(10) * 2)[2]}\n```"


def _method(owner: type, name: str) -> Iterator[str]:
    member = inspect.getattr_static(owner, name)
    called = signature(name, member) if inspect.isfunction(member) else name
    yield f"### {owner.__name__}.{name}"
    if called != name:
        yield f"```text\n{called}\n```"
    yield from prose(member.__doc__ or "")


def _cli(group: click.Group = commands, words: str = "creel") -> Iterator[str]:
    for name, command in sorted(group.commands.items()):
        if isinstance(command, click.Group):
            yield from _cli(command, f"{words} {name}")
            continue
        with click.Context(command, info_name=name) as context:
            usage = " ".join(command.collect_usage_pieces(context))
            records = [p.get_help_record(context) for p in command.params]
            options = [record for record in records if record is not None and record[1]]
        yield f"## {words} {name}"
        yield f"```console\n$ {words} {name} {usage}\n```"
        yield from prose(command.help or "")
        yield "\n".join(wrapped(f"* `{name}` {about}") for name, about in options)


def _settings() -> Iterator[str]:
    for section, about in _SECTIONS.items():
        yield f"## [{section}]"
        yield about
        yield "\n".join(
            wrapped(f"* `{key}` = {_default(field.default, field.unit)}: {field.about}.")
            for key, field in fields().items()
            if key.startswith(f"{section}.")
        )


def _default(default: object, unit: str) -> str:
    """Return a default as a file has it, but sizes with their unit.

    >>> _default(10 << 30, "bytes"), _default(True, ""), _default("", "")
    ('`"10 GiB"`', '`true`', '`""`')
    """
    if unit == "bytes" and isinstance(default, int):
        return f'`"{format_size(default).replace(".00", "").replace(".0", "")}"`'
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f'`"{default}"`' if isinstance(default, str) else f"`{default}`"


def _metrics() -> Iterator[str]:
    yield "* `creel_build_info`: version of this daemon, the label `version`."
    for owner, title in _OWNERS.items():
        yield f"## {title}"
        yield "\n".join(wrapped(_metric(counter)) for counter in COUNTERS if counter.of == owner)


def _metric(counter: Counter) -> str:
    """Return a counter's line: its metric, kind, labels, what it counts, and its key in JSON."""
    of = {"rank": ["job", "rank"], "node": []}.get(counter.of, [counter.of])
    labels = ", ".join(f"`{label}`" for label in (*of, *filter(None, [counter.label])))
    kind = "" if counter.kind == "counter" else f" ({counter.kind})"
    members = f" ({', '.join(f'`{m}`' for m in counter.members)})" if counter.members else ""
    name = counter.metric + "_total" * (counter.kind == "counter")
    by = f" By {labels}{members}." if labels else ""
    return f"* `{name}`{kind}: {counter.help}{by} JSON: `{counter.key}`."


_PAGES = {"api": _api, "cli": _cli, "configuration": _settings, "metrics": _metrics}


def pages() -> dict[Path, str]:
    """Return the text of each page as it should be."""
    texts = {}
    for name, parts in _PAGES.items():
        path = DOCS / f"{name}.md"
        before, _, then = path.read_text().partition(BEGIN)
        _, _, after = then.partition(END)
        text = "\n\n".join(filter(None, parts()))
        texts[path] = f"{before}{BEGIN}\n{text}\n\n{END}{after}"
    return texts


def main() -> None:
    texts = pages()
    if "--check" in sys.argv[1:]:
        sys.exit(any(path.read_text() != text for path, text in texts.items()))
    for path, text in texts.items():
        path.write_text(text)


if __name__ == "__main__":
    main()
