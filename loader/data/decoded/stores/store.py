"""DecodedStore: decoded samples in a memfd, put there by the processes that decoded them.

The memfd begins with words and an index, which are mapped. Samples follow, each written once and
never moved: places are not used again, as a file has more of them than a machine has memory. A
sample is written by `pwritev`, so that lack of memory is an error, not SIGBUS, and read from a
mapping. Its word in the index is stored last, so that nobody reads half a sample.

What is removed (another version, or memory that others need) leaves the index first. A reader looks
at the index again after a copy. As no place is used twice, an equal word means the same bytes.

Why these are no objects of the daemon's arena, with rings in which workers hand them over: a copy
into a ring and from there into the arena takes about as long as this one write (200 KB: 30 to 127
us in place of 64 to 82, by parts and by hand, 2026-11-28), it is done in one epoch only, and a
daemon would have to run. That no sample is held in both forms needs no common budget: the daemon
reads the index (`Twin`).
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from creel.cache.memory.memfd import Descriptor, mapped
from creel.loader.data.decoded.codec import decode, encode
from creel.loader.data.decoded.stores.memory import (
    DECODED,
    DECODES,
    END,
    PAGE_NBYTES,
    USED,
    WORDS_NBYTES,
    Extent,
    Locked,
    Words,
    index_nbytes,
    memory_of_process,
    transfer,
)
from creel.loader.data.decoded.stores.slowest import Slowest
from creel.policies.memory import (
    UNKNOWN,
    SampleCost,
    decoded_room,
    given_back,
    next_poll_s,
    reserve,
    saving,
    storage_s,
)
from creel.system import limits
from creel.system.forks import reset_in_child
from creel.units import format_size

_log = logging.getLogger("creel.loader")

#: The words after END and USED; DECODED and DECODES follow.
SAMPLES, CLOSED_NS, _LOOK_NS, _REFUSED, FAILED, _ENCODED = range(2, 8)
#: Of the samples that it had not: ns of decoding them. Of all that loaders have read: how many, the
#: hits among them, and the ns that workers waited for storage, and worked.
_DECODE_NS, _ASKED, _HITS, _WAITED_NS, _WORKED_NS = range(11, 16)
#: How many processes have opened a store that lies in a file.
OPENERS = 16
#: How many samples were made to be kept; and of each opener, how many of others it has looked at.
_MADE, FIRST_SLOT, SLOTS = 10, 64, 448
#: One in 16 of the first 64 samples is made twice, one in 256 up to 16,384, and one in 512 of the
#: others: .7 % of the decoding of 1,280 samples, .2 % of a large dataset's.
_TWICE = (64, 16), (1 << 14, 256), (1 << 62, 512)
#: Samples begin at multiples of this. A word of the index is place and length, both in these units.
UNIT = 64
_LENGTH_BITS = 24
_LENGTH_MASK = (1 << _LENGTH_BITS) - 1
#: A sample's first bytes: its number, and the bytes of the header that follows.
_HEAD = struct.Struct("<qq")
#: Samples that begin in the same GiB are read from one mapping of two: none is longer than one.
_WINDOW_NBYTES = 1 << 30
#: The free memory is looked at, for .6 ms, each time that so many bytes were written, and where
#: there is plenty only in each of `_LOOKS_APART` such steps.
_LOOK_NBYTES, _LOOKS_APART = 8 << 20, 4
#: For so long other processes do not look at the free memory, while one does.
_LOOKING_NS = 20_000_000
#: How long nothing is kept after memory was short.
_SHORT_NS = 1_000_000_000
_FOREVER_NS = (1 << 63) - 1
_READ = getattr(mmap, "PROT_READ", 0)  # not on Windows, where this module is imported as well
#: Give up after so many samples of which none could be kept.
_HOPELESS = 64

#: What identifies the bytes that a sample was decoded from: plain values.
Stamp = Any
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode


class Taken(NamedTuple):
    """The result of `take`."""

    sample: Any
    stamp: Stamp
    by: int
    number: int


class DecodedStore:
    """Samples by number, for all processes that have its memfd. Thread-safe."""

    #: So many samples of others are made again and compared; `creel verify` sets more.
    most_looks: ClassVar[int] = 4

    def __init__(
        self,
        own: Extent,
        samples: int,
        limit: int | None,
        *,
        joint: bool = False,
        opener: int = 0,
        looks: int | None = None,
    ) -> None:
        """Use this memory, which has just been made, or is another process's.

        Args:
            samples: how many there are at most.
            limit: most bytes of memory; None: what others do not need (`decoded_room`).
            joint: whether processes that are no workers of this one may have it, too.
            opener: number of this process, and of its workers, among those that have it; 0: a new
                one.
            looks: how many samples of others it compares; None: `most_looks`.

        Raises:
            OSError, ValueError: it cannot be mapped.
        """
        self.own = own
        self.samples = samples
        self.limit = limit
        self.joint = joint
        self.looks = self.most_looks if looks is None else looks
        #: Its counters; where each sample lies.
        self._words, self._word_of = self._open_words()
        #: Which samples are kept in the first epoch.
        self.slowest = Slowest(self._words, samples)
        self._windows: dict[int, memoryview] = {}  # by GiB
        #: Whether this process made the memfd.
        self.mine = True
        self._counter: weakref.ref[object] | None = None  # the loader's that counts what is kept
        self.reset_for_process()
        reset_in_child(self)
        self.opener = opener or self._new_opener()

    @classmethod
    def of_process(cls, samples: int, limit: int | None) -> DecodedStore:
        """Make one for this process and its workers.

        Its memory is given back when it is deleted: workers that still have it then keep nothing.
        """
        store = cls(memory_of_process(samples), samples, limit)
        weakref.finalize(store, _end, os.getpid(), store.own, store._words).atexit = False
        return store

    def reset_for_process(self) -> None:
        """Create the state that belongs to one process."""
        self._lock = threading.Lock()
        self._apart = 1  # steps of `_LOOK_NBYTES` until the free memory is looked at again

    def __reduce__(self) -> tuple[object, ...]:
        """Give a process that is being spawned the same store."""
        make = partial(DecodedStore, joint=self.joint, opener=self.opener, looks=self.looks)
        return make, (self.own, self.samples, self.limit)

    def _open_words(self) -> tuple[Words, Words]:
        """Return the words, and those of the index."""
        nbytes = WORDS_NBYTES + 8 * self.samples
        memory = memoryview(mapped(self.own.fd, nbytes, offset=self.own.first))
        return memory[:WORDS_NBYTES].cast("q"), memory[WORDS_NBYTES:].cast("q")

    def _new_opener(self) -> int:
        return os.getpid()

    @property
    def _index(self) -> NDArray[np.int64]:
        """The words of the index as an array."""
        index: NDArray[np.int64] = np.frombuffer(self._word_of, np.int64)  # type: ignore[call-overload]  # a memoryview
        return index

    def counted_by(self, counter: object) -> bool:
        """Whether `counter`, of several, is to tell what the store has: the first one to ask."""
        now = None if self._counter is None else self._counter()
        if now is None and self.mine:
            now, self._counter = counter, weakref.ref(counter)
        return now is counter

    @property
    def index_words(self) -> tuple[Descriptor, int] | None:
        """The memfd of the index, and its first byte there; None: it lies in a file."""
        return self.own.descriptor, self.own.first + WORDS_NBYTES

    @property
    def complete(self) -> bool:
        """Whether it has all samples, in some version."""
        return self._words[SAMPLES] == self.samples > 0

    @property
    def used_nbytes(self) -> int:
        """Bytes of memory that it takes."""
        return self._words[USED]

    @property
    def kept(self) -> int:
        """Number of samples that it has."""
        return self._words[SAMPLES]

    def has(self, number: int) -> bool:
        """Whether it has a sample, in some version."""
        return self._word_of[number] != 0

    def has_all(self, numbers: NDArray[np.int64]) -> bool:
        """Whether it has these (k,) samples, in some version."""
        return self._words[SAMPLES] > 0 and bool(self._index[numbers].all())

    def first_failure(self) -> bool:
        """Note that a sample could not be kept; whether this is the first call in any process.

        After many, and none that could be kept, no more are tried: that takes time.
        """
        self._words[FAILED] += 1
        if self._words[FAILED] == _HOPELESS and not self.kept:
            self._words[CLOSED_NS] = _FOREVER_NS
        return self._words[FAILED] == 1

    # --- doubts ---------------------------------------------------------------------------------

    def to_make_twice(self) -> bool:
        """Count a sample that is about to be kept; whether to see if it is the same again."""
        with self._locked():
            n = self._words[_MADE]
            self._words[_MADE] = n + 1
        return not n % next(one_in for below, one_in in _TWICE if n < below)

    def to_compare(self, by: int) -> bool:
        """Whether this process must compare a sample that `by`, an opener, has put with its own."""
        if not self.joint or self.opener == by:
            return False
        slot = FIRST_SLOT + self.opener % SLOTS
        with self._locked():
            looks = self._words[slot]
            self._words[slot] = min(looks + 1, self.looks)
        return looks < self.looks

    # --- reading --------------------------------------------------------------------------------

    def take(self, number: int, current: Callable[[Stamp], bool]) -> Taken | None:
        """Return a private copy of a sample; None if it is absent or its stamp is not `current`."""
        word = self._word_of[number]
        if not word or self._words[_REFUSED]:
            return None
        with suppress(OSError):
            self._poll_memory()
        try:
            data = self._bytes(*_place_of(word))
            stored_number, length = _HEAD.unpack_from(data)
            begin = _HEAD.size + length
            if stored_number != number or not 0 <= length <= len(data) - _HEAD.size:
                return None
            by, stamp, node = _unpack(data[_HEAD.size : begin])
            if not current(stamp):
                return None
            sample = decode(node, data[begin:])
        except Exception:  # noqa: BLE001  bytes that were removed meanwhile, or that others wrote
            _log.debug("sample %d is made anew", number, exc_info=True)
            return None
        return Taken(sample, stamp, by, number) if self._word_of[number] == word else None

    def _bytes(self, place: int, nbytes: int) -> memoryview:
        """Return the bytes of a place: in a mapping, or a copy where there are no addresses left.

        Raises:
            OSError: the system refuses.
        """
        number, first = divmod(self.own.first + place, _WINDOW_NBYTES)
        window = self._windows.get(number)
        if window is None:
            at = number * _WINDOW_NBYTES
            try:
                window = memoryview(mapped(self.own.fd, 2 * _WINDOW_NBYTES, _READ, offset=at))
            except (OSError, ValueError):  # `ulimit -v`, or the last one
                copy = np.empty(nbytes, np.uint8)
                transfer(os.preadv, self.own, [copy], place)
                return copy.data
            self._windows[number] = window
        return window[first : first + nbytes]

    # --- writing --------------------------------------------------------------------------------

    @property
    def open(self) -> bool:
        """Whether it may have room for another sample."""
        return not self._words[_REFUSED] and time.monotonic_ns() >= self._words[CLOSED_NS]

    def put(
        self,
        number: int,
        stamp: Stamp,
        sample: object,
        encoded_nbytes: int = 0,
        ns: int = 0,
    ) -> int:
        """Keep a sample, if there is room, in place of an older version; return its bytes or 0.

        Args:
            stamp: what `current` of `take` is asked about.
            encoded_nbytes: what it was decoded from.
            ns: how long that took.

        Raises:
            UnkeptError: it cannot be kept, whatever room there is.
            UnicodeEncodeError: nor text that is not Unicode.
        """
        if not self.open:
            return 0
        node, buffers = encode(sample)
        header = _pack((self.opener, stamp, node))
        parts = self._sealed([_HEAD.pack(number, len(header)) + header, *buffers])
        nbytes = sum(len(memoryview(part).cast("B")) for part in parts)
        units = -(-nbytes // UNIT)
        if units > _LENGTH_MASK:
            return 0
        place = -1
        try:
            place = self._reserve(number, units * UNIT, encoded_nbytes, ns)
            if place < 0:
                return 0
            transfer(os.pwritev, self.own, parts, place)
            self._publish(number, place // UNIT << _LENGTH_BITS | units)
        except OSError as e:
            self._words[CLOSED_NS] = time.monotonic_ns() + _SHORT_NS
            _log.info("no more decoded samples are kept for now: %s", e)
            with suppress(OSError):
                self._abandon(place, units * UNIT)
            return 0
        return units * UNIT

    def _sealed(self, parts: list[Any]) -> list[Any]:
        """Return the parts of a sample as they are written."""
        return parts

    def _reserve(self, number: int, nbytes: int, encoded_nbytes: int, ns: int) -> int:
        """Return a new place of `nbytes`; -1 if there is no room for this sample."""
        words, kind = self._words, saving(ns, nbytes)
        with self._locked():
            words[DECODES] += 1
            words[DECODED] += nbytes
            words[_ENCODED] += encoded_nbytes
            words[_DECODE_NS] += ns
            self.slowest.decoded(kind, nbytes)
            used = words[USED]
            if self.limit is not None and used + nbytes > self.limit:
                if used + self._mean() > self.limit:
                    words[CLOSED_NS] = _FOREVER_NS
                return -1
            if words[END] < index_nbytes(self.samples):
                return -1  # a disk that fails
            step = self._apart * _LOOK_NBYTES
            if used // step != (used + nbytes) // step or not words[SAMPLES]:
                room = self._room()
                self._apart = min(max(room // (16 * _LOOK_NBYTES), 1), _LOOKS_APART)
                if room < nbytes:
                    words[CLOSED_NS] = time.monotonic_ns() + _SHORT_NS
                    return -1
                self.slowest.choose(used + room)
            if not self.slowest.has(kind, number):
                return -1
            place = words[END]
            words[END] = place + nbytes
            words[USED] = used + nbytes
        return place

    def _mean(self) -> int:
        """Return the mean bytes of the samples that it has."""
        return (self._words[USED] - WORDS_NBYTES) // max(self._words[SAMPLES], 1)

    def _room(self) -> int:
        """Return by how many bytes it may grow now, by the memory of the node."""
        words, memory = self._words, limits.memory(active=True)
        whole, encoded = (
            words[n] * self.samples // max(words[DECODES], 1) for n in (DECODED, _ENCODED)
        )
        return decoded_room(
            self.limit,
            words[USED],
            memory.available,
            reserve(memory.total),
            whole=whole,
            encoded=encoded,
            pace=self.pace(),
        )

    def read(self, samples: int, hits: int, waited_ns: int, worked_ns: int) -> None:
        """Note what loaders have read so far, and ns that their workers waited and worked."""
        words = self._words
        words[_ASKED], words[_HITS] = samples, hits
        words[_WAITED_NS], words[_WORKED_NS] = waited_ns, worked_ns

    def pace(self) -> SampleCost:
        """Return what a sample takes that is not kept."""
        words = self._words
        read = words[_ASKED]
        if not read or not words[_DECODE_NS]:
            return UNKNOWN
        again_s = words[_DECODE_NS] / words[DECODES] / 1e9
        work_s = words[_WORKED_NS] / read / 1e9 + again_s * words[_HITS] / read
        return SampleCost(
            work_s, min(again_s, work_s), storage_s(words[_WAITED_NS] / read / 1e9, work_s)
        )

    def _publish(self, number: int, word: int) -> None:
        with self._locked():
            if self._words[_REFUSED]:
                self._free(*_place_of(word))
                return
            old = self._word_of[number]
            self._word_of[number] = word
            if old:
                self._free(*_place_of(old))
            else:
                self._words[SAMPLES] += 1

    def _abandon(self, place: int, nbytes: int) -> None:
        """Give back a place that could not be written."""
        if place >= 0:
            with self._locked():
                self._free(place, nbytes)

    def _locked(self) -> Locked:
        return Locked(self.own, self._lock)

    # --- removing -------------------------------------------------------------------------------

    def _free(self, place: int, nbytes: int) -> None:
        """Give back the memory of whole pages of a place that left the index; under the lock."""
        with suppress(OSError):  # a file system without holes: the pages stay
            self._words[USED] -= self.own.give_back(place, place + nbytes)
        if self._words[CLOSED_NS] == _FOREVER_NS:
            self._words[CLOSED_NS] = 0

    def refuse(self) -> bool:
        """Keep nothing any more, nor what is there; return whether this is the first call."""
        first, self._words[_REFUSED] = not self._words[_REFUSED], 1
        if first:
            with suppress(OSError), self._locked():
                self._clear()
        return first

    def _clear(self) -> None:
        """Remove all samples; under the lock."""
        self._remove(np.flatnonzero(self._index))

    def _poll_memory(self) -> None:
        """Give memory back if other processes lack it; looks the more often the less is free."""
        now = time.monotonic_ns()
        if now < self._words[_LOOK_NS]:
            return
        self._words[_LOOK_NS] = now + _LOOKING_NS  # one process is enough
        memory = limits.memory(active=True)
        keep = reserve(memory.total)
        self._words[_LOOK_NS] = now + int(1e9 * next_poll_s(memory.available, keep))
        wanted = given_back(memory.available, keep, 0)
        if wanted > 0:
            self.give_back(wanted)

    def give_back(self, nbytes: int) -> None:
        """Remove the samples that came last, `nbytes` of them, and let others have the memory."""
        with self._locked():
            before = self._words[USED]
            numbers = np.flatnonzero(self._index)
            if not len(numbers):
                return
            latest = numbers[np.argsort(self._index[numbers])[::-1]]
            ends = np.cumsum((self._index[latest] & _LENGTH_MASK) * UNIT)
            self._remove(latest[: int(np.searchsorted(ends, nbytes)) + 1])
            self._words[CLOSED_NS] = time.monotonic_ns() + _SHORT_NS
        freed = before - self._words[USED]
        if freed:
            _log.warning(
                "other processes need memory: %s of decoded samples are not kept any more",
                format_size(freed),
            )

    def _remove(self, numbers: NDArray[np.intp]) -> None:
        """Remove these (k,) samples; under the lock."""
        words = np.sort(self._index[numbers])
        self._index[numbers] = 0
        self._words[SAMPLES] -= len(words)
        first, end = places_of(words)
        if not len(words):
            return
        begins = np.append(True, first[1:] != end[:-1])  # of a run without gaps
        for at, to in zip(first[begins], end[np.append(begins[1:], True)], strict=True):
            self._free(int(at), int(to - at))


def _end(opened_by: int, own: Extent, words: Words) -> None:
    """Give back the memory of a store that is deleted, but for its words."""
    if os.getpid() == opened_by:
        words[_REFUSED] = 1
        with suppress(OSError):
            own.give_back(WORDS_NBYTES, words[END] + PAGE_NBYTES)


def places_of(words: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first bytes of (k,) places, and the bytes after them, from words of the index."""
    first = (words >> _LENGTH_BITS) * UNIT
    return first, first + (words & _LENGTH_MASK) * UNIT


def _place_of(word: int) -> tuple[int, int]:
    """Return the first byte and the bytes of a place, from a word of the index."""
    return (word >> _LENGTH_BITS) * UNIT, (word & _LENGTH_MASK) * UNIT
