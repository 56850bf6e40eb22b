"""A session as the daemon keeps it: its shared words, and the clients that wait for steps."""

from __future__ import annotations

import errno
import os
from functools import partial
from unittest import mock

import numpy as np
import pytest

from creel.cache.memory import shared_words
from creel.cache.memory.memfd import memfd, sealed_memfd
from creel.cache.memory.shared_words import (
    READY,
    REVOKED,
    WANTED,
    WORDS_NBYTES,
    SharedWords,
)
from creel.cache.storage.manifest import Manifest
from creel.cache.storage.source import Source
from creel.daemon.core.readers.twin import Twin
from creel.daemon.service.registry import DatasetRecord, Registry, SessionRecord
from creel.daemon.service.sessions import twin_of
from creel.errors import UnavailableError
from creel.loader.client.session import Session
from creel.messages import DecodedWords, Open
from kit import descriptors

pytestmark = pytest.mark.timeout(120)


def test_a_session_that_finds_no_descriptor_keeps_none() -> None:
    """Else each request takes one more that becomes free; the client keeps what it has."""
    registry = Registry(max_datasets=1, max_sessions=1)
    manifest = Manifest.of_files(["/a"])
    registry.add(DatasetRecord.create(manifest, Source(manifest), 0, 0))
    before = descriptors()
    none = OSError(errno.EMFILE, "Too many open files")
    with mock.patch("mmap.mmap", side_effect=none), pytest.raises(UnavailableError, match="Too"):
        registry.open("token", Open(manifest.key, "", 0, 1, "never"))
    assert not descriptors() - before
    registry.close()


def _record() -> SessionRecord:
    """Return a session that only the test knows; it must be closed."""
    fd = sealed_memfd("words", WORDS_NBYTES)
    return SessionRecord(1, "token", mock.Mock(), Open("d", "", 0, 1, "never"), SharedWords(fd), fd)


def test_ready_is_lowered_where_no_later_step_is_complete_either() -> None:
    session = _record()
    session.set_ready(5, 0, early=())
    revoked = session.words[REVOKED]
    session.set_ready(3, 0, early=())
    assert session.words[READY] == session.ready == 3
    assert session.words[REVOKED] == revoked + 1


def test_steps_of_a_void_plan_are_not_claimed_any_more() -> None:
    """Else the next plan's step of that number would count as a stall too early."""
    session = _record()
    words = session.words
    assert session.wait(b"who", 1, 7)
    words[WANTED] = 9
    assert session.claimed() == (0, 9)
    words[WANTED] = 3  # like `truncate` of its client
    session.truncate(3)
    assert session.claimed() == (0, 3)
    assert session.wait(b"who", 2, 5)
    assert session.claimed() == (0, 6)
    session.close()


def test_early_steps_end_waits_and_are_withdrawn_like_others() -> None:
    session = _record()
    for call, step in enumerate((1, 3, 4, 70)):
        assert session.wait(b"who", call, step)
    assert session.set_ready(1, 0, early=(3, 4, 64)) == [(b"who", 1, 3), (b"who", 2, 4)]
    reading = mock.Mock(words=session.words, _closed=False, lost=False, _void_from=1000)
    ready = partial(Session.ready, reading)  # the trainer's view of the same words
    assert [step for step in range(200) if ready(step)] == [0, 3, 4, 64]
    stamp = session.words[shared_words.REVOKED]
    assert session.set_ready(1, 0, early=(3,)) == []
    assert [step for step in range(200) if ready(step)] == [0, 3]
    assert session.words[shared_words.REVOKED] > stamp
    assert session.set_ready(60, 0, early=(67, 70)) == [(b"who", 0, 1), (b"who", 3, 70)]
    assert [step for step in range(58, 200) if ready(step)] == [58, 59, 67, 70]
    session.truncate(0)
    assert not any(map(ready, range(200)))
    session.close()


def test_each_shared_word_has_a_number_of_its_own() -> None:
    sizes = {"NOWHERE", "WORDS_NBYTES", "EARLY_STEPS", "FAILED"}  # FAILED is a counter's
    constants = {k: v for k, v in vars(shared_words).items() if k.isupper() and isinstance(v, int)}
    numbers = [v for k, v in constants.items() if k not in sizes and not k.startswith("_")]
    assert len(numbers) > 8
    numbers += range(shared_words.EARLY + 1, shared_words.EARLY + shared_words.EARLY_STEPS)
    numbers += shared_words.COUNTER.values()
    assert len(set(numbers)) == len(numbers)
    assert max(numbers) < shared_words.WORDS_NBYTES / 8


def test_what_a_client_keeps_decoded_is_mapped_only_where_it_cannot_kill_the_daemon() -> None:
    sealed, loose = sealed_memfd("twin", 8192), memfd("twin")
    os.ftruncate(loose, 8192)
    os.pwrite(sealed, (64).to_bytes(8, "little"), 4096 + 8)

    def twin(fd: int, first: int, objects: int, at: int) -> Twin | None:
        part = DecodedWords(first, objects, at)
        return twin_of(Open("d", "j", 0, 1, "never", [part]), [fd], 10)

    try:
        mapped_words = twin(sealed, 2, 3, 4096)
        assert mapped_words is not None
        assert mapped_words.has(np.arange(10)).nonzero()[0].tolist() == [3]
        hostile = [(2, 9, 4096), (-1, 3, 4096), (0, 0, 4096), (0, 3, 8192), (0, 3, 8), (0, 3, -8)]
        assert [twin(sealed, *part) for part in hostile] == [None] * len(hostile)
        assert twin(loose, 2, 3, 4096) is None, "its client could shrink it"
        assert twin_of(Open("d", "j", 0, 1, "never"), [], 10) is None
    finally:
        os.close(sealed)
        os.close(loose)
