"""The type of what `DataLoader.state_dict()` returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from creel.loader.order.orders import OrderState

#: A state of another version is refused.
VERSION = 1


class Progress(TypedDict, total=False):
    """A position in training, as plain values that fit JSON."""

    version: int
    epoch: int  # epochs begun before this one
    batches: int  # of this epoch, up to the last one that was returned to the caller
    finished: bool
    order: OrderState
