"""The packet socket between a trainer and one of its workers."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import pytest

from creel.loader.wire import Wire, pair


@pytest.fixture
def many_open() -> Iterator[None]:
    """A process with more descriptors open than select() can name."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip(f"{hard} descriptors are all that may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    yield
    for fd in fds:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_open")
def test_a_trainer_may_have_thousands_of_files_open() -> None:
    ours, theirs = map(Wire, pair())
    assert min(ours.fileno(), theirs.fileno()) > 1023
    assert ours.get(0) is None
    theirs.post(("done",))
    assert ours.get(0) == (("done",), [])
    theirs.close()
    with pytest.raises(EOFError):
        ours.get(0)
    ours.close()
