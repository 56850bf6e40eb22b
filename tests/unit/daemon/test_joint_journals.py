"""Joint journals in the daemon: which descriptor a client gets, and how many are held."""

from __future__ import annotations

import os

import pytest

from creel.cache.memory.memfd import Descriptor, memfd
from creel.daemon.service.sockets.journals import JointJournals
from creel.errors import MalformedError, UnavailableError
from kit import descriptors


def offered(journals: JointJournals, token: str, name: str) -> int:
    """Offer a new memfd; return the inode of what comes back."""
    own = Descriptor(memfd("journal"))
    return os.fstat(journals.offer(token, name, own).fd).st_ino


def test_a_client_holds_few_journals_and_all_of_them_not_many() -> None:
    before = descriptors()
    journals = JointJournals()
    for i in range(8):
        offered(journals, "a", f"a{i}")
    with pytest.raises(UnavailableError):
        offered(journals, "a", "a8")
    assert offered(journals, "a", "a0") == offered(journals, "b", "a0")  # costs nothing
    for i in range(31):
        for k in range(8):
            offered(journals, f"b{i}", f"b{i} {k}")
    with pytest.raises(UnavailableError):
        offered(journals, "c", "c")
    assert len(descriptors() - before) == 256
    journals.client_left("a")
    offered(journals, "c", "c")
    for token in ("c", *(f"b{i}" for i in range(31))):
        journals.client_left(token)
    assert descriptors() == before


def test_descriptors_of_no_memfd_are_no_journal() -> None:
    """A rank that writes to it could have to wait."""
    journals = JointJournals()
    for end in map(Descriptor, os.pipe()):
        with pytest.raises(MalformedError):
            journals.offer("a", "pipe", end)
    with pytest.raises(MalformedError):
        offered(journals, "a", "n" * 65)
