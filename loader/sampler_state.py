"""What a checkpoint can hold of samplers of the person's own: what they give themselves."""

from __future__ import annotations

import copy
import logging
import warnings
from typing import TypedDict

_log = logging.getLogger("creel.loader")


class OwnState(TypedDict, total=False):
    """Of one sampler; nothing where it has nothing to save."""

    state: object  # its own `state_dict()`
    epoch: int  # for its own `set_epoch`


def own_states(sampler: object) -> list[OwnState]:
    """What can be saved now of the person's own samplers.

    Args:
        sampler: what torch iterates for the loader.
    """
    return [_state_of(own) for own in _own_samplers(sampler)]


def load_own(sampler: object, states: list[OwnState]) -> None:
    """Give the person's own samplers what `own_states` saved; warn where that is nothing.

    Raises:
        Exception: whatever their `load_state_dict` or `set_epoch` raises.
    """
    own = _own_samplers(sampler)
    for one, state in zip(own, states, strict=False):
        if "state" in state:
            one.load_state_dict(state["state"])  # type: ignore[attr-defined]  # it had both
        elif "epoch" in state:
            one.set_epoch(state["epoch"])  # type: ignore[attr-defined]  # as above
    if states and not any(states):
        warnings.warn(
            f"{type(own[-1]).__name__} has neither state_dict() and load_state_dict() nor epoch and"
            " set_epoch(): what it counts or draws by itself is not resumed",
            stacklevel=5,
        )


def _own_samplers(sampler: object) -> list[object]:
    """The sampler and the one inside of it, as far as they are not torch's."""
    both = (sampler, getattr(sampler, "sampler", None))
    return [s for s in both if s is not None and type(s).__module__.partition(".")[0] != "torch"]


def _state_of(sampler: object) -> OwnState:
    if all(callable(getattr(sampler, name, None)) for name in ("state_dict", "load_state_dict")):
        try:
            return {"state": copy.deepcopy(sampler.state_dict())}  # type: ignore[attr-defined]  # so
        except Exception:  # noqa: BLE001  an epoch begins here, which torch begins without this
            _log.warning("%s.state_dict() fails", type(sampler).__name__, exc_info=True)
            return {}
    epoch = getattr(sampler, "epoch", None)
    if isinstance(epoch, int) and callable(getattr(sampler, "set_epoch", None)):
        return {"epoch": epoch}
    return {}
