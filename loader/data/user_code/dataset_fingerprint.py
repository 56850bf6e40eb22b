"""Which datasets, in other ranks or in later jobs, look like this one.

It is not certain that they are the same. Datasets that do not look alike, or from which the same
sample reads different files (`recorder`), are never mixed. A mix-up that is not detected would cost
speed only, since reads are looked up by address in any case.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import PurePath
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

#: Depth of datasets inside datasets that is examined, and attributes of each.
_DEPTH, _ATTRIBUTES = 4, 100
_ENDS = [0, -1]
_PLAIN = frozenset({type(None), bool, int, float, str})
_LISTS = frozenset({list, tuple, range})


def likeness(dataset: object, depth: int = _DEPTH) -> str:
    """Describe what equal datasets share: classes, plain attributes, lengths and ends of lists.

    No user code runs. Lists of files that differ by rank have different first entries, and datasets
    that hold their rank differ too.

    >>> likeness([3, "a", b"b", 2.5]), likeness({"root": "/data"})
    ('list 4 (3, bytes, 2.5)', "dict 1 ('root': '/data')")
    """
    kind: Any = type(dataset)
    if kind in _PLAIN or isinstance(dataset, np.number):
        return repr(dataset)
    if isinstance(dataset, PurePath):
        return f"{kind.__qualname__} {dataset}"
    if not depth:
        return str(kind.__qualname__)
    if kind is np.ndarray:
        array = cast("NDArray[Any]", dataset)
        return f"ndarray {array.shape} {array.flat[_ENDS] if array.size else ''}"
    if kind in _LISTS:
        listed = cast("list[object]", dataset)
        middle = len(listed) // 2
        some = [*listed[:1], *listed[middle : middle + 1], *listed[-1:]]
        return f"{kind.__qualname__} {len(listed)} ({_each(some, depth)})"
    held: Any = dataset if kind is dict else _attributes(dataset, depth)
    entries = islice(held.items(), _ATTRIBUTES)
    inside = ", ".join(f"{likeness(k, 0)}: {likeness(v, depth - 1)}" for k, v in entries)
    return f"{kind.__qualname__} {len(held)} ({inside})" if held else str(kind.__qualname__)


def _attributes(value: object, depth: int) -> dict[str, object]:
    """Return the attributes of a dataset; {} for any other value."""
    whole = depth == _DEPTH or isinstance(value, Dataset)
    return dict(vars(value)) if whole and hasattr(value, "__dict__") else {}


def _each(values: Sequence[object], depth: int) -> str:
    return ", ".join(likeness(value, depth - 1) for value in values)
