"""The trainer's and the worker's ends of a channel, with enough descriptors or too few."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from creel.loader.making.transport.channel import Channel, pair
from creel.system import fd_packets
from kit import descriptors

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    """(soft, hard) of RLIMIT_NOFILE, restored afterwards."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_descriptors_have_any_number(limits: tuple[int, int]) -> None:
    """A trainer with a thousand open files has sockets beyond the limit of select()."""
    if 0 <= limits[1] < 2048:
        pytest.skip("no more than that many descriptors here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, limits[1]))
    ours, theirs = pair()
    high = socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, 1500))
    ours.close()
    channel, other = Channel(high), Channel(theirs)
    assert channel.get(0) is None
    other.post(("here",))
    assert channel.get(20) == (("here",), [])
    other.close()
    with pytest.raises(EOFError):
        channel.get(20)
    channel.close()


def test_descriptors_that_came_close_on_exec() -> None:
    """Python's own `recv_fds` ignores the flag that says so, before 3.12."""
    ours, theirs = pair()
    with ours, theirs:
        fd_packets.send(ours, b"x", [0, 1])
        data, fds, _ = fd_packets.receive(theirs, 100, 4)
        try:
            assert (data, len(fds)) == (b"x", 2)
            assert not any(map(os.get_inheritable, fds))
        finally:
            fd_packets.close_all(fds)


def test_a_message_that_lost_its_descriptors_is_an_error_that_says_why(
    limits: tuple[int, int],
) -> None:
    ours, theirs = map(Channel, pair())
    ours.post(("words",), [0])
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    with pytest.raises(OSError, match="ulimit -n") as error:
        theirs.get()
    assert error.value.errno == errno.EMFILE
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    ours.post(("words",), [0])
    got = theirs.get()
    assert got is not None
    os.close(got[1][0])
    ours.close()
    theirs.close()


def all_descriptors() -> list[int]:
    """Take every free descriptor."""
    taken = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    return taken


@pytest.mark.parametrize("nbytes, fds", [(1, 1), (1, 300), (5_000_000, 0), (100_000, 2)])
def test_a_message_whose_descriptors_were_cut_off_comes_again_without(
    limits: tuple[int, int], nbytes: int, fds: int
) -> None:
    ours, theirs = map(Channel, pair())
    data = bytes(nbytes)

    def put(name: str) -> None:
        theirs.put((name, data), [0] * fds, lambda: (name, data, "again"))

    put("whole")
    got = ours.get(20)
    assert got is not None
    assert (got[0], len(got[1])) == (("whole", data), fds)
    for fd in got[1]:
        os.close(fd)
    put("cut")
    messages: list[object] = []
    worker = threading.Thread(target=lambda: messages.append(theirs.get(20)))
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    taken = all_descriptors()
    worker.start()
    again = ours.get(20)
    for fd in taken:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert again == (("cut", data, "again"), [])
    ours.post(("end",))
    worker.join()
    assert messages == [(("end",), [])]
    ours.close()
    theirs.close()


def test_reading_from_an_end_that_was_closed_says_so() -> None:
    ours, theirs = map(Channel, pair())
    ours.close()
    for timeout_s in (None, 0, 1):
        with pytest.raises(EOFError, match="this end is closed"):
            ours.get(timeout_s)
    theirs.close()


def test_a_message_that_finds_no_free_descriptor_leaves_none_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = map(Channel, pair())
    while not ours.congested:  # else the message leaves at once, and needs none
        ours.post((bytes(10_000),))
    before = descriptors()
    free = iter([os.dup(ours.fileno())])
    monkeypatch.setattr(os, "dup", lambda _: next(free, None) or os.open("/nowhere", os.O_RDONLY))
    with pytest.raises(OSError, match="nowhere"):
        ours.post((bytes(100_000),), [ours.fileno()] * 3)
    assert not descriptors() - before
    ours.close()
    theirs.close()


@pytest.mark.parametrize("nbytes", [1, 16 << 10, 100_000, 5_000_000])
def test_without_a_descriptor_a_long_message_goes_in_pieces(
    limits: tuple[int, int], nbytes: int
) -> None:
    ours, theirs = map(Channel, pair())
    message = (np.random.default_rng(nbytes).bytes(nbytes),)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, limits[1]))
    ours.post(message)
    ours.post(("next",))
    got: list[object] = []
    while len(got) < 2:  # in one thread: the sender never waits for the receiver
        arrived = theirs.get(0)
        got += [] if arrived is None else [arrived]
        ours.flush()
    assert got == [(message, []), (("next",), [])]
    sender = threading.Thread(target=ours.put, args=(message,))
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    sender.start()
    assert theirs.get(20) == (message, [])
    sender.join()
    ours.close()
    theirs.close()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch 2.11
def test_indices_that_are_tensors_take_no_others_along() -> None:
    """A sampler may yield elements of a permutation: `yield from torch.randperm(n)`."""
    permutation = torch.randperm(1 << 16)  # 512 KiB
    sparse, floats = torch.eye(3).to_sparse(), torch.ones(2, requires_grad=True)
    batch = [*permutation[:32], permutation[::4096], permutation[:3] > 5, sparse, floats]
    ours, theirs = map(Channel, pair())
    ours.post((batch,))
    with socket.fromfd(theirs.fileno(), socket.AF_UNIX, socket.SOCK_SEQPACKET) as packet:
        assert len(packet.recv(1 << 16, socket.MSG_PEEK)) > 100  # it is not in a memfd
    got = theirs.get(20)
    assert got is not None
    (there,) = got[0]
    assert isinstance(there, list)
    for a, b in zip(there, batch, strict=True):
        assert (type(a), a.dtype, a.shape, a.layout) == (type(b), b.dtype, b.shape, b.layout)
        assert torch.equal(a.to_dense(), b.to_dense())
        assert a.requires_grad == b.requires_grad
    ours.close()
    theirs.close()
