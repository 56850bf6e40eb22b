"""The trainer's and the worker's ends of a socket, where descriptors are many or few."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from creel.loader.wire import Wire, pair

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    """(soft, hard) of RLIMIT_NOFILE, as they are again afterwards."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_descriptors_have_any_number(limits: tuple[int, int]) -> None:
    """A trainer with a thousand files open has sockets that select() does not know."""
    if 0 <= limits[1] < 2048:
        pytest.skip("no more than that many descriptors here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, limits[1]))
    ours, theirs = pair()
    high = socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, 1500))
    ours.close()
    wire, other = Wire(high), Wire(theirs)
    assert wire.get(0) is None
    other.post(("here",))
    assert wire.get(20) == (("here",), [])
    other.close()
    with pytest.raises(EOFError):
        wire.get(20)
    wire.close()


def test_a_message_that_lost_its_descriptors_is_an_error_that_says_why(
    limits: tuple[int, int],
) -> None:
    ours, theirs = map(Wire, pair())
    ours.post(("board",), [0])
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    with pytest.raises(OSError, match="ulimit -n") as error:
        theirs.get()
    assert error.value.errno == errno.EMFILE
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    ours.post(("board",), [0])
    got = theirs.get()
    assert got is not None
    os.close(got[1][0])
    ours.close()
    theirs.close()
