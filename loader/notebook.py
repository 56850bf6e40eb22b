"""How a loader shows itself in a notebook cell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from html import escape
from typing import TYPE_CHECKING, Any

from creel.counters import OF_RANKS
from creel.units import format_size

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

_SHOWN_S = 0.05  # shorter waits would read "0.0 s"


def cell(loader: DataLoader[Any], stats: Mapping[str, Any]) -> str:
    """Return HTML: what the loader reads, and what this process has counted of it (`stats`).

    Runs nothing of the person's but the `__len__` of dataset and sampler.
    """
    return html("creel.DataLoader", [*_arguments(loader), *_counted(stats)])


def html(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """Return a table of names and values.

    >>> html("a", [("b", "<c>")])
    '<table><caption>a</caption><tr><th>b</th><td>&lt;c&gt;</td></tr></table>'
    """
    lines = (f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    return f"<table><caption>{escape(title)}</caption>{''.join(lines)}</table>"


def rows_html(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table with a heading for each column."""
    head = "".join(f"<th>{escape(title)}</th>" for title in header)
    cells = ("".join(f"<td>{escape(value)}</td>" for value in row) for row in rows)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def _arguments(loader: DataLoader[Any]) -> Iterable[tuple[str, str]]:
    yield "dataset", f"{type(loader.dataset).__name__}{_length(loader.dataset, ' of {} samples')}"
    yield "batches", f"{loader.batch_size or 'single'} samples{_length(loader, ', {} an epoch')}"
    custom = loader.batch_size is None and loader.batch_sampler is not None
    yield "sampler", type(loader.batch_sampler if custom else loader.sampler).__name__
    yield "workers", str(loader.num_workers)


def _length(value: object, text: str) -> str:
    with suppress(Exception):  # the person's own, and perhaps there is none
        return text.format(f"{len(value):,}")  # type: ignore[arg-type]
    return ""


def _counted(stats: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Yield a row for each counter that is not zero; seconds by cause or stage."""
    yield "delivered", f"{stats['batches']:,} batches"
    for counter in OF_RANKS:
        value = stats.get(counter.key, 0)
        if isinstance(value, Mapping):
            long = {name: seconds for name, seconds in value.items() if seconds >= _SHOWN_S}
            value = ", ".join(f"{seconds:.1f} s {name}" for name, seconds in long.items())
        elif value:
            value = format_size(value) if counter.unit == "bytes" else f"{value:,}"
        if value and counter.key != "batches":
            yield counter.column or counter.name, value
