"""File lists: what a dataset holds of the files that its samples open.

Many datasets hold their files in a list: sample i opens entry i of it, perhaps below a folder and
with a suffix. `listed` finds columns of whole paths before any sample was read. `solved` finds how
the addresses that the first samples opened are made of constants and of columns.

No code of the dataset runs: only objects of exactly Python's, NumPy's, pandas' and Arrow's classes
are looked into, and at most so many. A container that behaves oddly ends the search.
"""

from __future__ import annotations

import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice, repeat
from pathlib import PosixPath, PurePosixPath
from stat import S_ISREG
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from torch.utils.data import Subset

from creel.loader.data.binding.tree import unchanged
from creel.loader.data.files.opened import cacheable, local_address

#: Values that are looked at, and how deep inside the dataset.
_VALUES, _DEPTH = 20_000, 5
#: Longer lists are left to recording: a file takes some 3 us and 400 bytes before the first batch
#: (200,000 files, busy cores, 2026-11-28).
LONGEST_LIST = 1 << 21
#: Lists and dicts of more entries are not looked into, and entries of one row.
_FEW, _IN_ROW = 100, 32
#: Columns that are compared with the addresses of samples, and other tables that these lead to.
_COLUMNS, _PLACES, _TABLES = 256, 4, 16
#: Parts of an address that come from columns.
_PARTS = 3
#: Files of one sample.
MAX_FILES = 4
#: The last number in an address.
_NUMBER = re.compile(r"(\d+)\D*$")
_TEXTS = frozenset({str, np.str_, PosixPath, PurePosixPath})
_LISTS = frozenset({list, tuple, np.ndarray})
_PLAIN = frozenset({str, bytes, int, float, bool, complex, type(None), FunctionType, ModuleType})


class _Late:
    """A column of pandas or Arrow, whose values become Python's when they are asked for."""

    def __init__(
        self, value_at: Callable[[int], object], every: Callable[[], list[object]]
    ) -> None:
        self.value_at, self.every = value_at, every

    def __getitem__(self, i: int) -> object:
        return self.value_at(i)


class ListedColumn(NamedTuple):
    """A value of each sample.

    rows: list, tuple, range, dict, array or `_Late`. key: where in each row; None: the row itself.
    place: the row of each sample; None: sample i has row i.
    """

    rows: Any
    key: Any = None
    place: Any = None

    def value(self, i: int) -> object:
        """Return the value of sample i; LookupError and others if there is none."""
        row = self.rows[i if self.place is None else int(self.place[i])]
        return row if self.key is None else _entry(row, self.key)

    def texts(self, size: int, width: int | None = None) -> list[str]:
        """Return the texts of all samples; raises what `value` and `_text` raise."""
        rows: Any = self.rows.every() if type(self.rows) is _Late else self.rows
        if self.place is not None:
            rows = [rows[int(at)] for at in self.place]
        elif type(rows) is dict:
            rows = [rows[i] for i in range(size)]
        if self.key is not None:
            plain = {tuple, list, dict}.issuperset(map(type, rows))
            rows = [row[self.key] if plain else _entry(row, self.key) for row in rows]
        values = rows.tolist() if type(rows) is np.ndarray else rows
        if set(map(type, values)) == {str}:
            return list(values)
        return [_text(value, width) for value in values]


def _entry(row: Any, key: Any) -> object:
    if type(row) not in {tuple, list, dict}:
        raise LookupError(key)
    return row[key]


def _is_number(value: object) -> bool:
    kind = type(value)
    return kind is int or (issubclass(kind, np.integer) and kind.__module__ == "numpy")


def _text(value: Any, width: int | None) -> str:
    """Return the text of a path, or of a number padded to `width`; TypeError for other values.

    `width`: None for paths only.
    """
    if type(value) in _TEXTS:
        return str(value)
    if width is not None and _is_number(value):
        return f"{int(value):0{width}d}"
    raise TypeError(type(value))


# --- columns ------------------------------------------------------------------------------------


def _values(dataset: object) -> Iterator[Any]:
    """Yield what a dataset holds, attributes of objects inside it included, breadth first."""
    queue, seen = deque([(dataset, 0)]), {id(dataset)}
    while queue and len(seen) < _VALUES:
        value, depth = queue.popleft()
        kind = type(value)
        if depth:
            yield value
        if depth == _DEPTH or kind in _PLAIN or issubclass(kind, type):
            continue
        for held in _inside(value, kind):
            if id(held) not in seen:
                seen.add(id(held))
                queue.append((held, depth + 1))


def _inside(value: Any, kind: type) -> list[Any]:
    if kind in {list, tuple, dict}:
        entries = value.values() if kind is dict else value
        return list(entries) if len(value) <= _FEW else []
    try:
        held = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return []
    return list(held.values()) if type(held) is dict else []


