"""Unplanned batches: which can be published."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from creel.loader.line.order.epoch_plan import same_batch
from creel.loader.line.steps.batch_stream import samples_in, samples_of


@pytest.mark.parametrize(
    ("pulled", "indices"),
    [
        (3, [3]),
        (np.int32(3), [3]),
        ([3, 1], [3, 1]),
        ((3, 1), [3, 1]),
        (np.array([3, 1], np.uint8), [3, 1]),
        (torch.tensor([3, 1]), [3, 1]),
        (torch.tensor(3), [3]),
        ([np.int64(3), torch.tensor(1)], [3, 1]),
        ([], None),
        (-1, None),
        ([1, -1], None),
        (True, None),
        (1.0, None),
        ("3", None),
        (["3"], None),
        ([[1, 2]], None),
        ([[1], [2, 3]], None),
        ({"a": 1}, None),
        ({1, 2}, None),
        (object(), None),
        (2**70, None),
        (np.array([2**63], np.uint64), None),
    ],
)
def test_indices_of_any_type_can_be_published_and_nothing_else(
    pulled: object, indices: list[int] | None
) -> None:
    numbers = samples_of(pulled)
    assert (None if numbers is None else numbers.tolist()) == indices


class Sulky:
    """Raises an error of its own for any attribute."""

    def __array__(self, *_: object, **__: object) -> None:
        raise KeyError("no array")

    def __len__(self) -> int:
        raise AttributeError("no length")


@pytest.mark.parametrize(
    ("pulled", "samples"),
    [([3, 1], 2), ([], 0), (3, 1), (np.array(1.5), 1), (torch.tensor(-1), 1), (Sulky(), 1)],
)
def test_an_item_that_cannot_be_published_is_counted_all_the_same(
    pulled: object, samples: int
) -> None:
    assert samples_in(pulled) == samples


def test_an_item_that_raises_an_error_of_its_own_equals_no_prediction() -> None:
    assert samples_of(Sulky()) is None
    assert not same_batch(np.array([3]), Sulky())
