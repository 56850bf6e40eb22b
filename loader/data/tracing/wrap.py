"""creel.wrap: an object in place of a dataset, which reads its samples through the node's daemon.

Frameworks copy, pickle, compare, iterate and walk datasets, set attributes of theirs, and ask for
their class. So the object is of a subclass of the dataset's class, and has the same `__dict__`: all
methods, and Python's operators, are the dataset's own, and an attribute that is set on one of the
two is set on both. Only these differ:

* Samples are read by the dataset itself, the object that was given to `wrap`, through
  `wrapped_reads`: its code runs as it does without creel. (Inside creel's own loader that only
  delegates; `intercept` serves the files that it opens.)
* Copies and pickles hold a copy of the dataset, which they read.
* There is always a `__getitems__`, which reads a batch in one step.

`__class__` is the dataset's, which comparisons, `functools.singledispatch` and further objects of
the class (`self.__class__(...)`) go by; only `type` tells the difference. The subclass is made
without running `__init_subclass__` or the metaclass, which may keep a register of classes. State in
`__slots__` is reached through descriptors. State in C (of a list, an array, a class of Cython)
cannot be shared, so `wrap` refuses such objects. Code that replaces the whole `__dict__` of a
dataset (rather than change it) must do so through the wrapped object, else that keeps the old one.
"""

from __future__ import annotations

import copy
from abc import ABCMeta
from collections.abc import Iterable, Sequence
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any, TypeVar, cast

from torch.utils.data import IterableDataset

from creel.cache.storage.stores.access import Options
from creel.errors import ConfigError
from creel.loader.data.binding.wrapped import (
    Reading,
    Wrapped,
    Wrapping,
    is_wrapped,
    reads_of,
    unwrap,
)
from creel.loader.data.datasets.base import Sample, fetch_many
from creel.loader.data.tracing.wrapped_reads import WrappedReads

D = TypeVar("D")


def wrap(dataset: D, *, whole: bool = False, storage_options: Options = None) -> D:
    """Return an object to use in place of a map-style dataset, for any loader.

    The files that the dataset opens are cached and read ahead: from its first epoch on if it lists
    them, else from the second (docs/datasets.md). A dataset that is wrapped already is returned as
    it is.

    Args:
        dataset: the dataset, unchanged.
        whole: cache every file that a sample opens, however little of it the sample is seen to
            read. For samples that map files (`np.memmap`, `mmap`), or read them by `os.open`, and
            need most of each.
        storage_options: with which the dataset calls `creel.read` and `creel.open`: remote
            addresses that it reads with the same options are cached.

    Raises:
        ConfigError: an iterable dataset, an object without `__getitem__`, one whose state is not
            that of a Python class, or an option for a dataset that is wrapped already.
    """
    if is_wrapped(dataset):
        if whole or storage_options is not None:
            option = "whole=True" if whole else "storage_options"
            raise ConfigError(f"this dataset is wrapped already: give {option} to that creel.wrap")
        return cast(D, dataset)
    if isinstance(dataset, IterableDataset):
        raise ConfigError("creel.wrap takes a map-style dataset, not an IterableDataset")
    if isinstance(dataset, type):
        name = dataset.__name__
        raise ConfigError(f"creel.wrap takes a dataset, not its class: creel.wrap({name}(...))")
    if not hasattr(dataset, "__getitem__"):
        raise ConfigError(f"creel.wrap takes a dataset, not {dataset!r}")
    return cast(D, _wrapped(dataset, Wrapping(whole, storage_options)))


class StandIn(Wrapped):
    """The methods of a wrapped dataset that are not the dataset's; first base of its class."""

    __slots__ = ()

    def __init_subclass__(cls, *, made_by_creel: bool = False) -> None:
        """Do not call that of the dataset's class."""
        if not made_by_creel:
            raise TypeError("derive from the dataset's own class, and wrap an object of that")

    def _creel_begin(self) -> WrappedReads:
        dataset: Any = object.__new__(type(self).__bases__[1])
        state = _dict(type(dataset))
        if state is not None:
            state.__set__(dataset, state.__get__(self))
        reads = WrappedReads(dataset)
        object.__setattr__(self, "_creel_reads", reads)
        return reads

    def __getitem__(self, index: Any) -> Sample:
        return reads_of(self).read([index], lambda dataset: dataset[index])

    def __getitems__(self, indices: Sequence[int]) -> Iterable[Sample]:
        return reads_of(self).read(indices, lambda dataset: fetch_many(dataset, indices))

    @property  # type: ignore[misc]  # object has a plain attribute here; this is intended
    def __class__(self) -> type:
        return unwrap(self).__class__  # type: ignore[no-any-return]

    def __copy__(self) -> Any:
        reads = reads_of(self)
        return _wrapped(copy.copy(reads.dataset), reads.wrapping)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        reads = reads_of(self)
        twin = memo[id(self)] = _blank(type(reads.dataset))  # the dataset may hold `self`
        _fill(twin, WrappedReads(copy.deepcopy(reads.dataset, memo), wrapping=reads.wrapping))
        return twin

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        reads = reads_of(self)
        return _blank, (type(reads.dataset),), reads, None, None, _fill