def _is(value: object, module: str, *names: str) -> bool:
    """Whether a value is of exactly one of these classes of an imported module."""
    library = sys.modules.get(module)
    return any(type(value) is getattr(library, name, None) for name in names)


def _columns(dataset: object, size: int) -> Iterator[ListedColumn]:
    """Yield what may be a file, or a part of its name, of each of `size` samples."""
    yield ListedColumn(range(size))
    for value in _values(dataset):
        if type(value) in {*_LISTS, dict}:
            if len(value) == size > 0:
                yield from _of_container(value, size)
        elif _is(value, "pandas", "DataFrame") and len(value) == size > 0:
            for k in range(min(value.shape[1], _IN_ROW)):
                yield from _of_rows(_of_series(value.iloc[:, k]))
        elif _is(value, "pandas", "Series") and len(value) == size > 0:
            yield from _of_rows(_of_series(value))
        elif _is(value, "pyarrow", "Table") and value.num_rows == size > 0:
            for column in value.columns[:_IN_ROW]:
                yield from _of_arrow(column)


def _of_container(value: Any, size: int) -> Iterator[ListedColumn]:
    if type(value) is dict:
        if 0 in value and size - 1 in value:  # by number, as DLIO's
            yield from _of_rows(value)
    elif type(value) is np.ndarray and value.ndim == 2:
        for k in range(min(value.shape[1], _IN_ROW)):
            yield from _of_rows(value[:, k])
    elif getattr(value, "ndim", 1) == 1:
        yield from _of_rows(value)


def _of_series(series: Any) -> _Late:
    return _Late(lambda i: series.iloc[i], series.tolist)


def _of_arrow(column: Any) -> Iterator[ListedColumn]:
    kind = str(column.type)
    if kind in {"string", "large_string"} or "int" in kind.partition("<")[0]:
        yield ListedColumn(_Late(lambda i: column[i].as_py(), column.to_pylist))
    elif kind.startswith("struct<") and "path: string" in kind:  # as HF's Image and Audio
        import pyarrow.compute as pc

        yield from _of_arrow(pc.struct_field(column, "path"))  # no bytes become Python's


def _of_rows(rows: Any) -> Iterator[ListedColumn]:
    """Yield the columns of one row per sample, by what the first row has."""
    return (ListedColumn(rows, key) for key in _keys(rows[0]))


def _keys(row: Any) -> Iterator[Any]:
    """Yield where a row has paths or numbers; None: it is one."""
    if type(row) in _TEXTS or _is_number(row):
        yield None
    elif type(row) in {tuple, list, dict}:
        entries = row.items() if type(row) is dict else enumerate(row)
        for key, value in islice(entries, _IN_ROW):
            if type(value) in _TEXTS or type(value) is int:
                yield key


def _through(dataset: object, size: int) -> Iterator[ListedColumn]:
    """Yield columns of other lists and dicts, whose place for sample i another list says."""
    places, tables = [], []
    for value in _values(dataset):
        if type(value) in {*_LISTS, dict} and len(value) and getattr(value, "ndim", 1) == 1:
            if type(value) is not dict and len(value) == size and _is_number(value[0]):
                places.append(value)
            else:
                tables.append(value)
    for place in places[:_PLACES]:
        for table in tables[:_TABLES]:
            with suppress(LookupError, TypeError):
                for key in _keys(table[int(place[0])]):
                    yield ListedColumn(table, key, place)


def _below(dataset: Any) -> tuple[object, Any]:
    """Return the dataset below torch's Subsets, and each sample's number there; None: the same."""
    place = None
    while unchanged(dataset, Subset):
        indices = np.asarray(dataset.indices)
        place = indices if place is None else indices[place]
        dataset = dataset.dataset
    return dataset, place


def _candidates(dataset: object, size: int) -> Iterator[ListedColumn]:
    if size > LONGEST_LIST:
        return
    inner, place = _below(dataset)
    if place is None:
        yield from _columns(inner, size)
        yield from _through(inner, size)
        return
    yield ListedColumn(range(size))
    for column in _columns(inner, len(inner)):  # type: ignore[arg-type]  # a Subset's has a length
        yield column._replace(place=place)


# --- before any sample was read -----------------------------------------------------------------


class FileList(NamedTuple):
    """The files of all samples.

    addresses: (samples * files,) those of one sample after the other. files: of each sample.
    largest: bytes of the largest of some of the files; 0 if none was looked at.
    """

    addresses: list[str]
    files: int
    largest: int = 0


class Paths(NamedTuple):
    """Columns of paths, and the bytes of the largest file that was looked at."""

    columns: list[ListedColumn]
    first: str
    largest: int


def paths_in(dataset: object, size: int) -> Paths | None:
    """Return the columns of whole paths of regular files, judged by a few; None: there are none."""
    try:
        columns, first, largest = [], "", 0
        for column in islice(_candidates(dataset, size), 1, _COLUMNS):
            probe = _few_files(column, size)
            if probe is not None:
                columns.append(column)
                first, largest = first or probe[0], max(largest, probe[1])
    except Exception:  # noqa: BLE001  a container that behaves oddly
        return None
    return Paths(columns, first, largest) if 1 <= len(columns) <= MAX_FILES else None


