"""Slots: written by the worker, leased by the trainer, and reused only when no one reads them."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch

from creel.cache.memory.buffers import address_of
from creel.cache.memory.slots import reader as reader_of_slots
from creel.cache.memory.slots import writer as slots_of_a_worker
from creel.cache.memory.slots.reader import COPIES, SlotReader
from creel.cache.memory.slots.slot import Buffer, Slot
from creel.cache.memory.slots.writer import ALIGN, TINY, SlotWriter
from creel.errors import IllegalEventError
from kit import descriptors

pytestmark = pytest.mark.timeout(120)
MB = 1 << 20


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlotWriter]:
    monkeypatch.setattr(slots_of_a_worker, "MAX_NBYTES", 16 * MB)
    writer = SlotWriter(max_slots=3)
    yield writer
    writer.close()


@pytest.fixture
def reader() -> Iterator[SlotReader]:
    reader = SlotReader(max_leased=4)
    yield reader
    reader.close()


def send(writer: SlotWriter, reader: SlotReader, data: bytes) -> Slot:
    """Write a batch of one piece and hand it over."""
    slot, at = writer.room(len(data))
    slot.mapping[at : at + len(data)] = data
    writer.seal()
    for slot_id, fd, nbytes in writer.unsent():
        reader.map_slot(slot_id, fd, nbytes)
    return slot


def tensor_of(buffer: Buffer, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8, count=nbytes)


@pytest.mark.parametrize("leased", [True, False])
@pytest.mark.parametrize("max_slots", [3, 0])
def test_a_slot_that_cannot_be_mapped_is_copied_once(
    reader: SlotReader, monkeypatch: pytest.MonkeyPatch, max_slots: int, *, leased: bool
) -> None:
    """A mapping needs a descriptor, too. Later writes to the slot would not be seen."""
    writer = SlotWriter(max_slots=max_slots)
    slot, at = writer.room(MB)
    slot.mapping[at : at + MB] = b"x" * MB
    writer.seal()
    with monkeypatch.context() as none:
        error = OSError(errno.EMFILE, "none left")
        none.setattr(reader_of_slots, "mapped", mock.Mock(side_effect=error))
        for unsent in writer.unsent():
            reader.map_slot(*unsent)
    if leased:
        buffer = reader.lease(slot.id, once=slot.once)
        assert bytes(memoryview(buffer)[:MB]) == b"x" * MB
        del buffer
    else:
        assert reader.view(slot.id)[:MB] == b"x" * MB
        reader.release(slot.id, once=slot.once)
    returned = reader.returned()
    assert returned == ([] if slot.once else [~slot.id])
    writer.give_back(returned)
    again = send(writer, reader, b"y" * MB)
    assert again.id != slot.id
    assert reader.view(again.id)[:MB] == b"y" * MB
    assert reader.leased == 0
    writer.close()


class Locks:
    """Stands in for a device's page locks: records which addresses are locked."""

    def __init__(self) -> None:
        self.locked: set[int] = set()

    def __call__(self, mapping: mmap.mmap) -> object:
        address = address_of(mapping)
        self.locked.add(address)
        lock = Lock()
        weakref.finalize(lock, self._unlock, address)
        return lock

    def _unlock(self, address: int) -> None:
        assert f"{address:x}-" in Path("/proc/self/maps").read_text()  # is still mapped
        self.locked.remove(address)


class Lock:
    pass


def test_pages_stay_locked_until_the_slot_is_unmapped(
    writer: SlotWriter, reader: SlotReader
) -> None:
    locks = Locks()
    slot = send(writer, reader, b"x" * MB)
    for times in range(COPIES + 2):  # the last time it is locked already
        assert len(locks.locked) == (times > COPIES)
        reader.lock_pages(slot.id, locks)
    assert reader.locked_leases([slot.id, slot.id + 1]) == []
    tensor = tensor_of(reader.lease(slot.id), MB)
    (lease,) = reader.locked_leases([slot.id, slot.id + 1])
    assert address_of(lease) in locks.locked
    reader.unmap([slot.id])
    del lease
    assert len(locks.locked) == 1
    del tensor
    assert not locks.locked


def test_pages_can_be_unlocked(writer: SlotWriter, reader: SlotReader) -> None:
    locks = Locks()
    slot = send(writer, reader, b"x" * MB)
    for _ in range(COPIES + 1):
        reader.lock_pages(slot.id, locks)
    assert locks.locked
    buffer = reader.lease(slot.id)
    reader.unlock_pages(slot.id)
    assert not locks.locked
    assert not reader.locked_leases([slot.id])
    del buffer
    reader.lock_pages(slot.id, locks)
    assert len(locks.locked) == 1
    (mapping,) = reader.unused(2 * MB)  # the next reader's
    reader.close()
    assert len(locks.locked) == 1
    del mapping
    assert not locks.locked


