"""Shared words: memory that daemon and client exchange once per batch, instead of messages.

A warm batch then costs no system call and no wake-up: the client compares one word. Aligned 8-byte
loads and stores are atomic on every platform CPython runs on; each word has one writer. Their order
holds on weakly ordered processors, too, without fences: between two of them the interpreter runs
thousands of instructions, more than a processor reorders loads or holds a store back. A daemon
never trusts a client's words: it clamps them to what is possible (`min`, monotonic).

`SharedWords` belongs to one session (4 KiB memfd; daemon and client map it read-write).
`LocationTable` belongs to one dataset (daemon writes, clients map it read-only): the offset of
each object. A new one is all zeros, which the system allocates page by page, at no cost per object.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np

from creel.cache.memory.allocator import Lengths
from creel.cache.memory.offsets import Offsets
from creel.counters import OF_RANKS
from creel.policies.arrays import Ints

WORDS_NBYTES = 4096
_MAX_RECORDS = 2**31 - 1

# words the daemon writes
HEARTBEAT = 0  # time.monotonic_ns() of the daemon's last turn; at least every 0.1 s
READY = 1  # all steps < READY are resident (or failed) and pinned; lowered before their bytes go
STATE = 2  # 0 serving, 1 draining (finish what you have, then read directly), 2 closed
TRUNCATED = 4  # Truncate messages handled; until then READY may refer to the old plan
KNOWN = 5  # steps of the plan that the daemon has taken in
REVOKED = 6  # how often READY was lowered: check it before and after copying bytes
OBJECT_NS = 7  # recent time of one read in a fetch thread; 0 before the first
#: Words from here on: step `k` is ready before READY says so where word k % EARLY_STEPS of these is
#: k + 1. A step's bytes stay as for those below READY.
EARLY = 256
EARLY_STEPS = 64
# words the trainer writes
DONE = 64  # all steps < DONE have released their bytes
WANTED = 65  # highest step + 1 that a reader stalls on; the daemon serves it first
#: Word of each counter by name, see `creel.counters`: the daemon's from 32 on, the trainer's from
#: 128 on.
COUNTER = {
    name: first + i
    for first, daemon in ((32, True), (128, False))
    for i, name in enumerate(
        w for c in OF_RANKS for w in c.words if (c.writer == "daemon") == daemon
    )
}
FAILED = COUNTER["failed"]  # objects of this session that could not be fetched so far


class SharedWords:
    """The words of one session, indexed with the constants above: `words[READY]`."""

    def __init__(self, fd: int) -> None:
        """Map the words behind `fd` read-write; the caller keeps (and closes) `fd`."""
        self._map = mmap.mmap(fd, WORDS_NBYTES)
        self._words = memoryview(self._map).cast("q")

    def __getitem__(self, word: int) -> int:
        return self._words[word]

    def __setitem__(self, word: int, value: int) -> None:
        self._words[word] = value

    def ready(self, step: int) -> bool:
        """Whether a step's objects are resident (or failed) and pinned: not once it is done."""
        words = self._words
        if step < words[DONE]:
            return False
        return words[READY] > step or words[EARLY + step % EARLY_STEPS] == step + 1

    def set_early(self, steps: Sequence[int]) -> None:
        """Publish which steps are ready before READY says so (daemon only); within EARLY_STEPS."""
        slots = dict.fromkeys(range(EARLY_STEPS), 0)
        slots |= {step % EARLY_STEPS: step + 1 for step in steps}
        for slot, word in slots.items():
            self._words[EARLY + slot] = word

    def add(self, counter: str, value: int) -> None:
        """Add to a counter (trainer only)."""
        self._words[COUNTER[counter]] += value

    def counters(self) -> dict[str, int]:
        return {name: self._words[word] for name, word in COUNTER.items()}

    def close(self) -> None:
        self._words.release()
        self._map.close()


class LocationTable:
    """Location table: where the objects of one dataset are in the arena.

    `offset` (n,): first byte in the arena, or NOWHERE. `length` (n,) int64: bytes, or -1 while
    unknown. Both are views of the shared memory; the lengths of records, which are all the same,
    take none. An offset may change at any time, except for the objects of a step in [DONE, READY)
    of an open session: those are pinned.
    """

    def __init__(self, fd: int, objects: int, record: int, *, write: bool = False) -> None:
        """Map the table behind `fd`; the caller keeps `fd`. A new table is zeroed.

        record: bytes of each object, which is at a multiple of them (`record_of`); 0: they vary.
        """
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
        self._map = mmap.mmap(fd, self.nbytes(objects, record), prot=prot)
        self.length: Ints
        if record:
            self.offset = Offsets(np.frombuffer(self._map, np.int32, objects), record)
            self.length = np.broadcast_to(np.int64(record), objects)
        else:
            words = np.frombuffer(self._map, np.int64, 2 * objects)
            self.offset, self.length = Offsets(words[:objects], 1), words[objects:]

    @staticmethod
    def nbytes(objects: int, record: int) -> int:
        """Size of the memfd for this many objects (a mapping of 0 bytes is impossible)."""
        return max((4 if record else 16) * objects, 16)

    @staticmethod
    def record_of(lengths: Lengths, arena_nbytes: int) -> int:
        """The length of all objects, if there is only one and record numbers fit the table; else 0.

        Such objects are in a `FixedPool`.
        """
        record = lengths.only or 0
        return record if record and arena_nbytes // record < _MAX_RECORDS else 0

    def close(self) -> None:
        """Drop the views; the mapping is freed when no view is left."""
        del self.offset, self.length
