"""What creel.wrap returns behaves as the dataset does, whatever class that is of."""

from __future__ import annotations

import abc
import array
import collections
import copy
import dataclasses
import functools
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, random_split

import creel
from creel.errors import ConfigError
from creel.loader.data.binding.wrapped import is_wrapped, unwrap

T = TypeVar("T")
registered: list[str] = []


@pytest.fixture(autouse=True)
def _without_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CREEL_LOADER__EMBED", "false")


class Reads:
    """What all datasets of this module have in common: they have `k` and `items`."""

    __slots__ = ()
    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            part = copy.copy(self)
            part.items = self.items[i]
            return part
        return self.items[i] * self.k


class Plain(Reads):
    def __init__(self, k: int = 1) -> None:
        self.k, self.items = k, list(range(10))


class Torch(Plain, Dataset[int]):
    def __iter__(self) -> Iterator[Any]:
        return iter([("iter", x) for x in self.items])

    def __contains__(self, x: object) -> bool:
        return x == "in"

    def __call__(self, x: int) -> int:
        return x + self.k

    def __add__(self, other: object) -> str:  # type: ignore[override]  # as a person's may
        return "added"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return 5

    def __bool__(self) -> bool:
        return False

    def __enter__(self) -> Torch:
        return self

    def __exit__(self, *_: object) -> bool:
        return True

    def __str__(self) -> str:
        return "a dataset"


class Many(Plain, Dataset[int]):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[i] + 100 for i in indices]


class Typed(Plain, Generic[T]):
    pass


class Slots(Reads):
    __slots__ = ("__weakref__", "_private", "items", "k")

    def __init__(self, k: int = 1) -> None:
        self.k, self.items, self._private = k, list(range(10)), 3


class SlotsAndMore(Slots):
    def __init__(self, k: int = 1) -> None:
        super().__init__(k)
        self.more = 4


@dataclasses.dataclass
class Data(Reads):
    k: int = 1
    items: list[int] = dataclasses.field(default_factory=lambda: list(range(10)))


@dataclasses.dataclass(frozen=True)
class Frozen(Reads):
    k: int = 1
    items: list[int] = dataclasses.field(default_factory=lambda: list(range(10)))


@dataclasses.dataclass(slots=True)
class DataSlots(Reads):
    k: int = 1
    items: list[int] = dataclasses.field(default_factory=lambda: list(range(10)))


class Abstract(abc.ABC):
    @abc.abstractmethod
    def __getitem__(self, i: Any) -> Any: ...


class Concrete(Plain, Abstract):
    pass


class Register(type):
    def __new__(cls, name: str, bases: Any, names: Any, **_: Any) -> Any:
        registered.append(name)
        return super().__new__(cls, name, bases, names)

    def __init__(cls, name: str, bases: Any, names: Any, **more: int) -> None:
        _ = more["needed"]
        super().__init__(name, bases, names)

    def __call__(cls, *args: Any) -> Any:
        registered.append("called")
        return super().__call__(*args)


class Registered(Plain, metaclass=Register, needed=1):
    pass


class Announced(Plain):
    def __init_subclass__(cls, **more: Any) -> None:
        _ = more["needed"]
        registered.append(cls.__name__)


class Announcing(Announced, needed=1):
    pass


class Delegating(Reads):
    """Finds all attributes in another object."""

    def __init__(self, k: int = 1) -> None:
        self.inner = Plain(k)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # while a copy is being made
            raise AttributeError(name)
        return getattr(self.inner, name)


class Guarded(Plain):
    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_creel"):
            raise RuntimeError(name)
        return super().__getattribute__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in {"k", "items"}:
            raise RuntimeError(name)
        super().__setattr__(name, value)


class Module(torch.nn.Module, Plain):
    def __init__(self, k: int = 1) -> None:
        super().__init__()
        Plain.__init__(self, k)
        self.weight = torch.nn.Parameter(torch.zeros(2))


class Reduced(Plain):
    """Is made anew by its constructor, as a dataset with an open file is."""

    def __init__(self, k: int = 1) -> None:
        super().__init__(k)
        self.lock = threading.Lock()

    def __reduce__(self) -> Any:
        return type(self), (self.k,)


KINDS: list[Callable[..., Any]] = [
    *(Plain, Torch, Many, Typed[int], Slots, SlotsAndMore, Data, Frozen, DataSlots, Concrete),
    *(Registered, Announcing, Delegating, Guarded, Module, Reduced),
]
COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda dataset: pickle.loads(pickle.dumps(dataset)),
    "old pickle": lambda dataset: pickle.loads(pickle.dumps(dataset, 2)),
}


