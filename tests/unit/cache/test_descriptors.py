"""A descriptor's number is closed only when nobody can use it any more; a mapping needs none."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from creel.cache.memory.memfd import Descriptor, mapped, memfd, sealed_memfd
from creel.loader.data.tracing.journal import (
    EndOfTrace,
    JournalFile,
    JournalPlace,
    TraceJournal,
    new_journal,
)


def open_fds() -> set[str]:
    return {link.name for link in Path("/proc/self/fd").iterdir()}


def test_a_descriptor_stays_open_as_long_as_anyone_refers_to_it() -> None:
    before = open_fds()
    own = Descriptor(memfd("test"))
    used_by_a_thread, number = own, own.fd
    del own
    assert used_by_a_thread.valid
    os.write(number, b"x")
    del used_by_a_thread
    assert open_fds() == before


def lost(own: Descriptor, path: Path) -> int:
    """Close a number as a program that becomes a daemon does, and let a person's file have it."""
    os.close(own.fd)
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    if fd != own.fd:
        os.dup2(fd, own.fd)
        os.close(fd)
    return own.fd


def test_a_number_that_a_person_has_closed_is_neither_used_nor_closed(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    journal = JournalFile(new_journal())
    taken = lost(journal.descriptor, theirs)
    assert not TraceJournal(JournalPlace(journal)).append(EndOfTrace())
    assert list(TraceJournal(JournalPlace(journal)).new()) == []
    del journal
    assert os.fstat(taken).st_size == 0
    os.close(taken)


def test_a_mapping_holds_no_descriptor_and_is_the_file() -> None:
    own = Descriptor(sealed_memfd("test", 3 * mmap.PAGESIZE))
    before = open_fds()
    ours, part = mapped(own.fd, 3 * mmap.PAGESIZE), mapped(own.fd, 9, offset=mmap.PAGESIZE)
    ours[mmap.PAGESIZE : mmap.PAGESIZE + 9] = b"some data"
    assert part[:] == b"some data" == os.pread(own.fd, 9, mmap.PAGESIZE)
    only_read = mapped(own.fd, 5, mmap.PROT_READ)
    with pytest.raises(TypeError):
        only_read[0] = 1
    private = mapped(own.fd, 5, flags=mmap.MAP_PRIVATE)
    private[0] = 1
    assert (only_read[0], private[0]) == (0, 1)
    assert open_fds() == before
    own_number = own.fd
    del own
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(own_number)
    part[:4] = b"more"
    assert ours[mmap.PAGESIZE : mmap.PAGESIZE + 9] == b"more data"


def test_files_that_cannot_be_mapped_raise(tmp_path: Path) -> None:
    own = Descriptor(memfd("test"))
    with pytest.raises(ValueError, match="the file has no 5 bytes"):
        mapped(own.fd, 5)
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    only_read = Descriptor(os.open(path, os.O_RDONLY))
    with pytest.raises(PermissionError):
        mapped(only_read.fd, 5)
