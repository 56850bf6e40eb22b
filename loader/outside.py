"""Whether a sampler's code touches what a copy of the sampler would share with the original.

`drain` runs a copy. Where the copy draws from a generator of the module, counts in a global or in
its class, or takes from a queue, the original would find them moved and give other batches than
torch's. So the code is read first: the sampler's methods, and the functions, methods and classes
that they lead to by name, as far as they are the person's own. What is never written may be shared,
and a list of numbers in a module that may be written is watched: most never are.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import random
import sys
import types
from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Sampler

from creel.loader.alike import is_users_module

_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_CONTAINERS = (list, dict, set, bytearray, deque, np.ndarray, torch.Tensor)
#: Methods that change a container.
_CHANGERS = frozenset(
    (
        *("add", "append", "appendleft", "clear", "difference_update", "discard", "extend"),
        *("extendleft", "insert", "pop", "popitem", "popleft", "remove", "reverse", "rotate"),
        *("setdefault", "shuffle", "sort", "update"),
    )
)
#: Code of these keeps its state to itself.
_SETTLED = (sys.stdlib_module_names - {"__main__"}) | {"torch", "numpy", "creel"}
#: How deep to look into objects within objects, and how far into lists of them.
_DEPTH, _MANY = 4, 64
#: Containers of no more of these are watched.
_ATOMS = frozenset({int, float, bool, str, bytes, type(None)})
_PLAIN = 100_000


class _Visit(NamedTuple):
    function: types.FunctionType
    #: An object whose attributes the copy shares, None where they are the copy's own.
    shared: object


class _Code(NamedTuple):
    """What a function and those within it do."""

    names: frozenset[str]
    sets: frozenset[str]  # attributes that are assigned
    changes: bool  # some container
    rebinds: bool  # a global or a variable around it


def reaches_out(thing: object, kept: list[object]) -> list[object] | None:
    """What running a deep copy of `thing`, in which `kept` stay themselves, might change.

    Returns:
        containers to be put under `Watched` meanwhile; None: it may be noticed all the same.
    """
    search = _Search(kept)
    search.into(thing, _DEPTH)
    return None if search.run() else search.watched


class Watched:
    """Containers that stay as they are: put back at the end of the block if they were changed."""

    def __init__(self, containers: list[object]) -> None:
        self._before: list[tuple[Any, Any]] = [(c, _copied(c)) for c in containers]
        self.changed = False

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *exc: object) -> None:
        for container, before in self._before:
            if not _equal(container, before):
                self.changed = True
                _put_back(container, before)


class _Search:
    def __init__(self, kept: list[object]) -> None:
        self._kept = kept
        self._queue: deque[_Visit] = deque()
        self._met: set[tuple[int, int]] = set()
        self._own: set[str] = set()  # attributes of what is copied
        self.watched: list[object] = []
        self._classes: list[type] = []

    def run(self) -> bool:
        """Go wherever the code leads."""
        return any(self._touches(*visit) for visit in self._visits())

    def _visits(self) -> Iterator[_Visit]:
        while self._queue:
            visit = self._queue.popleft()
            key = id(visit.function), id(visit.shared)
            if key not in self._met:
                self._met.add(key)
                yield visit

    # --- what there is ------------------------------------------------------------------------

    def into(self, thing: object, depth: int) -> None:
        """Look at the code of an object that is copied, and of those it holds."""
        if depth == 0 or any(thing is k for k in self._kept):
            return
        if isinstance(thing, types.FunctionType):
            self._queue.append(_Visit(thing, None))
        elif isinstance(thing, types.MethodType):
            self.into(thing.__func__, depth)
            self.into(thing.__self__, depth - 1)
        elif isinstance(thing, functools.partial):
            for part in (thing.func, *thing.args, *thing.keywords.values()):
                self.into(part, depth - 1)
        elif isinstance(thing, (list, tuple, dict)) and len(thing) <= _MANY:
            for part in thing.values() if isinstance(thing, dict) else thing:
                self.into(part, depth - 1)
        elif _is_theirs(type(thing)) or isinstance(thing, Sampler):
            held: dict[str, object] = getattr(thing, "__dict__", {})
            self._own |= held.keys()
            self._class(type(thing))
            for part in held.values():
                self.into(part, depth - 1)

    def _class(self, kind: type) -> None:
        for base in filter(_is_theirs, kind.__mro__):
            self._classes.append(base)
            for value in vars(base).values():
                for function in _functions_in(value):
                    self._queue.append(_Visit(function, None))

    # --- what it does -------------------------------------------------------------------------

    def _touches(self, function: types.FunctionType, shared: object) -> bool:
        code = _read(function.__code__)
        if code.rebinds or (shared is not None and code.sets):
            return True
        if self._on_classes(code):
            return True
        return any(self._on_kept(kept, code) for kept in self._kept) or any(
            self._on_outer(value, code) for value in _outer(function, code.names)
        )

    def _on_classes(self, code: _Code) -> bool:
        """Whether it changes what the instances of a class have in common, copied or not."""
        sets = code.sets if {"type", "__class__"} & code.names else frozenset()
        for kind in self._classes:
            common = vars(kind)
            if any(name in common for name in sets):
                return True
            for value in (common[name] for name in code.names & common.keys()):
                if _moves(value) or (isinstance(value, _CONTAINERS) and self._alters(value, code)):
                    return True
        return False

    def _on_kept(self, kept: object, code: _Code) -> bool:
        """Whether the code assigns to an object that the copy shares, or calls what may."""
        own = self._own.union(*map(vars, self._classes))  # a name of both is taken for the copy's
        self._follow(kept, code.names - own)
        held: dict[str, object] = getattr(kept, "__dict__", {})
        return any(name in held for name in code.sets - own)

    def _on_outer(self, value: object, code: _Code) -> bool:
        if isinstance(value, types.ModuleType):
            return False
        if isinstance(value, types.FunctionType):
            if _is_users(value):
                self._queue.append(_Visit(value, None))
            return False
        if isinstance(value, _CONTAINERS):
            return self._alters(value, code)
        held: dict[str, object] = dict(getattr(value, "__dict__", {}))
        if isinstance(value, type):
            if _is_users(value):
                self._class(value)
        elif _moves(value) or (_is_users(type(value)) and any(map(_moves, held.values()))):
            return True
        else:
            self._follow(value, code.names)
        return any(name in held for name in code.sets)

    def _alters(self, container: object, code: _Code) -> bool:
        """Whether the code may change a container for good."""
        if not code.changes:
            return False
        if not _is_plain(container):
            return True
        if not any(container is other for other in self.watched):
            self.watched.append(container)
        return False

    def _follow(self, shared: object, names: frozenset[str]) -> None:
        """The methods of a shared object that the code may call."""
        kind = type(shared)
        for name in (names | {"__call__", "__iter__"}) if _is_users(kind) else ():
            for function in _functions_in(getattr(kind, name, None)):
                self._queue.append(_Visit(function, shared))


def _is_plain(container: Any) -> bool:
    """Whether a copy of it is cheap and holds nothing that it shares."""
    if isinstance(container, np.ndarray):
        return container.size <= _PLAIN and not container.dtype.hasobject
    if isinstance(container, torch.Tensor):
        return container.numel() <= _PLAIN
    if len(container) > _PLAIN:
        return False
    items = chain(container, container.values()) if isinstance(container, dict) else container
    return _ATOMS.issuperset(map(type, items))


def _copied(container: Any) -> Any:
    return container.clone() if isinstance(container, torch.Tensor) else container.copy()


def _equal(container: Any, before: Any) -> bool:
    if isinstance(container, np.ndarray):
        same: bool = container.shape == before.shape
        return same and container.tobytes() == before.tobytes()
    if isinstance(container, torch.Tensor):
        return torch.equal(container, before)
    same = container == before
    return same and list(container) == list(before)  # in the same order, too


def _put_back(container: Any, before: Any) -> None:
    if isinstance(container, (np.ndarray, torch.Tensor)):
        container[...] = before
        return
    container.clear()
    (container.update if isinstance(container, (dict, set)) else container.extend)(before)


def _moves(value: object) -> bool:
    """Whether using it changes it: a generator, an iterator, a queue."""
    if isinstance(value, type):
        return False
    is_queue = hasattr(value, "put") and hasattr(value, "get")
    return is_queue or isinstance(value, (*_GENERATORS, Iterator))


def _is_theirs(code: object) -> bool:
    """Whether a class or function is the person's or a library's: all samplers are read."""
    module = getattr(code, "__module__", None) or "builtins"
    return module.partition(".")[0] not in _SETTLED


def _is_users(code: object) -> bool:
    """Whether a class or function is of a module of the person's own, no library's."""
    return is_users_module(getattr(code, "__module__", None) or "builtins")


def _functions_in(value: object) -> Iterator[types.FunctionType]:
    found = (value.fget,) if isinstance(value, property) else (value,)
    for each in found:
        inner = getattr(each, "__func__", getattr(each, "__wrapped__", each))
        if isinstance(inner, types.FunctionType) and inner.__name__ != "__init__":
            yield inner  # a copy is not made by __init__


def _outer(function: types.FunctionType, names: frozenset[str]) -> Iterator[object]:
    """The module-level and enclosing values that a function names."""
    scope = function.__globals__
    for name in names & scope.keys():
        yield scope[name]
        if isinstance(scope[name], types.ModuleType) and is_users_module(scope[name].__name__):
            inner = vars(scope[name])
            yield from (inner[attr] for attr in names & inner.keys())
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            if name != "__class__":  # super()'s
                yield cell.cell_contents
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()


@functools.cache
def _read(code: types.CodeType) -> _Code:
    names, sets, changes, rebinds = set(code.co_names), set(), False, False
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        if name == "STORE_ATTR":
            sets.add(str(instruction.argval))
        elif name in {"STORE_GLOBAL", "DELETE_GLOBAL"}:
            rebinds = True
        elif name in {"STORE_DEREF", "DELETE_DEREF"}:
            rebinds |= instruction.argval in code.co_freevars
        elif name in {"STORE_SUBSCR", "DELETE_SUBSCR"}:
            changes = True
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _read(constant)
            names |= inner.names
            sets |= inner.sets
            changes |= inner.changes
            # It may rebind a variable of this very call.
            rebinds |= inner.rebinds and not set(constant.co_freevars) <= set(code.co_cellvars)
    changes |= not _CHANGERS.isdisjoint(names)
    return _Code(frozenset(names), frozenset(sets), changes, rebinds)
