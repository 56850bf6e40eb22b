"""LoaderArgs: what was passed to a loader, and how its attributes show it.

An argument is what was passed. The attribute of the same name shows it, unless a subclass or its
caller uses that name: then the attribute is theirs, whatever it holds. Lightning makes a loader
again from its attributes, by name; `creel_args` tells that loader which of the names are not ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from creel.loader.data.reading.bad_samples import OnError, Tolerance
from creel.loader.data.user_code.values import wrong
from creel.loader.making.seeding.by_sample import EpochSeeds, Seeding
from creel.loader.making.stage import Stage, Tolerating


class LoaderArgs(NamedTuple):
    """The arguments of a `creel.DataLoader` that torch's has not."""

    creel: bool | str | dict[str, Any] | None = None
    remap: Literal["global-batch"] | None = None
    replicate: Any = None
    on_error: OnError = "raise"
    max_bad_samples: int = 100
    rehearsal: Any = None
    seeding: Literal["sample"] | None = None
    workers: Literal["own", "shared"] = "own"

    def tolerance(self) -> Tolerance:
        """Return what a loader does with bad samples; none are known yet."""
        return Tolerance(self.on_error, self.max_bad_samples)

    def stages(self, tolerance: Tolerance) -> tuple[Stage, ...]:
        """Return the stages around a maker of batches, for one maker, the innermost first."""
        seeding = () if self.seeding is None else (Seeding(),)
        return (*seeding, Tolerating(tolerance)) if tolerance.wanted else seeding

    @property
    def extends(self) -> bool:
        """Whether batches may have more than the dataset's samples, if not yet."""
        return self.rehearsal is not None

    def seeds(self) -> EpochSeeds | None:
        """Return the seeds of an iterator's epochs; None: torch's."""
        return None if self.seeding is None else EpochSeeds()


DEFAULTS = LoaderArgs()
NAMES = frozenset(LoaderArgs._fields)


def args_of(loader: object) -> LoaderArgs:
    """Return what was passed to a loader; the defaults for one of torch's own class."""
    args: LoaderArgs = vars(loader).get("_creel_args", DEFAULTS)
    return args


def without_taken(args: LoaderArgs, taken: object) -> LoaderArgs:
    """Return the arguments, with those of `creel_args` in place of what attributes hold.

    Raises:
        ConfigError: `creel_args` is not that attribute of a loader.
    """
    if taken is None:
        return args
    if not isinstance(taken, Mapping) or not NAMES.issuperset(taken):
        raise wrong("creel_args", taken, "that attribute of another loader, or leave it out")
    return args._replace(**taken)


def keep(loader: object, args: LoaderArgs, base: type) -> None:
    """Keep what was passed in a loader, and show it in attributes whose names no one else uses.

    base: the class of ours, whose attributes are the defaults.
    """
    state = vars(loader)
    state["_creel_args"] = args
    for name in LoaderArgs._fields:
        value, passed = getattr(args, name), getattr(args, name) is not getattr(DEFAULTS, name)
        holder = next(base for base in type(loader).__mro__ if name in vars(base))
        if name in state or (holder is not base and passed):
            take_name(loader, name)
        elif passed:
            state[name] = value


def take_name(loader: object, name: str) -> None:
    """Note that an attribute with the name of an argument is not ours."""
    state = vars(loader)
    if "_creel_args" in state:
        passed = getattr(state["_creel_args"], name)
        state["creel_args"] = {**state.get("creel_args", {}), name: passed}
