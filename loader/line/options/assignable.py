"""AssignableProperty: an attribute that a subclass may use for something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class AssignableProperty(Generic[T]):
    """Like `property`, but what is assigned to the name is an attribute like any other."""

    def __init__(self, get: Callable[[Any], T]) -> None:
        self._get = get
        self.__doc__ = get.__doc__

    @overload
    def __get__(self, of: None, kind: type) -> AssignableProperty[T]: ...
    @overload
    def __get__(self, of: object, kind: type) -> T: ...
    def __get__(self, of: object | None, kind: type) -> AssignableProperty[T] | T:
        return self if of is None else self._get(of)
