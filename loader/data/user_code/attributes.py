"""Plain attributes: a snapshot of a dataset's own settings, which shows that a person changed it.

Numbers, texts, paths, arrays, and lists and dicts of these, of a dataset and of the datasets and
callables (transforms, decoders) inside it. No code of the dataset runs. What functions use of their
module, or of elsewhere, is not seen.
"""

from __future__ import annotations

import functools
import io
import os
import random
from collections.abc import Iterator
from enum import Enum
from itertools import islice
from pathlib import PurePath
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset

#: How deep values inside values are looked at.
_DEPTH = 6
#: Lists and dicts of more entries are one value.
_FEW = 64
#: At most so many entries of a list or an array are looked at, evenly spaced: 1 ms.
_ENTRIES = 1 << 16
_PLAIN = (bool, int, float, complex, str, bytes, PurePath, Enum, np.generic)
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_LEAVES = (*_PLAIN, *_GENERATORS, np.ndarray, torch.Tensor, io.IOBase)
_CODE = (type, FunctionType, BuiltinFunctionType)
#: Texts up to this length are compared as they are.
_LONG = 256
#: Snapshots of single values begin so; "= None" is one that may be made when it is needed.
_SINGLE, _NONE = "= ", "= None"


def snapshot(value: object) -> dict[str, str]:
    """Return what is plain in a value: {name: text}; the texts differ if the values do.

    >>> snapshot([2, "a"])
    {'': '# list 2', '[0]': '= 2', '[1]': "= 'a'"}
    """
    leaves = _inside("", value, _DEPTH, set())
    return {name.removeprefix("."): text for name, leaf in leaves if (text := _text(leaf))}


def changed(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Return the names of what a person may have changed between two snapshots.

    A list or an array in place of None was made when it was first needed.

    >>> changed({"task": "= 0", "index": "= None"}, {"task": "= 1", "index": "# list 3"})
    ['task']
    """
    names = []
    for name, text in now.items():
        was = before.get(name)
        if was is None:  # entries of a list count by its length
            differs = text.startswith(_SINGLE) and "[" not in name
        else:
            first_use = was == _NONE and not text.startswith(_SINGLE)
            differs = was != text and not first_use
        if differs:
            names.append(name)
    return names


def plain_and_code(value: object) -> Iterator[tuple[str, Any]]:
    """Yield (name, text) of what is plain in a value, and (name, code): functions and classes.

    Of functions also their defaults and what they close over.
    """
    for name, leaf in _inside("", value, _DEPTH, set(), code=True):
        text = leaf if is_code(leaf) else _text(leaf)
        if text:
            yield name, text


def is_code(value: object) -> bool:
    """Whether a value is a function or a class."""
    return isinstance(value, _CODE)


def generators(value: object) -> list[Any]:
    """Return the generators of random numbers that a dataset or callable holds."""
    leaves = _inside("", value, _DEPTH, set())
    return [leaf for _, leaf in leaves if isinstance(leaf, _GENERATORS)]


def open_files(value: object) -> list[str]:
    """Return the paths of files that a dataset or callable holds open, or mapped."""
    paths = []
    for _, leaf in _inside("", value, _DEPTH, set()):
        path = leaf.filename if isinstance(leaf, np.memmap) else None
        if isinstance(leaf, io.IOBase) and not leaf.closed and leaf.readable():
            path = getattr(leaf, "name", None)
        if isinstance(path, (str, bytes, PurePath)):
            paths.append(os.fsdecode(path))
    return paths


class _Listed:
    """A list or dict: its kind and length, and for a long one some of its entries."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _inside(
    name: str, value: Any, depth: int, seen: set[int], *, code: bool = False
) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of everything in a value that can be compared; `code`: functions, too."""
    if value is None or isinstance(value, _LEAVES):
        yield name, value
        return
    if not depth or id(value) in seen:
        return
    seen.add(id(value))
    kind = type(value)
    if code:
        yield from _code(name, value, depth, seen)
    if kind in {list, tuple, dict, range}:
        yield name, _Listed(value)
        if len(value) <= _FEW and kind is not range:
            entries = value.items() if kind is dict else enumerate(value)
            for key, child in entries:
                yield from _inside(f"{name}[{key!r}]", child, depth - 1, seen, code=code)
        return
    for key, child in _attributes(value, whole=depth == _DEPTH).items():
        yield from _inside(f"{name}.{key}", child, depth - 1, seen, code=code)


def _code(name: str, value: Any, depth: int, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield the function or class of a value, and what a function was made with."""
    function = value.__func__ if isinstance(value, MethodType) else value
    if is_code(function):
        yield name, function
    elif callable(value) or isinstance(value, Dataset):
        yield name, type(value)
    cells = getattr(function, "__closure__", None) or ()
    made_with = {
        "defaults": getattr(function, "__defaults__", None),
        "keywords": getattr(function, "__kwdefaults__", None),
        **{f"cell {i}": cell.cell_contents for i, cell in enumerate(cells) if cell != CellType()},
    }
    if isinstance(function, FunctionType):
        for key, argument in made_with.items():
            yield from _inside(f"{name}({key})", argument, depth - 1, seen, code=True)


def _attributes(value: Any, *, whole: bool) -> dict[str, Any]:
    """Return the attributes of a dataset or callable; {} for any other value, such as a file.

    `whole`: it is the dataset itself, of any class.
    """
    if isinstance(value, MethodType):
        value = value.__self__
    if isinstance(value, functools.partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    looks = whole or isinstance(value, Dataset) or callable(value)
    return dict(getattr(value, "__dict__", {})) if looks and not isinstance(value, _CODE) else {}


def _text(leaf: Any) -> str:
    """Return a text that differs if the value does; "" if nothing can be said."""
    if isinstance(leaf, _Listed):
        return f"# {type(leaf.value).__name__} {len(leaf.value)}{_entries(leaf.value)}"
    if isinstance(leaf, torch.Tensor):
        plain = leaf.device.type == "cpu" and leaf.layout is torch.strided
        some = leaf.detach().reshape(-1)[:: _step(leaf.numel())].contiguous() if plain else None
        digest = "" if some is None else _digest(some.view(torch.uint8).numpy())
        return f"# tensor {leaf.dtype} {tuple(leaf.shape)} {digest}"
    if isinstance(leaf, np.ndarray):
        entries = np.ascontiguousarray(leaf.reshape(-1)[:: _step(leaf.size)])
        digest = "" if leaf.dtype.hasobject else _digest(entries.view(np.uint8))
        return f"# array {leaf.dtype} {leaf.shape} {digest}"
    if isinstance(leaf, (str, bytes)) and len(leaf) > _LONG:
        part = leaf[:: _step(len(leaf))]
        data = part.encode(errors="backslashreplace") if isinstance(part, str) else part
        return f"# {type(leaf).__name__} {len(leaf)} {_digest(data)}"
    return "" if isinstance(leaf, (*_GENERATORS, io.IOBase)) else f"{_SINGLE}{leaf!r}"


def _step(entries: int) -> int:
    return -(-entries // _ENTRIES) or 1


def _digest(data: Any) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def _entries(value: Any) -> str:
    """Return a digest of the entries of a long list or dict."""
    if len(value) <= _FEW:
        return ""
    entries = value[:: _step(len(value))] if type(value) is not dict else value.items()
    try:
        some = list(islice(entries, _ENTRIES))
        packed = msgspec.msgpack.encode(some, enc_hook=lambda value: type(value).__qualname__)
    except Exception:  # noqa: BLE001  numbers that do not fit, or text that is not Unicode
        return ""
    return f" {_digest(packed)}"
