"""Slots: reusable shared buffers that carry finished batches from a worker to its trainer.

What moves. A slot is a prefaulted memfd. Its worker makes it (`SlotWriter`) and sends its
descriptor once, with the first batch in it; the trainer maps it (`SlotReader`). From then on only
its number goes to and fro:

    idle      the worker may write into it
    open      it holds parts of the batch that is being made (`room`, until `seal` or `abandon`)
    used      the trainer has the batch, and makes tensors over the slot without a copy (`lease`)
    returned  the last of these tensors is dead; the number waits for the worker's `give_back`

Slots are reused because fresh shared memory costs a page fault for every 4 KiB, far more than the
copy of a batch itself.

A tensor that is kept holds its slot. So that it holds little else, each part of 256 KiB or more
has a slot of its own, up to eight in a batch; the smaller ones share one, and those up to 16 KiB
are copied out. A slot much larger than a batch needs is not used for it, and freed after a while.

A worker keeps the slots of `max_slots` batches, and `MAX_NBYTES` of them. When all are in use, a
part goes into a *one-off*, which is freed with its last tensor: slower, but no batch waits. When
`max_leased` slots are leased, the trainer copies batches out. The next worker reuses the slots of
one that has ended, if the trainer forks it: a child has the same mappings (`SlotReader.unused`).

What may never happen.
* A slot is written while a tensor over it lives, in the trainer, or in a child that was forked
  meanwhile: a slot leased at a fork is never written again (`mark_shared`).
* A batch fails because a slot cannot be had: without memory or descriptors it travels otherwise.
* An access raises SIGBUS: memfds are sealed, and filled before they are mapped.
* The end of a tensor, in any thread, in the garbage collector or after `close`, takes a lock.

Who writes. The worker writes into a slot between `room` and `seal`, the trainer's code into its
tensors afterwards; never both. Where several ranks map one slot (`private`), what one of them
writes stays in its process. The state of `SlotWriter` belongs to the worker's thread. That of
`SlotReader` belongs to the thread that receives batches, but for the end of a lease, which drops
what belongs to the lease and appends the number to a deque.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeAlias

from creel.cache.memory.buffers import address_of
from creel.cache.memory.memfd import mapped, sealed_memfd
from creel.errors import IllegalEventError
from creel.forks import at_fork

ALIGN = 64  # bytes: a cache line, and the alignment of torch's own allocator
_MEMORY = 64  # number of recent batches that a slot's size is compared with
_SPARE = 16  # batches after which a large slot that none of them needed is freed
_TOO_LARGE = 4  # a slot larger than this many times what these batches need is not used, or freed
_LARGE = 256 << 10  # bytes of a part from which on it has a slot of its own
_LEAST = 64 << 10  # least bytes of a slot to share, as small batches differ in size
_MAX_LARGE = 8  # most of these in a batch: a list of many images needs no descriptor for each
TINY = 16 << 10  # bytes of a part up to which it is always copied out, and so holds no slot
MAX_NBYTES = 1 << 30  # most bytes of all slots that a worker keeps, without one-offs
# Windows has neither flag; it imports this module but makes no slots.
_POPULATE = getattr(mmap, "MAP_SHARED", 0) | getattr(mmap, "MAP_POPULATE", 0)
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it


#: The exporter that tensors and arrays over a slot keep alive, and that dies with the last of them.
#: A numpy array could die before its views, as a view of a view refers to the base below.
Buffer: TypeAlias = "ctypes.Array[ctypes.c_char]"


def _buffer(mapping: mmap.mmap | bytearray) -> Buffer:
    return (ctypes.c_char * len(mapping)).from_buffer(mapping)


@dataclass(eq=False)
class Slot:
    """A slot as the worker sees it, mapped at `address`.

    `fd` is -1 for an inherited slot, which the trainer has already.
    """

    id: int
    fd: int
    nbytes: int
    once: bool
    mapping: mmap.mmap
    address: int
    untouched: bool = False  # whether its pages are missing in this process's page tables
    filled: int = 0  # bytes used by the current batch
    large: int = 0  # bytes of the large part of this batch that has it alone; 0: parts share it
    handed_over: bool = False  # whether the trainer uses it
    # The exporter that tensors over the slot in this process (from collate) keep alive.
    local: weakref.ref[Buffer] | None = None

    def buffer(self) -> Buffer:
        """Return the exporter for tensors over the slot in the worker."""
        buffer = self.local() if self.local is not None else None
        if buffer is None:
            buffer = _buffer(self.mapping)
            self.local = weakref.ref(buffer)
        return buffer

    @property
    def idle(self) -> bool:
        """Whether neither the trainer nor a tensor in this process uses the slot."""
        return not self.handed_over and (self.local is None or self.local() is None)

    def touch(self) -> None:
        """Map all pages of an inherited slot at once, in half the time of a fault for each."""
        self.untouched = False
        with contextlib.suppress(OSError):  # an older kernel: pages are mapped one by one
            self.mapping.madvise(_MADV_POPULATE_WRITE)

    def close(self) -> None:
        """Close the descriptor; the memory is freed with the last mapping."""
        if self.fd >= 0:
            os.close(self.fd)
        with contextlib.suppress(BufferError):  # a tensor in this process still uses it
            self.mapping.close()


class SlotWriter:
    """The worker's side. Not thread-safe.

    To write a batch, call `room` as often as needed, then `seal`, which returns its slots; or
    `abandon` instead of `seal` after an error.
    """

    def __init__(self, *, max_slots: int, inherited: Sequence[mmap.mmap] = ()) -> None:
        """Keep the slots of at most `max_slots` batches.

        inherited: mappings of the first slots, the same as for this worker's `SlotReader`.
        """
        self._max_slots = max_slots
        self._ids = itertools.count(len(inherited))
        self._slots: dict[int, Slot] = {}
        for number, mapping in enumerate(inherited if max_slots else ()):
            slot = Slot(
                number, -1, len(mapping), False, mapping, address_of(mapping), untouched=True
            )
            self._slots[number] = slot
        self._open: list[Slot] = []  # slots of the current batch
        self._unsent: list[Slot] = []
        self._spent: list[Slot] = []  # one-offs that were handed over
        self._retired: list[int] = []
        #: Of recent batches: bytes in shared slots, then bytes in each other slot.
        self._batches: deque[list[int]] = deque(maxlen=_MEMORY)
        self._until_trim = _MEMORY
        self._expected: list[int] = []  # the largest of these, by position
        self._most = 1  # most slots of a recent batch
        self._limit = 0  # larger slots are freed when they come back
        self._batches_left = _SPARE  # until large slots that were not needed are freed
        self._unneeded: int | None = None  # large slots that were idle after each batch since
        #: Called before a slot is made because none is idle: may call `give_back`.
        self.look: Callable[[], None] = lambda: None

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in self._slots.values())

    def room(self, nbytes: int) -> tuple[Slot, int]:
        """Return a slot and an offset in it (a multiple of ALIGN) for `nbytes` of this batch.

        Raises:
            OSError: the machine has no memory left.
        """
        alone = sum(slot.large > 0 for slot in self._open)
        shared = nbytes < _LARGE or alone == _MAX_LARGE
        for slot in self._open if shared else ():
            at = -(-slot.filled // ALIGN) * ALIGN
            if (not slot.large or nbytes <= TINY) and at + nbytes <= slot.nbytes:
                slot.filled = at + nbytes
                return slot, at
        slot = self.take(max(nbytes, 1), position=0 if shared else alone + 1)
        slot.filled = nbytes
        return slot, 0

    def take(self, nbytes: int, position: int = 0) -> Slot:
        """Add a slot of at least `nbytes` to the current batch; raises as `room`.

        position: 0 for a slot to share; n for the n-th of those with one large part.
        """
        self._close_spent()
        first = position or all(slot.large for slot in self._open)
        expected = self._expected[position] if first and position < len(self._expected) else 0
        want = max(nbytes if position else max(nbytes, _LEAST), expected)
        most = _TOO_LARGE * want
        tail = TINY if position else 0  # tiny parts find room behind a large one
        slot = (
            self._found(want, most, tail)
            or self._found(nbytes, most, tail)
            or self._new(nbytes + tail, once=True)
        )
        if slot.untouched:
            slot.touch()
        slot.filled, slot.large = 0, nbytes if position else 0
        self._open.append(slot)
        self._most = max(self._most, len(self._open))
        return slot

    def seal(self) -> list[Slot]:
        """Finish the batch and return its slots; the trainer uses them until it gives them back."""
        used, self._open = self._open, []
        for slot in used:
            slot.handed_over = True
            if slot.once:
                self._spent.append(slot)
        alone = [slot.large for slot in used if slot.large]
        self._remember([sum(slot.filled for slot in used if not slot.large), *alone])
        self._free_unneeded()
        return used

    def _free_unneeded(self) -> None:
        """Free large slots if as many were idle after each of the last batches.

        A reader that was late once would otherwise cost their memory for good.
        """
        idle = [slot for slot in self._idle() if slot.nbytes >= _LARGE]
        least = len(idle) if self._unneeded is None else min(self._unneeded, len(idle))
        self._unneeded, self._batches_left = least, self._batches_left - 1
        if not self._batches_left:
            for slot in sorted(idle, key=lambda s: -s.nbytes)[:least]:
                self._retire(slot)
            self._unneeded, self._batches_left = None, _SPARE

    def holds(self, address: int, nbytes: int) -> tuple[Slot, int] | None:
        """Return the current batch's slot at this address and the offset in it, or None."""
        for slot in self._open:
            at = address - slot.address
            if at >= 0 and at + nbytes <= slot.filled:
                return slot, at
        return None

    def abandon(self) -> None:
        for slot in self._open:
            if slot.once:
                self._forget(slot)
        self._open = []

    def unsent(self) -> list[tuple[int, int, int]]:
        """Return (id, descriptor, bytes) of slots that the trainer has not received.

        The caller must send them no later than the batch in them, and before the next `give_back`
        or batch, which closes descriptors of one-offs.
        """
        new, self._unsent = self._unsent, []
        return [(slot.id, slot.fd, slot.nbytes) for slot in new]

    def retired(self) -> list[int]:
        """Return the ids of freed slots, which the trainer can forget."""
        gone, self._retired = self._retired, []
        return gone

    def give_back(self, ids: list[int]) -> None:
        """Take slots back from the trainer; ~id stands for a slot that must not be used again.

        Unknown ids are ignored.
        """
        self._close_spent()
        for number in ids:
            slot = self._slots.get(max(number, ~number))
            if slot is None:
                continue
            slot.handed_over = False
            if number < 0 or (slot.nbytes > self._limit and slot.idle):
                self._retire(slot)

    def close(self) -> None:
        """Close all descriptors; the trainer's mappings stay."""
        self.abandon()
        self._close_spent()
        for slot in self._slots.values():
            slot.close()
        self._slots.clear()
        self._unsent.clear()

    def _idle(self) -> list[Slot]:
        return [s for s in self._slots.values() if s.idle and s not in self._open]

    def _found(self, nbytes: int, most: int, tail: int) -> Slot | None:
        """Return the smallest idle slot of `nbytes` to `most`, or a new one; None beyond limits.

        A larger one is not used: whoever kept a small part would hold all of it.
        """
        found = self._fitting(nbytes, most)
        if found is None and self._slots:
            self.look()
            found = self._fitting(nbytes, most)
        return found or self._grown(_rounded(nbytes) + tail)

    def _fitting(self, nbytes: int, most: int) -> Slot | None:
        fit = [slot for slot in self._idle() if nbytes <= slot.nbytes <= most]
        return min(fit, key=lambda s: s.nbytes, default=None)

    def _grown(self, size: int) -> Slot | None:
        """Make a slot to keep, in place of idle ones if needed; None beyond the limits.

        For the limit of slots, only smaller ones are given up: they were outgrown.
        """
        max_slots = self._max_slots * max(self._most, len(self._open) + 1)
        idle = sorted(self._idle(), key=lambda s: s.nbytes)
        if not max_slots or self.nbytes - sum(s.nbytes for s in idle) + size > MAX_NBYTES:
            return None
        small = [slot for slot in idle if slot.nbytes < size]
        large = [slot for slot in idle if slot.nbytes >= size]
        while (many := len(self._slots) >= max_slots) or self.nbytes + size > MAX_NBYTES:
            gone = small if small or many else large
            if not gone:
                return None
            self._retire(gone.pop())
        return self._new(size, once=False)

    def _new(self, nbytes: int, *, once: bool) -> Slot:
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = sealed_memfd("creel-slot", nbytes)
        try:
            os.posix_fallocate(fd, 0, nbytes)  # raises without memory; a later fault would kill
            mapping = mapped(fd, nbytes, flags=_POPULATE)
        except BaseException:
            os.close(fd)
            raise
        slot = Slot(next(self._ids), fd, nbytes, once, mapping, address_of(mapping))
        self._unsent.append(slot)
        if not once:
            self._slots[slot.id] = slot
        return slot

    def _close_spent(self) -> None:
        for slot in self._spent:
            slot.close()
        self._spent.clear()

    def _retire(self, slot: Slot) -> None:
        del self._slots[slot.id]
        self._forget(slot)

    def _forget(self, slot: Slot) -> None:
        if slot in self._unsent:
            self._unsent.remove(slot)
        else:
            self._retired.append(slot.id)
        slot.close()

    def _remember(self, nbytes: list[int]) -> None:
        """Note the bytes of a batch by position."""
        self._batches.append(nbytes)
        recent: Sequence[list[int]] = [self._expected, nbytes]
        self._until_trim -= 1
        if not self._until_trim:
            self._until_trim = _MEMORY
            recent, self._limit = self._batches, 0
            self._most = max(map(len, recent))
        self._expected = [max(of_all) for of_all in zip_longest(*recent, fillvalue=0)]
        self._limit = max(self._limit, _TOO_LARGE * _rounded(max(_LEAST, *self._expected)))
        if self._until_trim == _MEMORY:
            for slot in self._idle():
                if slot.nbytes > self._limit:
                    self._retire(slot)