def state(dataset: Any) -> Any:
    """Return the values of all attributes of an instance that can be compared."""
    names = [*getattr(dataset, "__dict__", {}), *Slots.__slots__]
    attributes = {name: getattr(dataset, name) for name in names if hasattr(dataset, name)}
    kinds = (int, list, dict)
    return {name: value for name, value in attributes.items() if isinstance(value, kinds)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrapped_dataset_has_the_class_state_and_samples_of_the_original(kind: Any) -> None:
    bare = kind(3)
    before = list(registered)
    wrapped: Any = creel.wrap(bare)
    assert registered == before
    assert wrapped is not bare
    assert bool(is_wrapped(wrapped))
    assert unwrap(wrapped) is bare
    assert isinstance(wrapped, type(bare))
    assert wrapped.__class__ is type(bare)
    assert type(wrapped).__name__ == type(bare).__name__
    assert type(creel.wrap(kind())) is type(wrapped)
    assert creel.wrap(wrapped) is wrapped
    assert state(wrapped) == state(bare)
    assert hasattr(wrapped, "__dict__") == hasattr(bare, "__dict__")
    if hasattr(bare, "__dict__"):
        assert vars(wrapped) is vars(bare)
    assert [wrapped[i] for i in range(-3, 10)] == [bare[i] for i in range(-3, 10)]
    if kind is not Frozen:
        assert list(wrapped[2:5].items) == [2, 3, 4]
    assert len(wrapped) == 10
    assert not isinstance(bare, type(wrapped))
    assert isinstance(bare, type(bare).__mro__[1])  # also after the last line, for an ABC


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not Frozen])
def test_an_attribute_that_is_set_on_one_is_set_on_both(kind: Any) -> None:
    bare = kind(1)
    wrapped: Any = creel.wrap(bare)
    wrapped.k = 7
    assert bare.k == wrapped[1] == bare[1] == 7 or kind is Delegating
    bare.items = [5]
    assert wrapped.items == [5]
    assert wrapped[0] == bare[0]
    del wrapped.items
    with pytest.raises(AttributeError):
        object.__getattribute__(bare, "items")