def test_pages_of_a_private_slot_are_not_locked(writer: SlotWriter) -> None:
    """Each batch has others: to lock them would copy it."""
    locks = Locks()
    reader = SlotReader(max_leased=4, private=True)
    slot = send(writer, reader, b"x" * MB)
    for _ in range(COPIES + 1):
        reader.lock_pages(slot.id, locks)
    assert not locks.locked


def test_a_slot_is_used_again_once_its_lease_ended(writer: SlotWriter, reader: SlotReader) -> None:
    first = send(writer, reader, b"x" * MB)
    buffer = reader.lease(first.id)
    assert bytes(memoryview(buffer)[:MB]) == b"x" * MB
    other = send(writer, reader, b"y" * MB)
    assert other is not first
    del buffer
    assert reader.returned() == [first.id]
    assert reader.returned() == []
    writer.give_back([first.id])
    assert send(writer, reader, b"z" * MB) is first


def test_all_views_of_a_tensor_keep_the_lease(writer: SlotWriter, reader: SlotReader) -> None:
    slot = send(writer, reader, bytes(range(256)) * 16)
    tensor = tensor_of(reader.lease(slot.id), 4096)
    holders: list[object] = [
        tensor[5:9],
        tensor.numpy()[1:],
        tensor.numpy()[1:].reshape(5, -1).T[::2],
        tensor.untyped_storage(),
        memoryview(cast(Any, tensor.numpy()))[3:],
        torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()),
        tensor.view(torch.int32).view(-1, 2).expand(512, 2),
        iter([tensor.detach()]),
    ]
    del tensor
    while holders:
        gc.collect()
        assert reader.returned() == []
        assert reader.leased == 1
        holders.pop()
    gc.collect()
    assert reader.returned() == [slot.id]
    assert reader.leased == 0


def test_arrays_over_a_lease_keep_it_although_numpy_collapses_bases(
    writer: SlotWriter, reader: SlotReader
) -> None:
    slot = send(writer, reader, b"a" * 4096)
    array: Any = np.ndarray((4096,), np.uint8, cast(Any, reader.lease(slot.id)))
    view = array[10:20][2:]
    del array
    gc.collect()
    assert reader.returned() == []
    assert (view == ord("a")).all()
    del view
    assert reader.returned() == [slot.id]


