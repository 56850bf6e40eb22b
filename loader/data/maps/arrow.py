"""The bytes of Arrow's arrays, and of the rows of Hugging Face's map-style datasets."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import types

from creel.loader.data.maps.mappings import MappedRange, Mappings, Span


def is_hugging_face(dataset: object) -> bool:
    """Whether this is a map-style dataset of the library `datasets`, which is not imported."""
    module = sys.modules.get("datasets")
    kind = getattr(module, "Dataset", None)
    return isinstance(kind, type) and isinstance(dataset, kind)


def rows_of(dataset: Any) -> Callable[[int], Iterator[list[MappedRange]]] | None:
    """Return what tells which ranges a row consists of; None for a dataset without mapped files.

    The rows and columns are those of the dataset at this time. Each list of ranges is to be in
    memory before the next one is asked for: the places of texts and lists stand in the file, too.
    """
    if not dataset.cache_files:
        return None
    table, indices, form = dataset.data, getattr(dataset, "_indices", None), dataset.format
    columns = table.column_names if form["output_all_columns"] else form["columns"]
    mappings = Mappings()

    def ranges(index: int) -> Iterator[list[MappedRange]]:
        row = index
        if indices is not None:  # after `shuffle`, `select` or `filter`
            place = indices.fast_slice(index, 1).column(0)
            for spans in spans_of(place.chunks):
                yield mappings.ranges(spans)
            row = place[0].as_py()
        cells = table.fast_slice(row, 1)
        chunks = [chunk for name in columns for chunk in cells.column(name).chunks]
        for spans in spans_of(chunks):
            yield mappings.ranges(spans)

    return ranges


def spans_of(arrays: Sequence[pa.Array]) -> Iterator[list[Span]]:
    """Yield the memory of arrays' values; each list must be readable before the next is asked for.

    Dictionaries, unions and views of strings are left out.
    """
    while arrays:
        spans: list[Span] = []
        inner: list[Callable[[], pa.Array]] = []
        for array in arrays:
            _collect_spans(array, spans, inner)
        yield spans
        arrays = [values() for values in inner]


def _collect_spans(array: Any, spans: list[Span], inner: list[Callable[[], pa.Array]]) -> None:
    """Add the memory of an array, and what returns the arrays whose place stands in that."""
    array = getattr(array, "storage", array)  # of an extension
    array = getattr(array, "indices", array)  # of a dictionary
    kind, buffers, at, n = array.type, array.buffers(), array.offset, len(array)
    if not n:
        return
    if buffers[0] is not None:  # whether each value is there
        spans.append(_span(buffers[0], at, n, 1))
    if types.is_struct(kind):
        for i in range(kind.num_fields):
            _collect_spans(array.field(i), spans, inner)
    elif types.is_fixed_size_list(kind):
        _collect_spans(array.values.slice(at * kind.list_size, n * kind.list_size), spans, inner)
    elif _is_of(kind, types.is_list, types.is_map, types.is_string, types.is_binary):
        spans.append(_span(buffers[1], at, n + 1, 32))
        inner.append(partial(_inside, array, np.int32))
    elif _is_of(kind, types.is_large_list, types.is_large_string, types.is_large_binary):
        spans.append(_span(buffers[1], at, n + 1, 64))
        inner.append(partial(_inside, array, np.int64))
    elif _is_of(kind, types.is_primitive, types.is_decimal, types.is_fixed_size_binary):
        spans.append(_span(buffers[1], at, n, kind.bit_width))


def _is_of(kind: pa.DataType, *kinds: Callable[[pa.DataType], bool]) -> bool:
    return any(is_kind(kind) for is_kind in kinds)


def _span(buffer: pa.Buffer, at: int, n: int, bits: int) -> Span:
    """Return the memory of n values from the `at`-th on."""
    first = at * bits // 8
    return Span(buffer.address + first, -(-(at + n) * bits // 8) - first)


def _inside(array: Any, width: type[np.signedinteger]) -> pa.Array:
    """Return what the lists of an array are made of, or its texts as bytes."""
    buffers, at = array.buffers(), array.offset
    offsets = np.frombuffer(buffers[1], width)
    first, last = int(offsets[at]), int(offsets[at + len(array)])
    if hasattr(array, "values"):
        return array.values.slice(first, last - first)
    if first == last:
        return pa.array([], pa.uint8())
    return pa.Array.from_buffers(pa.uint8(), last - first, [None, buffers[2]], offset=first)
