"""What keeping decoded samples would bring is measured now and then."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from creel.loader.data.decoded import decode_benefit
from creel.loader.data.reading.lease import Lease


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process one that has read no batch yet."""
    monkeypatch.setattr(decode_benefit, "_batch", itertools.count())


def counted(decode: Callable[[bytes], Any], samples: int = 1) -> dict[str, int]:
    """Decode a batch as a dataset does; return what was counted."""
    lease = Lease()
    for _ in range(samples):
        lease.decodes += 1
        (decode_benefit.measuring(lease, decode) if lease.decodes == 1 else decode)(b"abc")
    return decode_benefit.counts(lease)


def test_the_first_sample_of_a_batch_is_measured() -> None:
    seen = []

    def decode(data: bytes) -> torch.Tensor:
        seen.append(data)
        return torch.zeros(1000, dtype=torch.uint8)

    counts = counted(decode, samples=5)
    assert seen == [b"abc"] * 5
    assert (counts["decoded_calls"], counts["decoded_measured"]) == (5, 1)
    assert 1000 < counts["decoded_call_nbytes"] < 1100
    assert counts["decoded_call_ns"] > 0


def test_later_batches_are_measured_now_and_then() -> None:
    measured = [b for b in range(200) if "decoded_measured" in counted(lambda _: b"x" * 1000)]
    assert measured == [0, 1, 2, 3, 64, 128, 192]


@pytest.mark.parametrize(
    "decode",
    [
        lambda _: torch.rand(1000),
        lambda _: np.random.rand(1000),  # noqa: NPY002
        lambda _: b"x" * random.randrange(1000, 2000),
        lambda _: object(),
        lambda _: "\ud800" * 1000,
    ],
)
def test_samples_that_cannot_be_kept_are_only_counted(decode: Callable[[bytes], Any]) -> None:
    assert counted(decode) == {"decoded_calls": 1}


def test_an_error_is_the_decoders_own() -> None:
    with pytest.raises(ZeroDivisionError):
        counted(lambda _: 1 / 0)


def test_a_batch_without_decoding_counts_nothing() -> None:
    assert decode_benefit.counts(Lease()) == {}
