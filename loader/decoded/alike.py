"""Whether the ranks of a node decode alike: a description of functions that differs if they do.

Equal text means the same code with equal constants, defaults, closures and attributes. What a
function finds elsewhere (in globals, the environment) is not seen: all ranks must have the same.
"""

from __future__ import annotations

import functools
import hashlib
import marshal
import pickle
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any


def description(function: Any) -> str | None:
    """Describe a function of bytes; None if that is impossible, so that no other is alike.

    >>> description(len), description(functools.partial(int, base=2)) == description(int)
    ('builtins.len', False)
    """
    try:
        return _described(function)
    except Exception:  # noqa: BLE001  a user's object that cannot be pickled raises anything
        return None


def _described(value: Any) -> str:
    if isinstance(value, functools.partial):
        return f"partial({_described(value.func)} {_each(value.args)} {_named(value.keywords)})"
    if isinstance(value, MethodType):
        return f"method({_described(value.__func__)} {_described(value.__self__)})"
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        code = hashlib.blake2b(marshal.dumps(value.__code__), digest_size=16).hexdigest()
        more = _each([*(value.__defaults__ or ()), *cells]), _named(value.__kwdefaults__ or {})
        return f"{value.__module__}.{value.__qualname__}({code} {' '.join(more)})"
    if isinstance(value, type) or type(value) is BuiltinFunctionType:
        return f"{value.__module__}.{value.__qualname__}"
    return hashlib.blake2b(pickle.dumps(value, 4), digest_size=16).hexdigest()


def _each(values: Any) -> str:
    return ", ".join(map(_described, values))


def _named(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_described(value)}" for name, value in values.items())
