"""Memory for batches that this process assembles itself."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import platform
import weakref
from unittest import mock

import pytest

from creel.loader.data import buffers
from creel.loader.data.buffers import BufferPool
from programs import Program


def test_memory_comes_back_when_its_last_tensor_is_gone() -> None:
    ring = BufferPool()
    batch = ring(10_000)
    where = batch.data_ptr()
    view = batch.view(100, 100)[3:]
    del batch
    other = ring(10_000)
    assert other.data_ptr() != where
    del view
    assert ring(9_000).data_ptr() == where


def test_a_view_of_a_tensor_that_was_shared_keeps_the_memory() -> None:
    ring = BufferPool()
    tensor = ring(1 << 20).fill_(5)
    seen = tensor[9:].numpy()
    tensor.share_memory_()  # type: ignore[no-untyped-call]  # torch's
    assert tensor.data_ptr() != seen.ctypes.data - 9
    del tensor
    ring(1 << 20).fill_(6)
    assert (seen == 5).all()
    where = seen.ctypes.data - 9
    del seen
    assert ring(1 << 20).data_ptr() == where


def test_a_small_part_of_a_batch_leaves_the_large_memory_alone() -> None:
    """The labels would take memory whose pages the images have touched, and the other way round."""
    ring = BufferPool()
    places = []
    for _ in range(3):
        batch = {"image": ring(1 << 20), "label": ring(256)}
        places.append([part.data_ptr() for part in batch.values()])
        del batch
    assert places[0] == places[1] == places[2]


def test_tensors_outlive_their_ring_and_its_size() -> None:
    ring = BufferPool()
    small = ring(4096).fill_(1)
    large = ring(4097).fill_(2)
    del small  # its pool is gone
    assert ring(4096).fill_(3).sum() == 3 * 4096
    del ring
    assert large.sum() == 2 * 4097


@pytest.mark.parametrize("nbytes, kept", [(4096, 5), (3 * 4096, 1), (6 * 4096, 0)])
def test_free_buffers_are_bounded_in_bytes(
    monkeypatch: pytest.MonkeyPatch, nbytes: int, kept: int
) -> None:
    """A dataset read as one batch must not stay in memory as long as the loader."""
    monkeypatch.setattr(buffers, "MAX_KEPT_NBYTES", 5 * 4096)
    ring = BufferPool()
    lent = [ring.lease(nbytes) for _ in range(7)]
    memory = [weakref.ref(buffer.memory) for buffer in lent]
    del lent
    assert sum(m() is not None for m in memory) == kept


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_batch_stays_as_it_was_in_a_forked_child() -> None:
    """As with torch's batches, although the parent's next batch reuses the memory."""
    ring = BufferPool()
    batch = ring.lease(4096)
    batch[:3] = b"old"
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.read(read, 1)
        os._exit(0 if batch[:3] == b"old" else 1)
    del batch
    ring.lease(4096)[:3] = b"new"
    os.write(write, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(read)
    os.close(write)


def test_a_lease_that_was_interrupted_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between a buffer and its memory: errors in `__del__` go to standard error."""
    unraised: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", unraised.append)
    lent = buffers.buffer_class(64)()
    del lent
    gc.collect()
    assert not unraised


def test_without_room_for_a_mapping_torch_gives_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ring = BufferPool()
    none = mock.Mock(side_effect=OSError(errno.ENOMEM, "Cannot allocate memory"))
    monkeypatch.setattr(mmap, "mmap", none)
    memory = ring(10_000)
    assert memory.shape == (10_000,)
    assert memory.fill_(7).sum() == 70_000


_FAULTS = """
import resource, sys
from creel.loader.data.buffers import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    batch = [bytes(300_000) for _ in range(64)]
    del batch
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1] == "kept":
    keep_freed_memory()
print([faults() for _ in range(6)][-1])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_memory_of_one_batch_serves_the_next() -> None:
    """Else each batch touches new pages: num_workers=0 took up to twice torch's time."""
    kept, given_back = (
        int(Program(_FAULTS, which).communicate()[0]) for which in ("kept", "given back")
    )
    assert kept < 100 < given_back
