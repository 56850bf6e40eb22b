"""Save and restore custom samplers in a checkpoint, by their own methods."""

from __future__ import annotations

import copy
import logging
import warnings
from typing import TypedDict

from creel.loader.client.log_lines import with_rank
from creel.loader.data.user_code.protected import attribute

_log = logging.getLogger("creel.loader")


class SamplerState(TypedDict, total=False):
    """The state of one custom sampler; empty if it has nothing to save."""

    state: object  # its own `state_dict()`
    epoch: int  # for its own `set_epoch`


def sampler_states(sampler: object) -> list[SamplerState]:
    """Return the present state of the user's custom samplers, the outer one first.

    Args:
        sampler: what torch iterates for the loader.
    """
    return [_state_of(own) for own in _own_samplers(sampler)]


def load_sampler_states(sampler: object, states: list[SamplerState]) -> None:
    """Restore the user's custom samplers from `sampler_states`; warn if nothing was saved.

    Raises:
        Exception: their `load_state_dict` or `set_epoch` failed.
    """
    own = _own_samplers(sampler)
    for stateful, state in zip(own, states, strict=False):
        if "state" in state:
            stateful.load_state_dict(state["state"])  # type: ignore[attr-defined]  # it had both
        elif "epoch" in state:
            stateful.set_epoch(state["epoch"])  # type: ignore[attr-defined]  # as above
    if states and not any(states):
        warnings.warn(
            with_rank(
                f"{type(own[-1]).__name__} has neither state_dict() and load_state_dict() nor epoch"
                " and set_epoch(): its own counters and random numbers are not resumed"
            ),
            stacklevel=5,
        )


def _own_samplers(sampler: object) -> list[object]:
    """Return the sampler and the one it wraps, without torch's own."""
    both = (sampler, attribute(sampler, "sampler"))
    return [s for s in both if s is not None and type(s).__module__.partition(".")[0] != "torch"]


def _state_of(sampler: object) -> SamplerState:
    if all(callable(attribute(sampler, name)) for name in ("state_dict", "load_state_dict")):
        try:
            return {"state": copy.deepcopy(sampler.state_dict())}  # type: ignore[attr-defined]  # so
        except Exception:  # noqa: BLE001  must not keep an epoch from beginning, as in torch
            _log.warning("%s.state_dict() fails", type(sampler).__name__, exc_info=True)
            return {}
    epoch = attribute(sampler, "epoch")
    if isinstance(epoch, int) and callable(attribute(sampler, "set_epoch")):
        return {"epoch": epoch}
    return {}
