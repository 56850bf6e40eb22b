"""Parts of random programs with wrapped datasets: classes, and what is done with their objects."""

from __future__ import annotations

import abc
import copy
import dataclasses
import pickle
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.utils.data import Dataset

from stress.userland import error, shown

classes: list[str] = []  # what a class's own code was told of classes derived from it


class Files:
    """Reads one file per sample, and shows the state that its methods find."""

    __slots__ = ()
    bias: ClassVar[int] = 0
    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            part = copy.copy(self)
            object.__setattr__(part, "paths", self.paths[index])
            return part
        return self.sample(self.read(self.paths[index]))

    def read(self, path: str) -> bytes:
        with open(path, "rb") as file:  # noqa: PTH123  (as users do)
            return file.read()

    def sample(self, data: bytes) -> torch.Tensor:
        x = torch.tensor([zlib.crc32(data) % 1000 * self.scale, len(data), self.bias])
        return x if self.transform is None else self.transform(x)

    def again(self, scale: int) -> Any:
        """Return another object of the same class."""
        kind: Any = self.__class__
        return kind(self.paths[:5], scale)

    def of_type(self, scale: int) -> Any:
        kind: Any = type(self)
        return kind(self.paths[1:], scale)

    def scaled(self, scale: int) -> Any:
        twin = copy.deepcopy(self)
        object.__setattr__(twin, "scale", scale)
        return twin


class Plain(Files, Dataset[Any]):
    def __init__(self, paths: list[str], scale: int = 1) -> None:
        self.paths, self.scale, self.transform = list(paths), scale, None

    def turn(self) -> Any:
        self.paths.reverse()
        return self

    def hold(self) -> None:
        self.me, self.mine = self, self.read


class Derived(Plain):
    def __init__(self, paths: list[str], scale: int = 1) -> None:
        super().__init__(paths, scale)
        self.offset = 3

    def __getitem__(self, index: Any) -> Any:
        path = super().__getitem__(index)
        return path if isinstance(index, slice) else path + self.offset

    def __iter__(self) -> Iterator[Any]:
        return iter([("iterated", self.scale), self[0]])

    def __contains__(self, path: object) -> bool:
        return path in self.paths

    def __call__(self, k: int) -> int:
        return self.scale * k


class Batches(Plain):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[i] + len(indices) for i in indices]


class Slots(Files):
    __slots__ = ("paths", "scale", "transform")

    def __init__(self, paths: list[str], scale: int = 1) -> None:
        self.paths, self.scale, self.transform = list(paths), scale, None


@dataclasses.dataclass
class Data(Files):
    paths: list[str]
    scale: int = 1
    transform: Callable[[Any], Any] | None = None


@dataclasses.dataclass(frozen=True)
class Frozen(Files):
    paths: list[str]
    scale: int = 1
    transform: Callable[[Any], Any] | None = None


class Abstract(abc.ABC):
    @abc.abstractmethod
    def __len__(self) -> int: ...

    def __init_subclass__(cls, **more: Any) -> None:
        classes.append(cls.__name__)
        super().__init_subclass__(**more)


class Concrete(Plain, Abstract):
    pass


class Delegating(Files):
    def __init__(self, paths: list[str], scale: int = 1) -> None:
        self.inner = Plain(paths, scale)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


class Closing(Plain):
    """Drops its state when it ends."""

    def __del__(self) -> None:
        self.__dict__.clear()


class Reduced(Plain):
    def __reduce__(self) -> Any:
        return Reduced, (self.paths, self.scale)


def outcome_of(make: Callable[[], Any], other: Any) -> Any:
    """Return a new dataset; `other` if it cannot be made, and show why."""
    try:
        return make()
    except Exception as e:  # noqa: BLE001  both loaders must raise the same
        shown.append(("no dataset", error(e)))
        return other


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def about(value: Any) -> Any:
    """Return what code can find out about a dataset, except for its type."""
    state = vars(value) if hasattr(value, "__dict__") else {}
    names = sorted(name for name in (*state, *Slots.__slots__) if hasattr(value, name))
    return (
        *(value.__class__.__name__, len(value), names, getattr(value, "scale", None)),
        *(isinstance(value, Files), isinstance(value, Dataset), isinstance(value, Abstract)),
        *(callable(value), hasattr(value, "__iter__"), hasattr(value, "__contains__"), bool(value)),
        [name for name in classes if name != "Concrete"],
    )


def walked(value: Any, seen: set[int] | None = None) -> int:
    """Count the datasets that a walk through all attributes meets, as one that seeds them does."""
    seen = set() if seen is None else seen
    if isinstance(value, (list, tuple)):
        return sum(walked(value, seen) for value in value)
    if not hasattr(value, "__dict__") or id(value.__dict__) in seen:
        return 0
    seen.add(id(value.__dict__))
    below = sum(walked(value, seen) for value in list(value.__dict__.values()))
    return below + isinstance(value, (Files, Dataset))


def minus(x: torch.Tensor) -> torch.Tensor:
    return -x


def with_noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.randint(9, (1,))


def sizes(paths: list[str]) -> list[int]:
    return [Path(path).stat().st_size for path in paths]
