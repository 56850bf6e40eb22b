"""Journals of samples' reads: other processes read them; an incomplete record does not count."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st

from creel.cache.storage.version import UNKNOWN
from creel.errors import MalformedError
from creel.loader.binding.journal import (
    ALL,
    FILE,
    CopiedFiles,
    EndOfTrace,
    Item,
    Reads,
    Record,
    TraceJournal,
    joined,
    new_journal,
    reads_of,
)

Batch = list[tuple[int, list[tuple[Item, int]]]]

addresses = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=9)
items = st.one_of(
    addresses,
    st.tuples(st.integers(0, 3), st.integers(0, 1 << 40)),
    st.tuples(addresses, st.integers(0, 1 << 40), st.integers(1, 1 << 40)),
)
versions = st.integers(-2, (1 << 62) - 1)
samples = st.tuples(st.integers(0, 1 << 40), st.lists(st.tuples(items, versions), max_size=3))


def written(records: Sequence[Record]) -> list[Record]:
    """Return what another process reads of a journal with these records."""
    fd = new_journal()
    try:
        theirs, ours = TraceJournal(fd), TraceJournal(fd)
        taken: list[Record] = []
        for record in records:
            assert ours.append(record)
            taken += theirs.new()
        assert list(ours.new()) == taken
        return taken
    finally:
        os.close(fd)


@given(st.lists(st.lists(samples, max_size=4), max_size=4))
def test_what_samples_read_is_told_as_it_was(batches: list[Batch]) -> None:
    taken = written([reads_of(batch, again=3) for batch in batches])
    reads = [one for one in taken if isinstance(one, Reads)]
    assert [one.again for one in reads] == [3] * len(batches)
    recorded = joined(reads)
    told: list[tuple[Item, int]] = []
    names = iter(recorded.addresses)
    for part, number, nbytes, version, _ in recorded.items.tolist():
        if part == FILE:
            name = next(names)
            told.append((name if number == ALL else (name, number, nbytes), version))
        else:
            told.append(((part, number), UNKNOWN))
    every = [one for batch in batches for one in batch]
    assert recorded.samples.tolist() == [sample for sample, _ in every]
    assert recorded.counts.tolist() == [len(read) for _, read in every]
    assert told == [
        (item, UNKNOWN if len(item) == 2 and isinstance(item, tuple) else version)
        for _, read in every
        for item, version in read
    ]


def test_a_record_is_longer_than_what_is_read_at_a_time() -> None:
    batch = [(i, [(f"/data/{i:060}", i + 1)]) for i in range(20_000)]
    long, end = reads_of(batch), CopiedFiles({"/a": (1, 2, 3)})
    assert written([end, long, long, end, EndOfTrace()]) == [end, long, long, end, EndOfTrace()]


@given(st.data())
def test_what_was_cut_off_is_no_record_whatever_follows(data: st.DataObject) -> None:
    fd = new_journal()
    try:
        journal, one = TraceJournal(fd), reads_of([(0, [("/a", 5)])])
        assert journal.append(one)
        first = os.fstat(fd).st_size
        assert journal.append(one)
        os.ftruncate(fd, data.draw(st.integers(first + 1, 2 * first - 1)))
        assert list(TraceJournal(fd).new()) == [one]  # the rest may follow
        for _ in range(2):
            assert journal.append(one)
        taken = TraceJournal(fd).new()
        assert next(taken) == one
        with suppress(MalformedError):
            assert list(taken) == []
    finally:
        os.close(fd)


@given(st.lists(st.tuples(addresses, versions), min_size=1, max_size=4), st.data())
def test_samples_that_have_an_item_in_common_have_a_mark_in_common(
    read: list[tuple[str, int]], data: st.DataObject
) -> None:
    shared = data.draw(st.sampled_from(read))
    recorded = joined([reads_of([(0, read), (1, []), (2, [("/other", 1), shared])])])
    marks = recorded.marks
    assert marks[0] & marks[2]
    assert marks[1] == 0
    bits = [mark.bit_count() for mark in marks.tolist()]
    assert all(a <= b for a, b in zip(bits, [len(read), 0, 2], strict=True))
