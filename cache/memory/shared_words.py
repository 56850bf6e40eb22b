"""Shared words: memory through which daemon and client communicate once per batch, not by messages.

A warm batch costs no system call and no wake-up: the client compares one word. Aligned 8-byte loads
and stores are atomic on every platform that CPython runs on, and each word has one writer. Their
order holds without fences, even on weakly ordered processors: between two of them the interpreter
runs thousands of instructions, more than a processor reorders. A daemon never trusts a client's
words: it clamps them to valid values (`min`, monotonic).

`SharedWords` belongs to one session (64 KiB memfd; daemon and client map it read-write). Behind
4 KiB of single words it has the session's last batches (`batch_log`).
`LocationTable` belongs to one dataset (the daemon writes, clients map it read-only): the offset of
each object, and the version of its bytes. A new table is all zeros, which the system allocates
lazily, at no cost per object.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np

from creel.cache.memory import batch_log
from creel.cache.memory.memfd import mapped
from creel.cache.memory.pools.allocator import Lengths
from creel.cache.memory.pools.offsets import Offsets
from creel.counters import OF_RANKS
from creel.policies.arrays import Ints

WORDS_NBYTES = batch_log.NBYTES
_MAX_RECORDS = 2**31 - 1
#: Records of fewer bytes have no versions in their table: blocks of opened files have more.
_VERSIONED = 1 << 15

# Words that the daemon writes:
HEARTBEAT = 0  # time.monotonic_ns() of the daemon's last turn; at least every 0.1 s
READY = 1  # all steps < READY are resident (or failed) and pinned; lowered before their bytes go
STATE = 2  # 0 serving, 1 draining (clients finish ready steps, then read directly), 2 closed
TRUNCATED = 4  # Truncate messages handled; until then READY may refer to the old plan
KNOWN = 5  # steps of the plan that the daemon has received
REVOKED = 6  # times that READY was lowered: to be compared before and after copying bytes
OBJECT_NS = 7  # recent time of one read in a fetch thread; 0 before the first
#: First of EARLY_STEPS words: step k is ready before READY reaches it if the word of index
#: k % EARLY_STEPS is k + 1. Its bytes then stay in place like those of steps below READY.
EARLY = 256
EARLY_STEPS = 64
# Words that the trainer writes:
DONE = 64  # all steps < DONE have released their bytes
WANTED = 65  # highest step + 1 for which a reader stalls; the daemon serves it first
RECORDED = batch_log.RECORDED  # batches in the log so far
OVERDUE = 67  # since when (ns) a batch is awaited that is overdue (`creel stats`); 0: none is
_TEXT = slice(8 * 320, 8 * 512)  # bytes: by which cause, and for which file
#: Word of each counter by name, see `creel.counters`: those of the daemon from 32 on, those of the
#: trainer from 128 on.
COUNTER = {
    name: first + i
    for first, daemon in ((32, True), (128, False))
    for i, name in enumerate(
        w for c in OF_RANKS for w in c.words if (c.writer == "daemon") == daemon
    )
}
FAILED = COUNTER["failed"]  # objects of this session that could not be fetched


class SharedWords:
    """The words of one session, indexed with the constants above: `words[READY]`."""

    def __init__(self, fd: int) -> None:
        """Map the words behind `fd` read-write; the caller keeps (and closes) `fd`."""
        self._map = mapped(fd, WORDS_NBYTES)
        #: The words themselves, for readers that cannot afford a call for each.
        self.cells = memoryview(self._map).cast("q")
        self.log = batch_log.BatchLog(self.cells)

    def __getitem__(self, word: int) -> int:
        return self.cells[word]

    def __setitem__(self, word: int, value: int) -> None:
        self.cells[word] = value

    def set_early(self, steps: Sequence[int]) -> None:
        """Publish steps, within EARLY_STEPS, that are ready before READY reaches them (daemon)."""
        slots = dict.fromkeys(range(EARLY_STEPS), 0)
        slots |= {step % EARLY_STEPS: step + 1 for step in steps}
        for slot, word in slots.items():
            self.cells[EARLY + slot] = word

    def add(self, counter: str, value: int) -> None:
        """Add to a counter (trainer only)."""
        self.cells[COUNTER[counter]] += value

    def set(self, gauge: str, value: int) -> None:
        """Set a gauge (trainer only)."""
        self.cells[COUNTER[gauge]] = value

    def set_overdue(self, since_ns: int, cause: str = "", path: str = "") -> None:
        """Say since when a batch is overdue, by which cause and for which file (trainer only)."""
        room = _TEXT.stop - _TEXT.start
        text = f"{cause}\n{path}".encode(errors="replace")
        if len(text) >= room:  # keeps the name of the file
            text = f"{cause}\n...".encode() + text[200 - room :]
        text = text.ljust(room, b"\0")
        if since_ns and self._map[_TEXT] != text:
            self.cells[OVERDUE] = 0  # who reads the text meanwhile drops it
            self._map[_TEXT] = text
        self.cells[OVERDUE] = since_ns

    def overdue(self) -> tuple[int, str, str]:
        """Return what `set_overdue` was told last."""
        since, text = self.cells[OVERDUE], bytes(self._map[_TEXT])
        if since != self.cells[OVERDUE]:
            return since, "", ""
        cause, _, path = text.partition(b"\0")[0].decode(errors="replace").partition("\n")
        return since, cause, path

    def counters(self) -> dict[str, int]:
        return {name: self.cells[word] for name, word in COUNTER.items()}

    def close(self) -> None:
        self.log.close()
        self.cells.release()
        self._map.close()


class LocationTable:
    """Location table: places and lengths of the objects of one dataset.

    `offset` (n,): first byte in the arena, or NOWHERE. `length` (n,) int64: bytes, or -1 while
    unknown. `version` (n,) int64: of the file, when the bytes in the arena were read from it; None
    for small records, which no person's code opens. All are views of the shared memory, except for
    the equal lengths of records, which are not stored. An entry may change at any time, unless the
    object belongs to a step in [DONE, READY) of an open session and so is pinned.
    """

    def __init__(self, fd: int, objects: int, record: int, *, write: bool = False) -> None:
        """Map the table behind `fd`; the caller keeps `fd`. A new table is zeroed.

        record: bytes of each object if all have one length (`record_of`), else 0.
        """
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
        self._map = mapped(fd, self.nbytes(objects, record), prot)
        self.length: Ints
        self.version: Ints | None = None
        if record:
            versions = objects * (record >= _VERSIONED)
            if versions:
                self.version = np.frombuffer(self._map, np.int64, objects)
            places = np.frombuffer(self._map, np.int32, objects, 8 * versions)
            self.offset = Offsets(places, record)
            self.length = np.broadcast_to(np.int64(record), objects)
        else:
            words = np.frombuffer(self._map, np.int64, 3 * objects).reshape(3, objects)
            self.offset = Offsets(words[0], 1)
            self.length, self.version = words[1], words[2]

    @staticmethod
    def each_nbytes(record: int) -> int:
        """Return the bytes of each object."""
        return 4 + 8 * (record >= _VERSIONED) if record else 24

    @classmethod
    def nbytes(cls, objects: int, record: int) -> int:
        """Return the size of the memfd for this many objects (a mapping has at least 1 byte)."""
        return max(cls.each_nbytes(record) * objects, 16)

    @staticmethod
    def record_of(lengths: Lengths, arena_nbytes: int) -> int:
        """Return the length of all objects if it is the same and record numbers fit; else 0.

        Objects of one length are in a `FixedPool`.
        """
        record = lengths.only or 0
        return record if record and arena_nbytes // record < _MAX_RECORDS else 0

    def close(self) -> None:
        """Drop the views; the mapping is freed with the last view."""
        del self.offset, self.length, self.version