def _few_files(column: ListedColumn, size: int) -> tuple[str, int] | None:
    """Return the first file of a column, and the bytes of the largest of three; None: no files."""
    some, nbytes = sorted({0, size // 2, size - 1}), []
    addresses = []
    try:
        for i in some:
            value = column.value(i)
            address = local_address(str(value)) if type(value) in _TEXTS else None
            if address is None:
                return None
            status = os.stat(address)  # noqa: PTH116  a string
            if not S_ISREG(status.st_mode) or not cacheable(status, address):
                return None
            addresses.append(address)
            nbytes.append(status.st_size)
    except Exception:  # noqa: BLE001  no file, no row, or one that behaves oddly
        return None
    return (addresses[0], max(nbytes)) if len(set(addresses)) == len(some) else None


def listed(paths: Paths, size: int) -> FileList | None:
    """Return the files of all samples, by columns of whole paths; None if files are repeated."""
    try:
        columns = [_addresses(column.texts(size)) for column in paths.columns]
    except Exception:  # noqa: BLE001  as above
        return None
    if any(len(set(column)) < size for column in columns):
        return None
    return FileList(_by_sample(columns), len(columns), paths.largest)


def _addresses(texts: Sequence[str]) -> list[str]:
    """Return addresses as samples are recorded to open them; raises if one is no path of a file."""
    addresses = [local_address(text) for text in texts]
    "".join(map(str, addresses)).encode()  # raises if one is not UTF-8
    if None in addresses:
        raise ValueError("no path of a file")
    return addresses  # type: ignore[return-value]  # none is None


def _by_sample(columns: list[list[str]]) -> list[str]:
    if len(columns) == 1:
        return columns[0]
    return [address for row in zip(*columns, strict=True) for address in row]


# --- after some samples were read ---------------------------------------------------------------

Part: TypeAlias = "str | ListedColumn"


def solved(
    dataset: object, size: int, samples: list[int], read: list[list[str]]
) -> FileList | None:
    """Return the files of all samples, by those that some were seen to read; None if none fits.

    An address is made of texts one after the other: constants, and columns at the sample's place.

    Args:
        samples: (n,) their numbers.
        read: (n,) the files that each has read whole, in order.
    """
    try:
        candidates = list(islice(_candidates(dataset, size), _COLUMNS))
        files: list[list[str]] = []
        for texts in zip(*read, strict=True):  # raises if samples have read different numbers
            template = _template(list(texts), samples, candidates, size)
            if template is None or len(files) == MAX_FILES:
                return None
            files.append(template)
    except Exception:  # noqa: BLE001  or a container that behaves oddly
        return None
    differs = any(len(set(column)) > 1 for column in files)
    return FileList(_by_sample(files), len(files)) if differs else None


def _template(
    texts: list[str], samples: list[int], candidates: list[ListedColumn], size: int
) -> list[str] | None:
    """Return the texts of all samples, of which those of some are known; None: no columns fit."""
    digits = {len(run[1]) if (run := _NUMBER.search(text)) else 0 for text in texts}
    for width in (0, *(digits if len(digits) == 1 else ())):
        known = [
            (column, column_texts)
            for column in candidates
            if (column_texts := _at(column, samples, width))
        ]
        parts = _parts(texts, known, _PARTS)
        if parts is not None:
            pieces = [repeat(p, size) if type(p) is str else p.texts(size, width) for p in parts]  # type: ignore[union-attr]  # else a ListedColumn
            every = ["".join(row) for row in zip(*pieces, strict=True)]
            "".join(every).encode()  # raises if one is not UTF-8
            return every
    return None


def _at(column: ListedColumn, samples: list[int], width: int) -> list[str] | None:
    """Return a column's texts of some samples; None if it has none, or one and the same."""
    try:
        texts = [_text(column.value(i), width) for i in samples]
    except Exception:  # noqa: BLE001  no row, or one that behaves oddly
        return None
    return texts if len(set(texts)) > 1 and all(texts) else None


def _parts(
    texts: list[str], known: list[tuple[ListedColumn, list[str]]], depth: int
) -> list[Part] | None:
    """Return constants and columns that, one after the other, give each of these texts."""
    if len(set(texts)) == 1:
        return [texts[0]]
    for column, values in known if depth else ():
        at = [text.rfind(value) for text, value in zip(texts, values, strict=True)]
        if min(at) < 0:
            continue
        before = _parts([t[:a] for t, a in zip(texts, at, strict=True)], known, depth - 1)
        if before is None:
            continue
        ends = [t[a + len(v) :] for t, a, v in zip(texts, at, values, strict=True)]
        after = _parts(ends, known, depth - 1)
        if after is not None:
            return [*before, column, *after]
    return None
