"""Journals of samples' reads: other processes read them; an incomplete record does not count."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from creel.cache.storage.version import UNKNOWN
from creel.errors import MalformedError
from creel.loader.data.tracing.journal import (
    ALL,
    FILE,
    EndOfTrace,
    Item,
    JournalFile,
    JournalPlace,
    Reads,
    Record,
    TraceJournal,
    joined,
    new_journal,
    record_of,
)

Batch = list[tuple[int, list[tuple[Item, int]]]]

addresses = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=9)
items = st.one_of(
    addresses,
    st.tuples(st.integers(0, 3), st.integers(0, 1 << 40)),
    st.tuples(addresses, st.integers(0, 3), st.integers(1, 4), st.integers(7 << 12, 1 << 40)),
)
versions = st.integers(-2, (1 << 62) - 1)
samples = st.tuples(st.integers(0, 1 << 40), st.lists(st.tuples(items, versions), max_size=3))


def written(records: Sequence[Record]) -> list[Record]:
    """Return what another process reads of a journal with these records."""
    own = new_journal()
    theirs, ours = (TraceJournal(JournalPlace(JournalFile(own), 7)) for _ in range(2))
    taken: list[Record] = []
    for record in records:
        assert ours.append(record)
        taken += theirs.new()
    assert list(ours.new()) == taken
    return taken


@given(st.lists(st.lists(samples, max_size=4), max_size=4))
def test_reads_of_samples_are_told_as_they_were(batches: list[Batch]) -> None:
    taken = written([record_of(batch, again=3) for batch in batches])
    reads = [record for record in taken if isinstance(record, Reads)]
    assert [record.again for record in reads] == [3] * len(batches)
    recorded = joined(reads)
    items: list[tuple[Item, int]] = []
    names = iter(recorded.addresses)
    for part, number, blocks, nbytes, version, _ in recorded.items.tolist():
        if part == FILE:
            name = next(names)
            items.append((name if number == ALL else (name, number, blocks, nbytes), version))
        else:
            items.append(((part, number), UNKNOWN))
    every = [item for batch in batches for item in batch]
    assert recorded.samples.tolist() == [sample for sample, _ in every]
    assert recorded.counts.tolist() == [len(read) for _, read in every]
    assert items == [
        (item, UNKNOWN if len(item) == 2 and isinstance(item, tuple) else version)
        for _, read in every
        for item, version in read
    ]


SOUND = record_of([(0, [("/a", 5)]), (4, [((1, 2), 0), (("/b", 3, 9, 12 << 12), 6)])])


@pytest.mark.parametrize(
    "wrong",
    [
        {"samples": SOUND.samples[:-8]},
        {"samples": SOUND.samples[:-1]},
        {"samples": np.array([0, -1], "<i8").tobytes()},
        {"counts": SOUND.counts + SOUND.counts},
        {"counts": np.array([3, 1], "<i8").tobytes()},
        {"counts": np.array([4, -1], "<i8").tobytes()},
        {"counts": np.array([2**62, 3 - 2**62], "<i8").tobytes()},
        {"items": SOUND.items[:-8]},
        {"items": SOUND.items[:48]},
        {"items": SOUND.items.replace(np.int64(9).tobytes(), np.int64(10).tobytes())},
        {"items": SOUND.items.replace(np.int64(9).tobytes(), np.int64(0).tobytes())},
        {"items": SOUND.items.replace(np.int64(2).tobytes(), np.int64(-1).tobytes())},
        {"items": SOUND.items.replace(np.int64(FILE).tobytes(), np.int64(-2).tobytes())},
        {"addresses": "/a"},
        {"addresses": ""},
    ],
    ids=str,
)
@pytest.mark.parametrize("sealed", [False, True])
def test_a_record_whose_columns_do_not_fit_is_none(wrong: Any, *, sealed: bool) -> None:
    odd = Reads(**{**msgspec.structs.asdict(SOUND), **wrong})
    assert odd != SOUND
    file = JournalFile(new_journal())
    ours, theirs = (TraceJournal(JournalPlace(file, 7)) for _ in range(2))
    assert ours.append(SOUND)
    assert ours.append(EndOfTrace([SOUND, odd]) if sealed else odd)
    records = theirs.new()
    assert next(records) == SOUND
    with pytest.raises(MalformedError):
        next(records)


def test_whether_a_journal_is_empty_is_known_without_reading_it() -> None:
    file = JournalFile(new_journal())
    for number in (8, 7):
        assert not file.has(7)
        assert TraceJournal(JournalPlace(file, number)).append(SOUND)
    assert file.has(7)
    with mock.patch("os.pread", side_effect=AssertionError("it was read again")):
        assert file.has(7)
        assert JournalPlace(file, 9).empty


def test_a_record_is_longer_than_what_is_read_at_a_time() -> None:
    batch = [(i, [(f"/data/{i:060}", i + 1)]) for i in range(20_000)]
    long, end = record_of(batch), EndOfTrace()
    assert written([end, long, long, end]) == [end, long, long, end]


@given(st.data())
def test_only_the_record_that_was_cut_off_is_lost(data: st.DataObject) -> None:
    """Those of other processes and datasets, before and after it, are read."""
    own = new_journal()
    file = JournalFile(own)
    record, other = record_of([(0, [("/a", 5)])]), record_of([(1, [("/b", 6), ("/c", 7)])])
    assert TraceJournal(JournalPlace(JournalFile(own), 7)).append(record)
    first, number = os.fstat(own.fd).st_size, data.draw(st.sampled_from([7, 8]))
    assert TraceJournal(JournalPlace(JournalFile(own), number)).append(other)
    whole = os.fstat(own.fd).st_size
    os.ftruncate(own.fd, data.draw(st.integers(first + 1, whole - 1)))
    look_between = data.draw(st.booleans())
    if look_between:
        assert list(file.records(7, 1)) == list(file.records(8, 0)) == []  # the rest may follow
    for _ in range(3):
        assert TraceJournal(JournalPlace(JournalFile(own), 7)).append(record)
        assert TraceJournal(JournalPlace(JournalFile(own), 8)).append(other)
    assert list(TraceJournal(JournalPlace(file, 7)).new()) == [record] * 4
    assert list(TraceJournal(JournalPlace(JournalFile(own), 8)).new()) == [other] * 3


@given(st.binary(max_size=200), st.data())
def test_bytes_that_are_no_records_are_passed_over(junk: bytes, data: st.DataObject) -> None:
    own = new_journal()
    record = record_of([(0, [("/a", 5)])])
    heads = data.draw(st.lists(st.integers(0, len(junk)), max_size=3))
    for at in heads:  # as if they began here
        junk = junk[:at] + b"\xe1\x4e\x0c\x00" + junk[at:]
    os.write(own.fd, junk)
    for _ in range(2):
        assert TraceJournal(JournalPlace(JournalFile(own), 7)).append(record)
    assert list(TraceJournal(JournalPlace(JournalFile(own), 7)).new()) == [record] * 2


@given(st.lists(st.tuples(st.integers(1, 4), samples), max_size=12))
def test_the_journals_of_a_file_do_not_mix(
    written: list[tuple[int, tuple[int, list[tuple[Item, int]]]]],
) -> None:
    """Each process reads each journal as if it had a file of its own."""
    file = JournalFile(new_journal())
    journals = {number: TraceJournal(JournalPlace(file, number)) for number in range(1, 5)}
    read: dict[int, list[Record]] = {number: [] for number in journals}
    for number, sample in written:
        assert journals[number].append(record_of([sample]))
        read[number] += journals[number].new()
    for number in journals:
        expected = [record_of([sample]) for n, sample in written if n == number]
        assert read[number] == expected
        other_process = JournalFile(file.descriptor)
        assert list(TraceJournal(JournalPlace(other_process, number)).new()) == expected


@given(st.lists(st.tuples(addresses, versions), min_size=1, max_size=4), st.data())
def test_samples_that_have_an_item_in_common_have_a_mark_in_common(
    read: list[tuple[str, int]], data: st.DataObject
) -> None:
    shared = data.draw(st.sampled_from(read))
    recorded = joined([record_of([(0, read), (1, []), (2, [("/other", 1), shared])])])
    marks = recorded.marks
    assert marks[0] & marks[2]
    assert marks[1] == 0
    bits = [mark.bit_count() for mark in marks.tolist()]
    assert all(a <= b for a, b in zip(bits, [len(read), 0, 2], strict=True))