def _rounded(nbytes: int) -> int:
    """Round up by at most a quarter, so that batches of similar sizes share slots.

    >>> [_rounded(n) for n in (1, 4096, 5000, 39_000_000)]
    [4096, 4096, 5120, 41943040]
    """
    step = max(1 << max(nbytes.bit_length() - 3, 0), 1)
    return max(-(-nbytes // step) * step, mmap.PAGESIZE)


class SlotReader:
    """The trainer's side, one per worker.

    Tensors may die in any thread, within the garbage collector, after `close`, or in a forked
    child. Their end only appends to a deque, and in a child not even that.
    """

    def __init__(
        self, *, max_leased: int, inherited: Sequence[mmap.mmap] = (), private: bool = False
    ) -> None:
        """Have batches copied out while `max_leased` slots are leased.

        inherited: mappings of the first slots, from another worker's `unused`.
        private: keep writes into a lease in this process, and discard them with the lease, as other
            processes read the same slot.
        """
        self.max_leased = max_leased
        self._private = private
        #: Ids of slots that may be used again, and ~id of those that must not be.
        self._free: deque[int] = deque()
        self._maps: dict[int, mmap.mmap | bytearray] = dict(enumerate(inherited))
        self._copies: set[int] = set()  # slots copied instead of mapped, valid for one batch
        self._live: dict[int, _SlotLease] = {}
        self._shared: set[int] = set()
        self._pid = os.getpid()
        self._self = weakref.ref(self, _readers.discard)
        _readers.add(self._self)

    @property
    def leased(self) -> int:
        """Number of slots that tensors keep alive."""
        return len(self._live)

    @property
    def full(self) -> bool:
        """Whether the next batch should be copied out."""
        return self.leased >= self.max_leased

    def adopt(self, slot_id: int, fd: int, nbytes: int) -> None:
        """Map a slot that the worker has made; the caller keeps (and closes) `fd`.

        If it cannot be mapped (which takes a descriptor as well), its bytes are copied, and the
        worker is told not to use the slot again.

        Raises:
            OSError, MemoryError: the slot cannot be copied either.
        """
        try:
            flags = mmap.MAP_PRIVATE if self._private else _POPULATE  # populating would copy it all
            self._maps[slot_id] = mapped(fd, nbytes, flags=flags)
        except OSError:
            self._maps[slot_id] = _copy_of(fd, nbytes)
            self._copies.add(slot_id)

    def view(self, slot_id: int) -> memoryview:
        """Return all bytes of a slot, valid until it is given back. Raises IllegalEventError."""
        return memoryview(self._map(slot_id))

    def lease(self, slot_id: int, *, once: bool = False) -> Buffer:
        """Return a buffer over the whole slot; when it dies, the slot may be written again.

        A one-off (`once`) is then unmapped and not given back.

        Raises:
            IllegalEventError: there is no such slot, or it is already leased.
        """
        if slot_id in self._live:
            raise IllegalEventError(f"slot {slot_id} is leased already")
        buffer = _buffer(self._map(slot_id))
        self._live[slot_id] = lease = _SlotLease(buffer, _ended)
        lease.reader, lease.slot_id, lease.once = self._self, slot_id, once
        return buffer

    def release(self, slot_id: int, *, once: bool = False) -> None:
        """Give back a slot that was not leased."""
        known = max(slot_id, ~slot_id)
        copied = known in self._copies
        if once or copied:
            self._maps.pop(known, None)
            self._copies.discard(known)
        if not once:
            self._free.append(~known if copied else slot_id)

    def returned(self) -> list[int]:
        """Return the ids for `SlotWriter.give_back`, each once."""
        ids = []
        while self._free:  # other threads only append
            ids.append(self._free.popleft())
        return ids

    def forget(self, ids: list[int]) -> None:
        """Unmap slots that the worker has freed; leased ones stay until their last tensor dies."""
        for slot_id in ids:
            self._maps.pop(slot_id, None)
            self._copies.discard(slot_id)

    def unused(self, nbytes: int) -> list[mmap.mmap]:
        """Return unused slots of a worker that has ended, of at most `nbytes` together."""
        found = []
        for slot_id, mapping in list(self._maps.items()):
            if slot_id in self._live or not isinstance(mapping, mmap.mmap):
                continue
            if len(mapping) <= nbytes:
                nbytes -= len(mapping)
                found.append(mapping)
        return found

    def close(self) -> None:
        """Forget all slots; tensors stay valid, and no slot is given back any more."""
        self._free = deque(maxlen=0)
        self._maps.clear()

    def _map(self, slot_id: int) -> mmap.mmap | bytearray:
        mapping = self._maps.get(slot_id)
        if mapping is None:
            raise IllegalEventError(f"slot {slot_id} was not handed over")
        return mapping

    def _end(self, slot_id: int, once: bool) -> None:
        """Release a slot whose last tensor died; takes no lock, as it may interrupt any line."""
        self._live.pop(slot_id, None)
        if self._pid != os.getpid():
            return
        mapping = self._maps.get(slot_id)
        if self._private and isinstance(mapping, mmap.mmap):
            mapping.madvise(mmap.MADV_DONTNEED)  # private pages would hide the next batch
        shared = slot_id in self._shared
        if shared:
            self._shared.discard(slot_id)
            self._maps.pop(slot_id, None)
        self.release(~slot_id if shared else slot_id, once=once)

    def mark_shared(self) -> None:
        """Mark slots leased at a fork: they are not written again, as the child sees them."""
        self._shared.update(self._live)


def _copy_of(fd: int, nbytes: int) -> bytearray:
    copy = bytearray(nbytes)
    view, at = memoryview(copy), 0
    while at < nbytes:
        at += os.preadv(fd, [view[at:]], at)  # a sealed memfd never ends early
    return copy


class _SlotLease(weakref.ref[Buffer]):
    """Calls back when a leased buffer dies, at a third of the cost of `weakref.finalize`."""

    __slots__ = ("once", "reader", "slot_id")
    reader: weakref.ref[SlotReader]
    slot_id: int
    once: bool


def _ended(lease: weakref.ref[Buffer], finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
    if finalizing() or not isinstance(lease, _SlotLease):  # an exiting process returns no slots
        return
    owner = lease.reader()
    if owner is not None:
        owner._end(lease.slot_id, lease.once)  # noqa: SLF001  of this module


_readers: set[weakref.ref[SlotReader]] = set()


def _mark_all_shared() -> None:
    for reader in list(_readers):
        owner = reader()
        if owner is not None:
            owner.mark_shared()


# Before and after, as other threads run on: they may lease or return a slot during the fork.
at_fork(before=_mark_all_shared, after_in_parent=_mark_all_shared)
