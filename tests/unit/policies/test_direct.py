"""Which readers read the source themselves, and which wait for the daemon."""

from __future__ import annotations

import math

import pytest

from creel.policies.direct import DirectReads, ThreadUse

READS, NBYTES = 64, 64 * 20_000
QUICK_NS, SLOW_NS = 30_000, 3_000_000  # of one read: the page cache, a server


def direct(reader: DirectReads, nbytes: int, object_ns: int, reads: int = READS) -> bool:
    """Return whether a batch is read directly at once."""
    wait_s = reader.wait_s(reads, nbytes, object_ns)
    assert wait_s in {0, math.inf}
    return wait_s == 0


def saw(reader: DirectReads, read_ns: int, sleeps: int) -> None:
    """Let a reader read a batch directly, `read_ns` a read, on a processor unless it sleeps."""
    ns = READS * read_ns
    reader.saw(READS, ns, ThreadUse(ns, 1000 if sleeps else ns, sleeps, device_reads=0))


def test_a_source_that_is_not_measured_is_not_read_directly() -> None:
    assert not direct(DirectReads(allowed=True), NBYTES, 0)


@pytest.mark.parametrize("allowed", [True, False])
def test_a_quick_source_is_read_where_that_is_allowed(allowed: bool) -> None:
    assert direct(DirectReads(allowed=allowed), NBYTES, QUICK_NS) is allowed


def test_a_slow_source_is_left_to_the_daemon() -> None:
    assert not direct(DirectReads(allowed=True), NBYTES, SLOW_NS)


@pytest.mark.parametrize("nbytes", [300, 20_000, 150_000, 1_000_000])
def test_large_objects_may_take_longer(nbytes: int) -> None:
    reader = DirectReads(allowed=True)
    assert direct(reader, nbytes, 40_000 + nbytes, 1)
    assert not direct(reader, nbytes, 200_000 + 3 * nbytes, 1)


def waits(reader: DirectReads) -> int:
    """Return how many batches are waited for until one is read directly again."""
    waited = 0
    while not direct(reader, NBYTES, QUICK_NS):
        waited += 1
    return waited


def test_a_readers_own_measurement_counts_for_more_than_the_daemons() -> None:
    reader = DirectReads(allowed=True)
    pauses = []
    for _ in range(3):
        for _ in range(2):
            assert direct(reader, NBYTES, QUICK_NS)
            saw(reader, SLOW_NS, READS)
        pauses.append(waits(reader))  # then direct reads are tried again: a cold source may be warm
    assert 0 < pauses[0] < pauses[1] < pauses[2]


def test_one_interruption_makes_no_slow_source() -> None:
    reader = DirectReads(allowed=True)
    for ns in (QUICK_NS, QUICK_NS, SLOW_NS, QUICK_NS):
        assert direct(reader, NBYTES, QUICK_NS)
        saw(reader, ns, READS * (ns == SLOW_NS))
    assert direct(reader, NBYTES, QUICK_NS)


def test_a_source_that_became_slow_is_noticed_at_the_second_batch() -> None:
    reader = DirectReads(allowed=True)
    for ns in (QUICK_NS, QUICK_NS, QUICK_NS, SLOW_NS, SLOW_NS):
        assert direct(reader, NBYTES, QUICK_NS)
        saw(reader, ns, READS * (ns == SLOW_NS))
    assert not direct(reader, NBYTES, QUICK_NS)


def test_a_reader_that_never_sleeps_lacks_a_processor_and_not_data() -> None:
    reader = DirectReads(allowed=True)
    for _ in range(5):
        assert direct(reader, NBYTES, QUICK_NS)
        saw(reader, SLOW_NS, 2)


def test_a_decoder_that_sleeps_makes_no_slow_source() -> None:
    reader, quick_ns = DirectReads(allowed=True), 15_000
    for _ in range(5):
        assert direct(reader, NBYTES, QUICK_NS)
        reader.saw(READS, READS * quick_ns, ThreadUse(10**9, 10**6, READS, device_reads=0))


def test_a_daemon_that_lacks_processors_is_waited_for_as_long_as_reading_takes() -> None:
    reader = DirectReads(allowed=True)
    saw(reader, QUICK_NS, 0)
    waits = []
    for _ in range(100):
        waits.append(reader.wait_s(READS, NBYTES, SLOW_NS))
        if waits[-1]:
            reader.waited_in_vain()
        saw(reader, QUICK_NS, 0)
    assert set(waits) == {0, READS * QUICK_NS / 1e9}
    assert waits[0] > 0
    assert sum(waits) < 10 * waits[0]


def test_a_source_that_the_reader_itself_had_to_wait_for_is_left_to_the_daemon() -> None:
    reader = DirectReads(allowed=True)
    saw(reader, SLOW_NS, READS)
    assert not direct(reader, NBYTES, SLOW_NS)
