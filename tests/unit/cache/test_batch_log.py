"""The flight recorder has the last batches of a session, in order, whoever reads it when."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest

from creel.cache.memory.batch_log import HEAD_NBYTES, NBYTES, RECORDED, ROWS, BatchRow
from creel.cache.memory.memfd import sealed_memfd
from creel.cache.memory.shared_words import COUNTER, EARLY, EARLY_STEPS, WORDS_NBYTES, SharedWords
from kit import seeds


@pytest.fixture
def both() -> Iterator[tuple[SharedWords, SharedWords]]:
    """The words of one session, as its trainer and its daemon map them."""
    fd = sealed_memfd("words", WORDS_NBYTES)
    trainer, daemon = SharedWords(fd), SharedWords(fd)
    os.close(fd)
    yield trainer, daemon
    trainer.close()
    daemon.close()


def test_the_ring_lies_behind_all_single_words_and_fills_the_page() -> None:
    assert max(*COUNTER.values(), EARLY + EARLY_STEPS, RECORDED) * 8 < HEAD_NBYTES
    assert WORDS_NBYTES == NBYTES == 64 << 10


@pytest.mark.parametrize("seed", seeds(10))
def test_the_last_batches_are_read_as_they_were_written(
    seed: int, both: tuple[SharedWords, SharedWords]
) -> None:
    rng = random.Random(seed)
    trainer, daemon = both
    written: list[BatchRow] = []
    for _ in range(rng.randrange(1, 12)):
        for _ in range(rng.choice([1, 7, ROWS // 2, ROWS])):
            row = BatchRow._make((len(written), *(rng.randrange(1 << 62) for _ in range(6)), -1))
            trainer.log.add(*row[1:])
            written.append(row)
        kept = written[-(ROWS - 1) :]
        assert daemon.log.rows() == kept
        since = rng.randrange(len(written) + 2)
        assert daemon.log.rows(since) == [row for row in kept if row.step >= since]


def test_a_row_that_is_being_overwritten_is_left_out(
    both: tuple[SharedWords, SharedWords],
) -> None:
    trainer, daemon = both
    for i in range(ROWS + 5):
        trainer.log.add(i, 0, 0, 0, 0, 0, 0)
    at = (HEAD_NBYTES + (ROWS + 5) % ROWS * 64) // 8
    trainer[at] = ROWS + 5  # the next batch: its row is begun, RECORDED not yet raised
    assert [row.began for row in daemon.log.rows()] == [*range(6, ROWS + 5)]


@pytest.mark.parametrize("lie", [-1, 5, 1 << 40, (1 << 63) - 1, -(1 << 63)])
def test_claims_of_a_client_cost_no_more_than_the_ring(
    lie: int, both: tuple[SharedWords, SharedWords]
) -> None:
    trainer, daemon = both
    trainer.log.add(*range(7))
    trainer[RECORDED] = lie
    assert daemon.log.rows() == ([BatchRow(0, *range(7))] if lie == 5 else [])
