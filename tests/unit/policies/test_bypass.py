"""Which datasets creel does not intercept, because their source makes nobody wait."""

from __future__ import annotations

import pytest

from creel.policies.direct import Bypass, ThreadUse

BATCH = 64
QUIET = ThreadUse(1_000_000, 990_000, sleeps=0, device_reads=0)  # of a batch
SLOW = ThreadUse(300_000_000, 2_000_000, sleeps=2 * BATCH, device_reads=0)  # a network
DECODING = ThreadUse(300_000_000, 280_000_000, sleeps=BATCH, device_reads=0)
SHARED_FILE = ThreadUse(9_000_000, 1_000_000, sleeps=3, device_reads=2_000)
OTHER_THREAD = ThreadUse(
    6_000_000, 1_000_000, sleeps=3, device_reads=0
)  # holds the lock now and then


def saw(bypass: Bypass, *batches: ThreadUse, samples: int = BATCH) -> Bypass:
    for batch in batches:
        bypass.saw(samples, batch)
    return bypass


def test_a_dataset_is_left_alone_once_a_batch_had_nothing_to_wait_for() -> None:
    bypass = Bypass(allowed=True)
    assert bypass.undecided
    assert not bypass.active
    assert saw(bypass, QUIET).active
    assert not bypass.undecided


def test_small_batches_are_judged_together() -> None:
    bypass = Bypass(allowed=True)
    for _ in range(15):
        assert not saw(bypass, QUIET, samples=4).active
    assert saw(bypass, QUIET, samples=4).active
    often = ThreadUse(700_000, 60_000, sleeps=4, device_reads=0)
    assert not saw(bypass, *[often] * 32, samples=4).active


def test_slow_reads_are_recorded_from_the_first_batch_on() -> None:
    assert not saw(Bypass(allowed=True), SLOW, samples=2).undecided


def test_nothing_is_left_alone_where_all_is_to_be_looked_at() -> None:
    bypass = saw(Bypass(allowed=False), *[QUIET] * 20)
    assert not bypass.active
    assert not bypass.undecided


@pytest.mark.parametrize("slow", [SLOW, DECODING, SHARED_FILE])
def test_readers_that_wait_for_the_source_are_looked_after(slow: ThreadUse) -> None:
    bypass = saw(Bypass(allowed=True), slow, slow, slow)
    assert not bypass.active
    assert not bypass.undecided


def test_waits_of_threads_for_each_other_are_none_for_the_source() -> None:
    assert saw(Bypass(allowed=True), OTHER_THREAD, OTHER_THREAD).active


def test_one_wait_is_the_readers_own_affair() -> None:
    bypass = saw(Bypass(allowed=True), SLOW, QUIET, QUIET)  # for example, an import
    assert bypass.active
    assert saw(bypass, *[QUIET] * 10, SLOW, *[QUIET] * 10, SLOW, QUIET).active


def test_a_source_that_becomes_slow_is_noticed_and_one_that_becomes_quick_too() -> None:
    bypass = saw(Bypass(allowed=True), *[QUIET] * 10)
    assert not saw(bypass, SLOW, SLOW).active
    assert not saw(bypass, *[QUIET] * 6).active
    assert saw(bypass, *[QUIET] * 6).active


def test_single_reads_are_measured_now_and_then_and_batches_always() -> None:
    bypass = saw(Bypass(allowed=True), QUIET, QUIET)
    assert sum(bypass.measures(1) for _ in range(160)) == 10
    assert all(bypass.measures(BATCH) for _ in range(5))
