"""Where two samples differ that should be the same."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from creel.loader.decoded.codec import UnkeptError, encode

_pack = msgspec.msgpack.Encoder().encode


def difference(a: Any, b: Any, place: str = "") -> str | None:
    """Return the place of the first difference, "" for the whole; None if they are the same.

    >>> difference([1, {"x": 2.0}], [1, {"x": 3.0}]), difference((1, float("nan")), (1, float("nan")))
    ("[1]['x']", None)
    """
    if type(a) is type(b) and type(a) in {dict, list, tuple} and len(a) == len(b):
        keys = list(a) if type(a) is dict else range(len(a))
        if type(a) is not dict or keys == list(b):
            places = (difference(a[key], b[key], f"{place}[{key!r}]") for key in keys)
            return next((found for found in places if found is not None), None)
    return None if _same(a, b) else place


def _same(a: Any, b: Any) -> bool:
    try:
        (node, buffers), (other_node, others) = encode(a), encode(b)
        return (
            _pack(node) == _pack(other_node)
            and len(buffers) == len(others)
            and all(
                np.array_equal(np.frombuffer(x, np.uint8), np.frombuffer(y, np.uint8))
                for x, y in zip(buffers, others, strict=True)
            )
        )
    except (UnkeptError, UnicodeEncodeError):  # it is not kept in any case
        return True
