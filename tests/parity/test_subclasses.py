"""Subclasses of the loader: whatever names they use are theirs, as under torch's class."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import creel
from creel.loader.line.options.loader_args import NAMES, LoaderArgs, args_of

pytestmark = pytest.mark.timeout(120)

DATA: Any = list(range(17))
#: All names that creel's class adds to torch's, but for its own state and Python's.
ADDED = sorted(
    name
    for name in {*dir(creel.DataLoader), *NAMES} - set(dir(DataLoader))
    if not name.startswith(("_creel_", "__"))
)


def test_what_creel_adds_is_known_and_all_else_begins_with_its_prefix() -> None:
    assert set(ADDED) > NAMES | {"indices", "replayed", "stats", "state_dict"}
    plain = vars(DataLoader(DATA, 4)).keys()
    assert all(
        name.startswith("_creel_") for name in vars(creel.DataLoader(DATA, 4)).keys() - plain
    )


def assigned_before(cls: Any, name: str, value: object) -> Any:
    class Loader(cls):  # type: ignore[misc]
        def __init__(self, *args: Any, **more: Any) -> None:
            setattr(self, name, value)
            super().__init__(*args, **more)

    return Loader


def assigned_after(cls: Any, name: str, value: object) -> Any:
    class Loader(cls):  # type: ignore[misc]
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            setattr(self, name, value)

    return Loader


def defined(cls: Any, name: str, value: object) -> Any:
    return type("Loader", (cls,), {name: value})


def refused(cls: Any, name: str, value: object) -> Any:
    """The subclass's own property, without a setter."""
    return type("Loader", (cls,), {name: property(lambda _: value)})


USES = [assigned_before, assigned_after, defined, refused]
#: What creel's own argument may be as well, what it may not, and what compares like nobody.
VALUES = ["shared", "skip", 1, False, ["x"], torch.zeros(3)]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", ADDED)
def test_a_name_that_a_subclass_uses_is_its_own(name: str, use: Callable[..., Any]) -> None:
    """Nothing of creel's depends on it, and what was passed to creel holds."""
    for value in VALUES:
        theirs, ours = (use(cls, name, value)(DATA, 4) for cls in (DataLoader, creel.DataLoader))
        wanted = [batch.tolist() for _ in range(2) for batch in theirs]
        assert [batch.tolist() for _ in range(2) for batch in ours] == wanted
        assert getattr(ours, name) is getattr(theirs, name) is value
        assert args_of(ours) == LoaderArgs()
        assert ours._repr_html_ is value or "17 samples" in ours._repr_html_()
        passed = use(creel.DataLoader, name, value)(DATA, 4, on_error="skip", workers="shared")
        assert getattr(passed, name) is value
        assert args_of(passed) == LoaderArgs(on_error="skip", workers="shared", seeding="sample")
        assert args_of(made_again(passed)) == args_of(pickled(passed)) == args_of(passed)


def pickled(loader: Any) -> Any:
    """Return a copy of the loader, made as pickle and `copy` make it."""
    twin = object.__new__(type(loader))
    vars(twin).update(loader.__getstate__())
    return twin


def made_again(loader: Any) -> Any:
    """Return a loader that is made from the attributes of one, by name, as Lightning does it."""
    given = {name: value for name, value in vars(loader).items() if not name.startswith("_")}
    params = dict(inspect.signature(type(loader).__init__).parameters)
    params |= inspect.signature(creel.DataLoader.__init__).parameters
    several = {"batch_size", "shuffle", "drop_last", "sampler"}  # the batch sampler goes for these
    names = [n for n in params if n in given and n not in several]
    return type(loader)(**{n: given[n] for n in names if params[n].default is not given[n]})


def test_an_argument_survives_where_a_loader_is_made_again_by_name() -> None:
    settings = {"memory.budget": "1GiB"}
    loader = creel.DataLoader(DATA, 4, creel=settings, max_bad_samples=3)
    again = made_again(loader)
    assert again.creel is loader.creel is settings
    assert (again.max_bad_samples, again.on_error, again.workers) == (3, "raise", "own")
    assert "creel_args" not in vars(again), "the names are nobody else's"


class Own(creel.DataLoader[int]):
    """Has arguments that are called like creel's."""

    def __init__(self, dataset: Any, workers: Any = 0, on_error: Any = "skip", **more: Any) -> None:
        self.workers = workers
        super().__init__(dataset, on_error=on_error, **more)


def test_a_subclass_may_have_arguments_of_the_same_names() -> None:
    again = made_again(Own(DATA, 2, batch_size=4))
    assert (again.workers, again.on_error, again.batch_sampler.batch_size) == (2, "skip", 4)
    assert args_of(again) == LoaderArgs(on_error="skip")


class Whole(creel.DataLoader[int]):
    """Pickles all its attributes, by a method of its own."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self).copy()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_was_used_is_copied_by_methods_of_a_subclass(workers: int) -> None:
    loader = Whole(DATA, 4, num_workers=workers)
    wanted = [batch.tolist() for batch in loader]
    for twin in (pickle.loads(pickle.dumps(loader)), copy.copy(loader), copy.deepcopy(loader)):
        assert [batch.tolist() for batch in twin] == wanted
        assert twin.stats()["batches"] == len(loader)
        assert twin.indices.tolist() == wanted[-1]


def test_what_was_assigned_can_be_deleted_again() -> None:
    loader: Any = creel.DataLoader(DATA, 4, on_error="skip")
    loader.workers, loader.indices = 3, [7]
    del loader.workers, loader.indices
    assert loader.workers == "own"
    assert loader.indices.tolist() == []
