"""The side of the trainer, which maps slots and makes tensors over them."""

from __future__ import annotations

import mmap
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from creel.cache.memory.memfd import mapped
from creel.cache.memory.slots.slot import POPULATE, Buffer, exporter
from creel.errors import IllegalEventError
from creel.system.forks import at_fork
from creel.system.transfers import transfer

#: Batches that are copied out of a slot before its pages are locked.
COPIES = 2


class SlotMapping(mmap.mmap):
    """The mapping of a slot.

    Attributes:
        page_lock: keeps the pages locked for a device until it dies; None: they are not.
        asked: how often they were to be locked.
    """

    page_lock: object | None = None
    asked = 0

    def __del__(self) -> None:
        self.page_lock = None  # before the memory is unmapped


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
        return len(self._live) >= self.max_leased

    def map_slot(self, slot_id: int, fd: int, nbytes: int) -> None:
        """Map a slot that the worker has made; the caller keeps (and closes) `fd`.

        If it cannot be mapped (which takes a descriptor as well), its bytes are copied, and the
        worker is told not to use the slot again.

        Raises:
            OSError, MemoryError: the slot cannot be copied either.
        """
        try:
            flags = mmap.MAP_PRIVATE if self._private else POPULATE  # populating would copy it all
            self._maps[slot_id] = mapped(fd, nbytes, flags=flags, kind=SlotMapping)
        except OSError:
            self._maps[slot_id] = copy = bytearray(nbytes)
            transfer(os.preadv, fd, [copy])
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
        buffer = exporter(self._map(slot_id))
        self._live[slot_id] = lease = _SlotLease(buffer, _ended)
        lease.reader, lease.slot_id, lease.once = self._self, slot_id, once
        return buffer

    def lock_pages(self, slot_id: int, lock: Callable[[mmap.mmap], object]) -> None:
        """Lock the pages of a slot with `lock` until it is unmapped.

        Not at once: some slots carry few batches, and to lock pages takes time as well.
        """
        mapping = self._maps.get(slot_id)
        # What is private has other pages with each batch: locking them would copy the slot.
        if not isinstance(mapping, SlotMapping) or self._private:
            return
        mapping.asked += 1
        if mapping.asked > COPIES and mapping.page_lock is None:
            mapping.page_lock = lock(mapping)

    def unlock_pages(self, slot_id: int) -> None:
        """End what `lock_pages` did."""
        mapping = self._maps.get(slot_id)
        if isinstance(mapping, SlotMapping):
            mapping.page_lock = None

    def locked_leases(self, slot_ids: Iterable[int]) -> list[Buffer]:
        """Return the buffers of those of these slots that are leased and locked."""
        buffers = []
        for slot_id in slot_ids:
            lease, mapping = self._live.get(slot_id), self._maps.get(slot_id)
            buffer = None if lease is None else lease()
            if buffer is not None and getattr(mapping, "page_lock", None) is not None:
                buffers.append(buffer)
        return buffers

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

    def unmap(self, ids: list[int]) -> None:
        """Unmap slots that the worker has freed; leased ones stay until their last tensor dies."""
        for slot_id in ids:
            self._maps.pop(slot_id, None)
            self._copies.discard(slot_id)

    def unused(self, nbytes: int) -> list[mmap.mmap]:
        """Return unused slots of a worker that has ended, of at most `nbytes` together."""
        mappings = []
        for slot_id, mapping in list(self._maps.items()):
            if slot_id in self._live or not isinstance(mapping, mmap.mmap):
                continue
            if len(mapping) <= nbytes:
                nbytes -= len(mapping)
                mappings.append(mapping)
        return mappings

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
