"""Would a new worker see the same world as this living one? Then it need not be a new one.

torch starts new workers for every epoch (unless `persistent_workers`), and each is a fresh copy of
the trainer: of the dataset as it is now, and under fork of every global. A living worker can stand
in for a new one when nothing can tell the difference:

- dataset and `collate_fn` are replaced by a fresh unpickle of what the trainer has now
  (`snapshot`); what does not pickle, or would come out of a pickle otherwise than out of a fork,
  says no;
- the data that their code can reach by name has the same content in both processes (`world_of`):
  globals, class attributes, closures and defaults of the functions of the user's own modules, and
  some state of the process. Code of installed packages is taken to keep its state to itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pickle
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.collate import default_collate_fn_map

#: Largest pickle, bytes, by start method; of the world, too. A fork costs about 30 ms, a spawn 3 s
#: and more (importing torch); pickling and unpickling runs at about 200 MB/s.
CAP = {"fork": 4 << 20, "spawn": 64 << 20, "forkserver": 64 << 20}
#: What takes its time whatever its size counts as so many bytes: an object such as an array, and a
#: tensor, which goes through `torch.save` as three objects.
_OBJECT, _TENSOR = 2 << 10, 4 << 10

_hash = partial(hashlib.blake2b, digest_size=16)
_CODE = (types.FunctionType, type)
_OPAQUE = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_BOOKKEEPING = frozenset(
    (
        "__dict__",
        "__weakref__",
        "__doc__",
        "__module__",
        "__annotations__",
        "__slots__",
        "__qualname__",
        "__firstlineno__",
        "__slotnames__",
        "__static_attributes__",
        "__parameters__",
        "__orig_bases__",
        "__abstractmethods__",
        "_abc_impl",
        "__annotate_func__",
        "__annotations_cache__",
        "__type_params__",
        "__match_args__",
        "__dataclass_fields__",
        "__dataclass_params__",
    )
)
#: Variables that libraries and shells set behind Python's back, and that say nothing about data.
_IDLE_VARIABLES = frozenset({"COLUMNS", "LINES", "PYTEST_CURRENT_TEST", "_"})
_REDUCERS = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__")


class UnlikeError(Exception):
    """Only a new process would do; the message says why."""


@dataclass(frozen=True)
class Snapshot:
    """The trainer's dataset, collate_fn and so on at one moment.

    Without a `blob` living workers keep theirs, if their own `steady` has the same `world`.
    `thaw(blob)` gives fresh ones and the roots of their world; `digest` is its content; `world` is
    what `world_of(roots)` gave in the trainer.
    """

    blob: bytes
    digest: bytes
    world: bytes


def snapshot(what: tuple[object, ...], start_method: str) -> Snapshot:
    """Freeze what a new worker would be born with: dataset, collate_fn and whatever else.

    Raises:
        UnlikeError: a living worker cannot become what a new one would be.
    """
    frozen = io.BytesIO()
    pickler = _Pickler(
        _Sink(frozen.write, CAP.get(start_method, 0)), through_fork=start_method == "fork"
    )
    try:
        pickler.dump(what)
        body = frozen.getvalue()
        roots = pickler.met
        world = world_of(roots, start_method)
        blob = pickle.dumps((_Raw(body), roots), 5)
    except UnlikeError:
        raise
    except Exception as e:  # pickling runs the user's code
        raise UnlikeError(f"{type(e).__name__}: {e}") from e
    return Snapshot(blob, _hash(body).digest(), world)


def steady(what: tuple[object, ...], start_method: str) -> Snapshot:
    """A snapshot of what never changes, but for `what`: living workers keep all they have.

    Raises:
        UnlikeError: `what` has no content to compare.
    """
    frozen = snapshot(what, start_method)
    return Snapshot(b"", frozen.digest, frozen.digest + frozen.world)


def thaw(blob: bytes | memoryview) -> tuple[Any, list[object]]:
    """A fresh copy of what a snapshot froze, and the roots of its world."""
    raw, roots = pickle.loads(blob)  # noqa: S301  made by `snapshot` in our own parent
    return pickle.loads(raw.body), roots  # noqa: S301


def world_of(roots: list[object], start_method: str) -> bytes:
    """Digest of all data that the code of `roots` (classes, functions) can reach by name.

    Raises:
        UnlikeError: something in reach has no content that could be compared, or all of it together
            is too much.
    """
    digest = _hash()
    sink = _Sink(digest.update, CAP.get(start_method, 0))
    sink.write(_process_state())
    met: set[int] = set()
    queue = [code for code in roots if _is_users(code)]
    while queue:
        code = queue.pop()
        if id(code) in met:
            continue
        met.add(id(code))
        for name, value in _reach(code):
            sink.write(name.encode())
            queue += _absorb(value, sink)
    return digest.digest()


@dataclass(frozen=True)
class _Raw:
    body: bytes


def _process_state() -> bytes:
    state = (
        sorted((k, v) for k, v in os.environ.items() if k not in _IDLE_VARIABLES),
        Path.cwd(),
        str(torch.get_default_dtype()),
        [(repr(kind), _name_of(fn)) for kind, fn in default_collate_fn_map.items()],
    )
    return pickle.dumps(state)


def _name_of(value: object) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"


def _absorb(value: object, sink: _Sink) -> list[object]:
    """Take the content of a value into a digest; the user's code that it leads to."""
    code = _code_in(value)
    if code is not None:
        sink.write(_name_of(code).encode())
        cache = getattr(getattr(value, "__func__", value), "cache_info", None)
        if cache is not None:  # functools.cache: what it remembers, a new process would not
            sink.write(repr(cache()).encode())
        return [code] if _is_users(code) else []
    if isinstance(value, types.ModuleType):
        sink.write(value.__name__.encode())
        return []
    pickler = _Pickler(sink, through_fork=False)
    try:
        pickler.dump(value)
    except UnlikeError:
        raise
    except Exception as e:
        raise UnlikeError(f"a {type(value).__name__} has no content to compare: {e}") from e
    return [code for code in pickler.met if _is_users(code)]