def _wrapped(dataset: Any, wrapping: Wrapping) -> Any:
    try:
        stand_in = _blank(type(dataset))
    except TypeError:
        name = type(dataset).__name__
        raise ConfigError(
            f"creel.wrap cannot stand in for a {name}, whose contents are not in attributes of a "
            f"Python class: hold it in a torch Dataset of your own, and wrap that (if reading the "
            f"{name} opens no files, just do not wrap it)"
        ) from None
    _fill(stand_in, WrappedReads(dataset, wrapping=wrapping))
    return stand_in


def _blank(kind: type) -> Wrapped:
    """Return a wrapped object for a dataset of this class, without the dataset.

    Raises:
        TypeError: instances of the class have state in C.
    """
    return cast(Wrapped, object.__new__(_class_over(kind)))


def _fill(stand_in: Wrapped, reads: Reading) -> None:
    """Complete what `_blank` returned for the class of this dataset."""
    object.__setattr__(stand_in, "_creel_reads", reads)
    state = _dict(type(reads.dataset))
    if state is not None:
        state.__set__(stand_in, state.__get__(reads.dataset))


def _class_over(kind: type) -> type:
    """Return the class of wrapped datasets of a class, always the same while any exists."""
    known: list[type] = type.__subclasses__(kind)
    for known_class in known:
        if known_class.__bases__ == (StandIn, kind):
            return known_class
    names: dict[str, Any] = {name: getattr(kind, name) for name in ("__module__", "__doc__")}
    names |= {"__qualname__": kind.__qualname__, "__slots__": ("_creel_reads",)}
    names |= {name: _SharedSlot(slot) for name, slot in _slots(kind)}
    state = _dict(kind)
    if state is not None:
        names["__dict__"] = _SharedDict(state)
    if hasattr(kind, "__del__"):
        names["__del__"] = _end
    meta = type(kind)
    new: Any = ABCMeta.__new__ if issubclass(meta, ABCMeta) else type.__new__
    stand_in_class: type = new(meta, kind.__name__, (StandIn, kind), names, made_by_creel=True)
    type.__delattr__(stand_in_class, "__slots__")  # the state of the object is that of the dataset
    return stand_in_class


def _dict(kind: type) -> Any:
    """Return the descriptor of `__dict__` for instances of a class; None if they have none."""
    descriptors = (vars(base).get("__dict__") for base in kind.__mro__)
    return next(
        (descriptor for descriptor in descriptors if isinstance(descriptor, GetSetDescriptorType)),
        None,
    )


def _slots(kind: type) -> Iterable[tuple[str, Any]]:
    """Yield the name and descriptor of each slot that instances of a class have."""
    for name in dict.fromkeys(name for base in kind.__mro__ for name in vars(base)):
        descriptor = next(vars(base)[name] for base in kind.__mro__ if name in vars(base))
        if isinstance(descriptor, MemberDescriptorType):
            yield name, descriptor


class _SharedSlot:
    """A slot of the dataset, as an attribute of the wrapped one."""

    def __init__(self, slot: Any) -> None:
        self._slot = slot

    def __get__(self, wrapped: Any, kind: object = None) -> Any:
        return self if wrapped is None else self._slot.__get__(unwrap(wrapped))

    def __set__(self, wrapped: Any, value: object) -> None:
        self._slot.__set__(unwrap(wrapped), value)

    def __delete__(self, wrapped: Any) -> None:
        self._slot.__delete__(unwrap(wrapped))


class _SharedDict(_SharedSlot):
    """`__dict__`, which code may replace."""

    def __set__(self, wrapped: Any, value: object) -> None:
        super().__set__(wrapped, value)
        self._slot.__set__(wrapped, value)


def _end(wrapped: Any) -> None:
    """`__del__` of a wrapped object: the dataset's own runs when that goes."""
    try:
        object.__getattribute__(wrapped, "_creel_reads")
    except AttributeError:  # nobody has read it
        type(wrapped).__bases__[1].__del__(wrapped)  # type: ignore[attr-defined]  # it has one
