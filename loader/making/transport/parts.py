"""A batch that several workers make in parts: what its samples are, and how the parts are joined.

Only what `default_collate` makes of plain types is known to be the same in parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

_LEAVES = (int, float, bool, str, bytes)


class UnevenPartsError(ValueError):
    """Parts that make no batch together; made as a whole, the batch is torch's or its error."""


def kind_of(sample: object) -> str:
    """Return the types in a sample, as far as collation looks at them; "" if it cannot be cut.

    >>> kind_of((torch.zeros(2), {"a": 1})), kind_of([None])
    ("(t,{'a':int,},)", '')
    """
    kind = type(sample)
    if kind is torch.Tensor:
        return "t"
    if kind is np.ndarray:
        return "a"
    if kind in _LEAVES or isinstance(sample, np.generic):
        return kind.__name__
    if isinstance(sample, dict) and kind is dict and all(type(key) is str for key in sample):
        items = [(f"{key!r}:", kind_of(value)) for key, value in sample.items()]
        return _listed("{", items, "}")
    if isinstance(sample, (list, tuple)) and kind in {list, tuple}:
        ends = "[]" if kind is list else "()"
        return _listed(ends[0], [("", kind_of(value)) for value in sample], ends[1])
    return ""


def _listed(begin: str, items: Sequence[tuple[str, str]], end: str) -> str:
    if not all(kind for _, kind in items):
        return ""
    return begin + "".join(f"{name}{kind}," for name, kind in items) + end


def joined(parts: Sequence[Any], empty: Callable[..., torch.Tensor] = torch.empty) -> Any:
    """Return one batch of parts that `default_collate` has made, in order.

    Args:
        empty: makes the tensors, called as `torch.empty`.

    Raises:
        UnevenPartsError: they differ in more than the number of samples, or there are none.
    """
    if not parts:
        raise UnevenPartsError("their samples differ")
    first = parts[0]
    if len({type(part) for part in parts}) > 1:
        raise UnevenPartsError("their types differ")
    if type(first) is torch.Tensor:
        return _one_tensor(parts, empty)
    if isinstance(first, dict):
        if any(part.keys() != first.keys() for part in parts):
            raise UnevenPartsError("their keys differ")
        return {key: joined([part[key] for part in parts], empty) for key in first}
    if type(first) not in {list, tuple}:
        raise UnevenPartsError(f"a {type(first).__name__} has no parts")
    if first and all(isinstance(value, (str, bytes)) for value in first):
        return type(first)(value for part in parts for value in part)
    if len({len(part) for part in parts}) > 1:
        raise UnevenPartsError("their lengths differ")
    return type(first)(joined(field, empty) for field in zip(*parts, strict=True))


def _one_tensor(parts: Sequence[torch.Tensor], empty: Callable[..., torch.Tensor]) -> torch.Tensor:
    first = parts[0]
    plain = all(part.is_cpu and part.layout is torch.strided for part in parts)
    alike = len({(part.dtype, part.shape[1:], part.requires_grad) for part in parts}) == 1
    if not plain or not alike or not first.ndim or first.requires_grad:
        raise UnevenPartsError("their tensors differ")
    shape = (sum(map(len, parts)), *first.shape[1:])
    out = empty(shape, dtype=first.dtype, device="cpu")  # else cat may choose other strides
    return torch.cat(list(parts), out=out)
