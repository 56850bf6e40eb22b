"""How long a training process waits for the daemon before it reads by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from creel.cache.memory.pools.free_ranges import NOWHERE
from creel.loader.line.batches import places
from creel.loader.line.batches.places import TrainerWaits
from creel.policies.direct import DirectReads
from creel.settings import LoaderSettings


class Session:
    """A session whose objects are in memory, or not; the daemon never answers."""

    alive = True
    object_ns = 1  # as for a source as quick as the page cache

    def __init__(self, *, held: bool) -> None:
        offset = np.zeros(8, np.int64) if held else np.full(8, NOWHERE)
        self.table = SimpleNamespace(offset=offset)
        self.waited: list[float] = []

    def nbytes(self, ids: Any) -> int:
        return 100 * len(ids)

    def wait(self, _step: int, timeout_s: float) -> bool:
        self.waited.append(timeout_s)
        return False


@pytest.mark.parametrize("held", [True, False])
def test_a_batch_that_memory_has_is_waited_for_where_nothing_was_measured(*, held: bool) -> None:
    """For a moment: a direct read costs one of the source, though only the word is missing."""
    state: Any = SimpleNamespace(config=SimpleNamespace(loader=LoaderSettings()))
    waits = TrainerWaits(state, DirectReads(allowed=True), cast("Any", None))
    session = Session(held=held)
    assert not waits.wait(cast("Any", session), 0, np.arange(4, dtype=np.int32))
    assert session.waited == ([places._ANSWER_S] if held else [])
