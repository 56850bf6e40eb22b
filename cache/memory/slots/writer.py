"""The side of a slot's worker, which makes slots and fills them."""

from __future__ import annotations

import itertools
import mmap
import os
from collections import deque
from collections.abc import Callable, Sequence
from itertools import zip_longest

from creel.cache.memory.buffers import address_of
from creel.cache.memory.memfd import mapped, sealed_memfd
from creel.cache.memory.slots.slot import POPULATE, Slot

ALIGN = 64  # bytes: a cache line, and the alignment of torch's own allocator
_MEMORY = 64  # number of recent batches that a slot's size is compared with
_SPARE = 16  # batches after which a large slot that none of them needed is freed
_TOO_LARGE = 4  # a slot larger than this many times what these batches need is not used, or freed
_LARGE = 256 << 10  # bytes of a part from which on it has a slot of its own
_LEAST = 64 << 10  # least bytes of a slot to share, as small batches differ in size
_MAX_LARGE = 8  # most of these in a batch: a list of many images needs no descriptor for each
TINY = 16 << 10  # bytes of a part up to which it is always copied out, and so holds no slot
MAX_NBYTES = 1 << 30  # most bytes of all slots that a worker keeps, without one-offs


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
        self._ids = itertools.count(len(inherited))  # of the next slots
        self._slots: dict[int, Slot] = {}  # by id, those that this process maps
        for number, mapping in enumerate(inherited if max_slots else ()):
            slot = Slot(
                number, -1, len(mapping), False, mapping, address_of(mapping), untouched=True
            )
            self._slots[number] = slot
        self._open: list[Slot] = []  # slots of the current batch
        self._unsent: list[Slot] = []  # whose descriptors the trainer lacks
        self._spent: list[Slot] = []  # one-offs that were handed over
        self._retired: list[int] = []  # ids that were given up since the last batch
        #: Of recent batches: bytes in shared slots, then bytes in each other slot.
        self._batches: deque[list[int]] = deque(maxlen=_MEMORY)
        self._until_trim = _MEMORY  # batches until slots that are too many are freed
        self._expected: list[int] = []  # the largest of these, by position
        self._most = 1  # most slots of a recent batch
        self._limit = 0  # larger slots are freed when they come back
        self._batches_left = _SPARE  # until large slots that were not needed are freed
        self._unneeded: int | None = None  # large slots that were idle after each batch since
        #: Called before a slot is made because none is idle: may call `give_back`.
        self.poll: Callable[[], None] = lambda: None

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
            self._slot_for(want, most, tail)
            or self._slot_for(nbytes, most, tail)
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
                self._remove(slot)
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

    def _slot_for(self, nbytes: int, most: int, tail: int) -> Slot | None:
        """Return the smallest idle slot of `nbytes` to `most`, or a new one; None beyond limits.

        A larger one is not used: whoever kept a small part would hold all of it.
        """
        slot = self._fitting(nbytes, most)
        if slot is None and self._slots:
            self.poll()
            slot = self._fitting(nbytes, most)
        return slot or self._grown(_rounded(nbytes) + tail)

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
            mapping = mapped(fd, nbytes, flags=POPULATE)
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
        self._remove(slot)

    def _remove(self, slot: Slot) -> None:
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