def test_tensors_may_die_in_any_thread_or_in_a_cycle(
    writer: SlotWriter, reader: SlotReader
) -> None:
    slot = send(writer, reader, b"a" * 4096)
    box = [tensor_of(reader.lease(slot.id), 4096)]
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert reader.returned() == [slot.id]
    writer.give_back([slot.id])
    assert send(writer, reader, b"b" * 4096) is slot
    cycle: list[object] = [tensor_of(reader.lease(slot.id), 4096)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert reader.returned() == [slot.id]


def test_tensors_outlive_reader_and_writer() -> None:
    writer, reader = SlotWriter(max_slots=8), SlotReader(max_leased=4)
    slot = send(writer, reader, b"a" * 4096)
    tensor = tensor_of(reader.lease(slot.id), 4096)
    writer.close()
    reader.close()
    assert (tensor == ord("a")).all()
    tensor += 1
    del reader
    gc.collect()
    assert (tensor == ord("b")).all()


def test_a_closed_reader_gives_nothing_back(writer: SlotWriter, reader: SlotReader) -> None:
    slot = send(writer, reader, b"a" * 4096)
    buffer = reader.lease(slot.id)
    reader.close()
    del buffer
    assert reader.returned() == []


def test_a_tensor_alive_at_exit_does_no_harm() -> None:
    code = (
        "import sys, torch; from creel.cache.memory.slots.reader import SlotReader\n"
        "from creel.cache.memory.slots.writer import SlotWriter\n"
        "w, r = SlotWriter(max_slots=8), SlotReader(max_leased=4); s, _ = w.room(9999); w.seal()\n"
        "[r.map_slot(*one) for one in w.unsent()]\n"
        "t = torch.frombuffer(r.lease(s.id), dtype=torch.uint8)\n"
        "sys.modules['keep'] = [t, r]; u = [t]; u.append(u)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_another_writer_goes_on_with_the_slots_that_nobody_uses() -> None:
    """As the worker of the next epoch does: no message is sent, and no slot is made."""
    writer, reader = SlotWriter(max_slots=8), SlotReader(max_leased=4)
    held, first, second = (send(writer, reader, bytes([c]) * MB) for c in b"abc")
    buffer = reader.lease(held.id)
    writer.close()
    spare = reader.unused(16 * MB)
    reader.close()
    assert len(spare) == 2
    heir, after = (
        SlotWriter(max_slots=8, inherited=spare),
        SlotReader(max_leased=4, inherited=spare),
    )
    taken = [heir.take(MB) for _ in range(2)]
    for slot in taken:
        slot.mapping[:MB] = b"z" * MB
    assert heir.seal() == taken
    assert heir.unsent() == []
    assert [bytes(after.view(slot.id)[:MB]) for slot in taken] == [b"z" * MB] * 2
    assert bytes(memoryview(buffer)[:MB]) == b"a" * MB
    new = send(heir, after, b"n" * MB)
    assert new.id not in {slot.id for slot in taken}
    assert after.view(new.id)[:MB] == b"n" * MB
    heir.close()
    after.close()
    assert first.nbytes == second.nbytes


def test_spare_slots_are_bounded_and_never_those_a_fork_or_a_shortage_touched(
    writer: SlotWriter, reader: SlotReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    for c in b"abc":
        send(writer, reader, bytes([c]) * MB)
    size = MB + TINY
    assert [len(mapping) for mapping in reader.unused(2 * size)] == [size, size]
    buffer = reader.lease(0)
    reader.mark_shared()
    del buffer
    assert len(reader.unused(16 * MB)) == 2
    with monkeypatch.context() as none:
        error = OSError(errno.EMFILE, "none left")
        none.setattr(reader_of_slots, "mapped", mock.Mock(side_effect=error))
        fd = os.memfd_create("other")
        os.ftruncate(fd, MB)
        reader.map_slot(9, fd, MB)
        os.close(fd)
    assert len(reader.unused(16 * MB)) == 2


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_slots_that_a_forked_child_sees_are_never_written_again(
    writer: SlotWriter, reader: SlotReader
) -> None:
    leased = send(writer, reader, b"a" * 4096)
    free = send(writer, reader, b"b" * 4096)
    buffer = reader.lease(leased.id)
    pid = os.fork()
    if not pid:
        del buffer  # deletion in the child does not concern the parent
        os._exit(0 if reader.returned() == [] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert reader.returned() == []
    del buffer
    reader.release(free.id)
    assert reader.returned() == [~leased.id, free.id]
    writer.give_back([~leased.id, free.id])
    assert writer.retired() == [leased.id]
    assert send(writer, reader, b"c" * 4096) is free


def test_with_all_slots_out_a_batch_gets_a_one_off(writer: SlotWriter, reader: SlotReader) -> None:
    buffers = [reader.lease(send(writer, reader, b"a" * MB).id) for _ in range(3)]
    slot = send(writer, reader, b"o" * MB)
    assert slot.once
    tensor = tensor_of(reader.lease(slot.id, once=True), MB)
    writer.give_back([])
    assert (tensor == ord("o")).all()
    del tensor, buffers
    assert sorted(reader.returned()) == [0, 1, 2]  # without the one-off slot
    with pytest.raises(IllegalEventError):
        reader.view(slot.id)


def test_the_budget_is_kept(writer: SlotWriter, reader: SlotReader) -> None:
    for _ in range(20):
        send(writer, reader, b"a" * (6 * MB))
        assert writer.nbytes <= 16 * MB


def test_a_batch_beyond_the_budget_gets_a_one_off(writer: SlotWriter, reader: SlotReader) -> None:
    small = send(writer, reader, b"a" * MB)
    writer.give_back([small.id])
    assert send(writer, reader, bytes(17 * MB)).once
    assert writer.nbytes == small.nbytes  # no slot was given up in vain


def test_after_a_batch_beyond_the_budget_small_ones_keep_their_slots(
    writer: SlotWriter, reader: SlotReader
) -> None:
    send(writer, reader, bytes(17 * MB))
    small = send(writer, reader, b"a" * MB)
    assert not small.once
    writer.give_back([small.id])
    assert send(writer, reader, b"a" * MB) is small


def test_a_larger_batch_takes_the_place_of_idle_small_slots(
    writer: SlotWriter, reader: SlotReader
) -> None:
    ids = [send(writer, reader, b"a" * 4096).id for _ in range(3)]
    writer.give_back(ids)
    slot = send(writer, reader, b"a" * MB)
    assert not slot.once
    gone = writer.retired()
    assert len(gone) == 1
    reader.unmap(gone)
    with pytest.raises(IllegalEventError):
        reader.view(gone[0])


def test_slots_that_are_far_too_large_for_long_are_let_go(
    writer: SlotWriter, reader: SlotReader
) -> None:
    writer.give_back([send(writer, reader, b"a" * (8 * MB)).id])
    for _ in range(200):
        writer.give_back([send(writer, reader, b"a" * 10_000).id])
        reader.unmap(writer.retired())
    assert writer.nbytes < 100_000


def test_pieces_of_a_batch_share_a_slot_and_are_aligned(
    writer: SlotWriter, reader: SlotReader
) -> None:
    send(writer, reader, b"a" * 60_000)  # now the writer knows the size
    rooms = [writer.room(n) for n in (1, 100, 3, 50_000)]
    assert len({slot.id for slot, _ in rooms}) == 1
    assert [at for _, at in rooms] == [0, ALIGN, 3 * ALIGN, 4 * ALIGN]
    slot, at = rooms[1]
    assert writer.holds(slot.address + at, 100) == (slot, at)
    assert writer.holds(slot.address + 4 * ALIGN, MB) is None
    assert len(writer.seal()) == 1
    assert writer.holds(slot.address + at, 100) is None


@pytest.mark.parametrize("mask", [20_000, 160_000, 300_000])
def test_a_part_that_is_kept_holds_little_else(mask: int) -> None:
    """All batches' masks are kept, images are given back: each slot held is near a mask's size."""
    writer, reader = SlotWriter(max_slots=4), SlotReader(max_leased=1000)
    held: dict[int, int] = {}
    for _ in range(40):
        parts = [writer.room(n) for n in (8 * MB, mask, 64)]
        used = writer.seal()
        kept = parts[1][0]
        assert parts[2][0] in used  # tiny parts need no slot of their own
        assert len(used) == 2
        held[kept.id] = kept.nbytes
        for slot in writer.unsent():
            reader.map_slot(*slot)
        writer.give_back([slot.id for slot in used if slot is not kept and not slot.once])
    assert sum(held.values()) <= 40 * 4 * max(mask, 64 << 10)
    assert max(held.values()) < MB
    assert writer.nbytes < 4 * 9 * MB
    writer.close()
    reader.close()


def test_an_abandoned_batch_leaves_its_slot_free(writer: SlotWriter, reader: SlotReader) -> None:
    slot, _ = writer.room(MB)
    writer.abandon()
    assert send(writer, reader, b"a" * MB) is slot


def test_a_slot_is_not_written_while_a_tensor_made_by_the_worker_lives(
    writer: SlotWriter, reader: SlotReader
) -> None:
    slot, _ = writer.room(MB)
    kept = tensor_of(slot.buffer(), MB)[5:]
    writer.seal()
    writer.unsent()
    writer.give_back([slot.id])
    assert send(writer, reader, b"a" * MB) is not slot
    del kept
    assert send(writer, reader, b"a" * MB) is slot


def test_misuse_is_refused(writer: SlotWriter, reader: SlotReader) -> None:
    with pytest.raises(IllegalEventError):
        reader.lease(7)
    slot = send(writer, reader, b"a")
    buffer = reader.lease(slot.id)
    with pytest.raises(IllegalEventError):
        reader.lease(slot.id)
    writer.give_back([99, ~99])
    del buffer


def test_nothing_stays_open() -> None:
    before = descriptors()
    writer, reader = SlotWriter(max_slots=1), SlotReader(max_leased=4)
    for _ in range(5):
        slot = send(writer, reader, b"a" * 9999)
        buffer = reader.lease(slot.id, once=slot.once)
        del buffer
    writer.close()
    reader.close()
    assert not descriptors() - before


def large_batch(writer: SlotWriter) -> Slot:
    """Write a batch with one large part; return its slot."""
    slot, _ = writer.room(1 << 20)
    writer.seal()
    return slot


def test_slots_that_wait_to_be_given_back_are_used_before_another_is_made() -> None:
    writer = SlotWriter(max_slots=3)
    waiting = [large_batch(writer).id]
    writer.poll = lambda: writer.give_back([waiting.pop()] if waiting else [])
    assert large_batch(writer).id == 0
    assert len(writer.unsent()) == 1, "no other was made"
    assert large_batch(writer).id == 1, "none waits any more"
    writer.close()


def test_a_large_slot_that_no_batch_needs_any_more_is_freed() -> None:
    """A reader that was late once takes three; then each is given back before the next batch."""
    writer = SlotWriter(max_slots=3)
    late = [large_batch(writer).id for _ in range(3)]
    writer.give_back(late)
    needed = writer.nbytes // len(writer.unsent())
    for _ in range(40):
        writer.give_back([large_batch(writer).id])
    assert writer.nbytes == needed
    assert len(writer.retired()) == 2, "the trainer can forget them"
    writer.close()