@pytest.mark.parametrize("mode", COPIES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_has_a_state_of_its_own(kind: Any, mode: str) -> None:
    if (kind is Guarded and "pickle" in mode) or (kind is Module and mode == "copy"):
        pytest.skip("its own copies are no copies")
    wrapped: Any = creel.wrap(kind(3))
    twin = COPIES[mode](wrapped)
    assert bool(is_wrapped(twin))
    assert type(twin) is type(wrapped)
    assert unwrap(twin) is not unwrap(wrapped)
    assert state(twin).keys() == state(wrapped).keys()
    assert twin[2] == wrapped[2] == 6
    if kind is Frozen:
        with pytest.raises(dataclasses.FrozenInstanceError):
            twin.k = 3
        return
    twin.k = 100
    if kind is not Delegating:
        assert (wrapped[2], twin[2]) == (6, 200)
    twin.items = [1]
    assert len(wrapped) == 10


def test_operators_are_the_datasets_own() -> None:
    uses: dict[str, Callable[[Any], Any]] = {
        "iter": list,
        "in": lambda d: ("in" in d, 3 in d),
        "call": lambda d: d(1),
        "+": lambda d: d + d,
        "==": lambda d: (d == copy.copy(d), d == 3, d != copy.copy(d)),
        "hash": hash,
        "bool": bool,
        "str": str,
        "with": lambda d: d.__enter__() is d,
        "callable": callable,
        "dir": lambda d: {"k", "items"} <= set(dir(d)),
    }
    for name, use in uses.items():
        assert use(creel.wrap(Torch())) == use(Torch()), name
    assert creel.wrap(Data()) == Data() == creel.wrap(Data())
    assert creel.wrap(Data(2)) != Data()
    assert repr(creel.wrap(Data())) == repr(Data())
    assert hash(creel.wrap(Plain())) != hash(Plain())
    with pytest.raises(TypeError, match="not callable"):
        creel.wrap(Plain())()  # type: ignore[operator]


def test_objects_that_its_methods_make_by_its_class_are_datasets() -> None:
    wrapped: Any = creel.wrap(Plain(3))
    for dataset in (type(wrapped)(4), wrapped.__class__(4), type(creel.wrap(Slots()))(4)):
        assert dataset[2] == 8
        dataset.k = 5
        assert dataset[2] == 10
        assert len(dataset) == 10
        assert pickle.loads(pickle.dumps(dataset))[2] == 10
    assert wrapped[2] == 6


def test_a_class_cannot_be_derived_from_its_own() -> None:
    with pytest.raises(TypeError, match="derive from"):
        type("More", (type(creel.wrap(Plain())),), {})


class Closing(Plain):
    closed: ClassVar[list[int]] = []

    def __del__(self) -> None:
        self.closed.append(self.k)
        del self.items


def test_the_dataset_ends_once_and_not_before_both_are_gone() -> None:
    bare: Any = Closing(1)
    creel.wrap(bare)
    gc.collect()
    assert not Closing.closed
    wrapped: Any = creel.wrap(bare)
    del bare
    gc.collect()
    assert not Closing.closed
    assert wrapped[3] == 3
    copied, third = copy.copy(wrapped), type(wrapped)(2)
    del wrapped, copied, third
    gc.collect()
    assert sorted(Closing.closed) == [1, 1, 2]


class Circular(Plain):
    """Holds its own methods, and itself."""

    def hold(self) -> None:
        self.me, self.mine = self, self.own

    def own(self) -> int:
        return self.k

    def restore(self, before: dict[str, Any]) -> None:
        self.__dict__ = before


@pytest.mark.parametrize("mode", COPIES)
@pytest.mark.parametrize("by", ["the dataset", "the wrapped one"])
def test_a_dataset_that_holds_itself_can_be_copied(mode: str, by: str) -> None:
    bare = Circular(1)
    wrapped: Any = creel.wrap(bare)
    (bare if by == "the dataset" else wrapped).hold()
    twin = COPIES[mode](wrapped)
    twin.k = 5
    assert (twin[1], wrapped[1]) == (5, 1)
    if mode != "copy":
        assert twin.mine() == twin.me.k == 5
        assert twin.me is (unwrap(twin) if by == "the dataset" else twin)


def test_a_method_may_replace_the_whole_state() -> None:
    wrapped: Any = creel.wrap(Circular(1))
    wrapped.restore({"k": 4, "items": [2]})
    assert (wrapped[0], wrapped.k, unwrap(wrapped).k, len(wrapped)) == (8, 4, 4, 1)
    wrapped.k = 5
    assert wrapped[0] == 10


def test_functions_that_go_by_its_class() -> None:
    @functools.singledispatch
    def about(_: object) -> str:
        return "object"

    @about.register
    def _(_: Plain) -> str:
        return "Plain"

    assert about(creel.wrap(Plain())) == "Plain"
    match creel.wrap(Data(3)):
        case Data(k=k):
            assert k == 3
    assert dataclasses.replace(creel.wrap(Data(3)), k=4)[2] == 8
    assert dataclasses.asdict(creel.wrap(Data(3))) == dataclasses.asdict(Data(3))
    module = creel.wrap(Module())
    assert [name for name, _ in module.named_parameters()] == ["weight"]


Point = collections.namedtuple("Point", "x y")


class Own(list):  # type: ignore[type-arg]
    def __getitem__(self, i: Any) -> Any:
        return i


@pytest.mark.parametrize(
    "thing",
    [
        *([1, 2], (1, 2), {0: 1}, "ab", b"ab", range(3), memoryview(b"ab"), Own([1]), Point(1, 2)),
        *(np.zeros(3), torch.zeros(3), array.array("b", [1]), collections.deque([1])),
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_datasets_with_state_in_c_are_refused_with_advice(thing: Any) -> None:
    with pytest.raises(ConfigError, match=f"{type(thing).__name__}.*hold it in a torch Dataset"):
        creel.wrap(thing)


def test_torchs_own_around_it_and_inside_it() -> None:
    bare: Any = Plain(2)
    other: Any = Plain(3)
    wrapped: Any = creel.wrap(bare)
    makers: list[Callable[[Any], Any]] = [
        lambda d: Subset(d, [3, 1]),
        lambda d: ConcatDataset([d, other]),
        lambda d: StackDataset(d, other),
        lambda d: random_split(d, [4, 6], torch.Generator().manual_seed(3))[0],
        lambda d: creel.wrap(Subset(d, [4, 2])),
        lambda d: creel.wrap(ConcatDataset([creel.wrap(Subset(d, [1])), d])),
    ]
    around = [(make(wrapped), make(bare)) for make in makers]
    for ours, theirs in around:
        assert [ours[i] for i in range(len(ours))] == [theirs[i] for i in range(len(theirs))]
    bare.k = 9
    for ours, theirs in around:
        assert ours[0] == theirs[0]
    split: Any = creel.wrap(Subset(bare, [1, 2]))
    split.indices = [5]
    assert (len(split), split[0]) == (1, 45)
    assert [creel.wrap(Many())[1], *creel.wrap(Many()).__getitems__([1])] == [1, 101]