def _code_in(value: object) -> object | None:
    """The function or class that a value is or merely wraps."""
    for _ in range(8):
        if isinstance(value, _CODE):
            return value
        if isinstance(value, (staticmethod, classmethod)) or type(value).__name__ in (
            "_lru_cache_wrapper",
            "cached_property",
        ):
            value = getattr(value, "__wrapped__", None) or getattr(value, "func", None)
        elif isinstance(value, _OPAQUE):
            return value
        else:
            return None
    return None


def _reach(code: object) -> Iterator[tuple[str, object]]:
    if isinstance(code, type):
        yield from _reach_of_class(code)
    elif isinstance(code, types.FunctionType):
        yield from _reach_of_function(code)


def _reach_of_class(cls: type) -> Iterator[tuple[str, object]]:
    for base in cls.__mro__:
        if not _is_users(base):
            continue
        for name, value in vars(base).items():
            if name in _BOOKKEEPING or isinstance(
                value, (types.MemberDescriptorType, types.GetSetDescriptorType)
            ):
                continue
            if isinstance(value, property):
                for part in (value.fget, value.fset, value.fdel):
                    if part is not None:
                        yield f"{base.__qualname__}.{name}", part
            else:
                yield f"{base.__qualname__}.{name}", value


def _reach_of_function(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    names = _names(function.__code__)
    scope = function.__globals__
    for name in names:
        if name not in scope:
            continue
        value = scope[name]
        yield name, value
        if isinstance(value, types.ModuleType) and is_users_module(value.__name__):
            inner = vars(value)
            yield from ((f"{name}.{attr}", inner[attr]) for attr in names if attr in inner)
    yield "defaults", (function.__defaults__ or ())
    yield "kwdefaults", (function.__kwdefaults__ or {})
    if function.__dict__.keys() - {"__wrapped__"}:
        yield "dict", {k: v for k, v in function.__dict__.items() if k != "__wrapped__"}
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # still empty
            yield "cell", cell.cell_contents


@cache
def _names(code: types.CodeType) -> tuple[str, ...]:
    """All global and attribute names of a function and the functions inside it, in order."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(dict.fromkeys(_names(constant)))
    return tuple(names)


def _is_users(code: object) -> bool:
    return is_users_module(getattr(code, "__module__", None) or "builtins")


_INSTALLED = tuple(
    {sysconfig.get_path(p) for p in ("stdlib", "platstdlib", "purelib", "platlib")} - {None}
)


@cache
def is_users_module(name: str) -> bool:
    """Whether a module is the person's own: not the standard library, installed, or creel."""
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names - {"__main__"} or top == "creel":
        return False
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if file is None:  # typed in, made by exec, or built in; Cython's types are of no module at all
        return module is not None and name not in sys.builtin_module_names
    return not (file.startswith(_INSTALLED) or "site-packages" in file or "dist-packages" in file)


class _Sink:
    """A file for pickles that refuses what is too much, before it is copied."""

    def __init__(self, keep: Callable[[bytes], object], cap: int) -> None:
        """`keep` is given what is written, at most `cap` bytes."""
        self._keep = keep
        self._room = cap

    def fit(self, nbytes: int) -> None:
        """Raise UnlikeError unless there is room for so much."""
        if nbytes > self._room:
            raise UnlikeError("too big to compare")

    def spend(self, nbytes: int) -> None:
        """Take so much of the room. Raises as `fit`."""
        self.fit(nbytes)
        self._room -= nbytes

    def write(self, data: bytes) -> int:
        """Keep the data. Raises as `fit`."""
        self.spend(len(data))
        self._keep(data)
        return len(data)


class _Pickler(pickle.Pickler):
    """Notes the classes and functions it meets, and refuses what a pickle would change."""

    def __init__(self, sink: _Sink, *, through_fork: bool) -> None:
        super().__init__(sink, 5)
        self.met: list[object] = []
        self._sink = sink
        self._through_fork = through_fork
        self._storages: set[int] = set()

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, (*_CODE, *_OPAQUE)):
            if isinstance(obj, _CODE):
                self.met.append(obj)
            return NotImplemented
        self._sink.spend(_TENSOR if isinstance(obj, torch.Tensor) else _OBJECT)
        if isinstance(obj, np.ndarray):
            self._sink.fit(obj.nbytes)  # or it would be copied first
        if isinstance(obj, torch.Tensor):
            self._check_tensor(obj)
        elif isinstance(obj, np.memmap):
            raise UnlikeError("a memory map would become a copy")
        elif self._through_fork and _is_users(type(obj)):
            kind: Any = type(obj)
            _check_reducers(kind)
        return NotImplemented

    def _check_tensor(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cpu" or tensor.is_shared():  # type: ignore[no-untyped-call]  # torch's
            raise UnlikeError("a tensor is shared with other processes or devices")
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            self._sink.fit(storage.nbytes())  # it goes whole, and would be copied first
            address = storage.data_ptr()
            if address and address in self._storages:
                raise UnlikeError("two tensors share a storage")
            self._storages.add(address)


@cache
def _check_reducers(cls: Any) -> None:
    """Refuse classes that say themselves what goes into a pickle: a fork copies everything."""
    if issubclass(cls, tuple):
        return  # a named tuple's __getnewargs__ is not the person's
    for base in cls.__mro__:
        if _is_users(base) and any(name in vars(base) for name in _REDUCERS):
            raise UnlikeError(f"{cls.__qualname__} decides itself what is pickled")
