"""The observer: every read of a sample's bytes passes through here, in the thread that reads.

Reads are of objects of creel's datasets (`take`, `take_rows`) or of addresses (`take_address`,
below creel.read and creel.open). Each is served from the arena of a session if the thread is inside
a `Lease` that covers it, else it is direct, and counted by the lease; inside `ObservedReads` it is
recorded as well.

A local file that a sample was recorded to read has the version that it had then. It is served only
while it still has that one: the daemon has asked for it since, so the bytes in the arena are those
of this version, too. A sample may have rewritten the file a moment ago, by C code, in another
process or by another name; no other way would tell.

Only the objects of the lease's step are copied: the daemon has pinned them until it revokes that,
when the session's stamp changes, or until the step is done: an iterator that begins anew leaves its
workers with batches that nobody wants. A copy made meanwhile is discarded.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from creel.cache.storage.version import CHANGING, MISSING, UNKNOWN, of_stat
from creel.policies.bypass import ThreadUse

if TYPE_CHECKING:
    from resource import struct_rusage

    from creel.loader.binding.adapters import Addressed
    from creel.loader.client.session import Session
    from creel.loader.datasets.base import CreelDataset
    from creel.loader.reading.file_copies import FileCopies

Copied = TypeVar("Copied", bytes, bytearray)
T = TypeVar("T")
Buffer = bytes | memoryview
_NONE: NDArray[np.int32] = np.empty(0, np.int32)
#: The system's, whatever `os.open` stands for while a dataset is read.
os_open = os.open
#: What a thread reads: an address; an object of a leaf as (id(leaf), object number); a small part
#: of a file as (address, bytes that were read, bytes of the file).
Asked = str | tuple[int, int] | tuple[str, int, int]


class _Thread(threading.local):
    lease: Lease | None = None
    observed: ObservedReads | None = None
    intercepts = False  # whether opens by code that is not creel's are looked at (`intercept`)


_thread = _Thread()


class Lease:
    """Inside the `with`, this thread's reads of a step's objects are served from the arena.

    It replaces a lease around it. Counts what it could not serve: `direct_reads`, `direct_nbytes`
    and `direct_ns`; without a session also `blocked`, how often the thread slept meanwhile. Use
    each lease for one `with` only.
    """

    __slots__ = (  # each batch has one: it is made in 250 ns with slots, 280 without
        "_bases",
        "_ids",
        "_named",
        "_numbers",
        "_outer",
        "_pieces",
        "_session",
        "_stamp",
        "_step",
        "blocked",
        "direct_nbytes",
        "direct_ns",
        "direct_reads",
    )

    def __init__(
        self,
        session: Session | None = None,
        step: int = -1,
        ids: NDArray[np.integer] = _NONE,
        stamp: int = -1,
        bases: Mapping[int, int] | None = None,
        named: Sequence[Addressed] = (),
    ) -> None:
        """Make a lease.

        Args:
            session: where bytes are copied from; None to only count direct reads.
            step: must still be held after each copy, under `stamp` (`session.held`).
            ids: (k,) objects of the step; others are read directly.
            bases: first object id by `id(leaf)`.
            named: leaves whose objects can be found by address.
        """
        self._session = session
        self._step = step
        self._ids = ids
        self._stamp = stamp
        self._bases = bases or {}
        self._named = named
        self._numbers: dict[str, tuple[int, int]] | None = None  # and versions, by address
        self._pieces: Mapping[int, list[memoryview]] | None = None
        self._outer: Lease | None = None
        self.direct_reads = 0
        self.direct_nbytes = 0
        self.direct_ns = 0
        self.blocked = 0

    def __enter__(self) -> Lease:
        if self._session is None:
            self.blocked -= _usage().ru_nvcsw  # how often it slept
        self._outer, _thread.lease = _thread.lease, self
        return self

    def __exit__(self, *_: object) -> None:
        _thread.lease = self._outer
        self._pieces = None
        if self._session is None:
            self.blocked += _usage().ru_nvcsw

    @property
    def serves(self) -> bool:
        """Whether it has a session to copy from."""
        return self._session is not None

    def number(self, leaf: CreelDataset, object_id: int) -> int | None:
        """Number in the session of an object of `leaf`; None if the lease does not cover it.

        A leaf that the lease does not know may have files that it knows by their address.
        """
        if self._session is None:
            return None
        base = self._bases.get(id(leaf))
        if base is not None:
            return base + object_id
        address = leaf.address(object_id) if self._named else None
        return None if address is None else self.find(address)

    def find(self, address: str) -> int | None:
        """Number in the session of the step's object at an address, or None.

        None also where it is a file that is not what it was when it was recorded.
        """
        if self._session is None:
            return None
        if self._numbers is None:
            self._numbers = self._by_address() if self._there(self._session) else {}
        number, of = self._numbers.get(address, (None, UNKNOWN))
        return number if of == UNKNOWN or of == version_at(address) > 0 else None

    def _there(self, session: Session) -> Mapping[int, list[memoryview]]:
        """Those of the step's objects that are in the arena: all at once takes little longer."""
        pieces = self._pieces
        if pieces is None:
            pieces = self._pieces = session.pieces(self._ids)
        return pieces

    def _by_address(self) -> dict[str, tuple[int, int]]:
        numbers: dict[str, tuple[int, int]] = {}
        for leaf in self._named:
            base = self._bases[id(leaf)]
            own = self._ids[(self._ids >= base) & (self._ids < base + leaf.object_count)]
            found = zip(own.tolist(), leaf.versions_of(own - base), strict=True)
            numbers.update(zip(leaf.addresses(own - base), found, strict=True))
        return numbers

    def take(self, number: int | None, direct: Callable[[], bytes], kind: type[Copied]) -> Copied:
        """The bytes of an object: a copy from the arena if it is there, else by `direct`."""
        copied = None if number is None else self.copy(number, kind)
        if copied is not None:
            return copied
        began = time.monotonic_ns()
        data = kind(direct())
        self._note(1, len(data), time.monotonic_ns() - began)
        return data

    def copy(self, number: int, copying: Callable[[Buffer], T]) -> T | None:
        """What `copying` makes of an object's bytes: a copy in some form.

        None if the object is not one of the step's, or not in the arena.
        """
        session = self._session
        pieces = None if session is None else self._there(session).get(number)
        if session is None or pieces is None:
            return None
        copied = copying(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        return copied if session.held(self._step, self._stamp) else None

    def take_rows(
        self,
        leaf: CreelDataset,
        ids: NDArray[np.int64],
        out: NDArray[np.uint8],
        direct: Callable[[NDArray[np.int64], NDArray[np.uint8]], None],
    ) -> None:
        """See the function `take_rows`."""
        base = self._bases.get(id(leaf))
        copied = None if base is None else self._copy_rows(ids + base, out)
        missing = np.arange(len(ids)) if copied is None else np.flatnonzero(~copied)
        if not len(missing):
            return
        began = time.monotonic_ns()
        if len(missing) == len(ids):
            direct(ids, out)
        else:
            rest = np.empty((len(missing), out.shape[1]), np.uint8)
            direct(ids[missing], rest)
            out[missing] = rest
        self._note(len(missing), len(missing) * out.shape[1], time.monotonic_ns() - began)

    def _copy_rows(
        self, numbers: NDArray[np.int64], out: NDArray[np.uint8]
    ) -> NDArray[np.bool_] | None:
        """Copy many objects, one to each row of `out`; (n,) which were copied, None for none."""
        session = self._session
        if session is None:
            return None
        # Mostly those of the whole step; `isin` sorts, which takes as long as copying 64 rows.
        whole = np.array_equal(numbers, self._ids)
        copied = np.ones(len(numbers), np.bool_) if whole else np.isin(numbers, self._ids)
        if copied.all():
            copied = session.rows(numbers, out)
        else:
            some = np.empty((int(np.count_nonzero(copied)), out.shape[1]), np.uint8)
            there = session.rows(numbers[copied], some)
            out[copied] = some
            copied[copied] = there
        return copied if session.held(self._step, self._stamp) else None

    def _note(self, reads: int, nbytes: int, ns: int) -> None:
        self.direct_reads += reads
        self.direct_nbytes += nbytes
        self.direct_ns += ns


def _usage() -> struct_rusage:
    import resource  # there is none on Windows, where this module is imported, too

    return resource.getrusage(resource.RUSAGE_THREAD)


def thread_use() -> ThreadUse:
    """What this thread has used so far."""
    counts = _usage()
    reads = counts.ru_inblock + counts.ru_majflt
    return ThreadUse(time.monotonic_ns(), time.thread_time_ns(), counts.ru_nvcsw, reads)


#: An opened file is worth caching if at least 1/4 of it was read ...
WORTH = 4
#: ... or if it is at most this many bytes: copying all of it costs no more than opening it.
_SMALL = 1 << 16


def worth(got: int, nbytes: int) -> bool:
    """Whether a file is worth caching if a sample read `got` of its `nbytes`."""
    return got * WORTH >= nbytes


class PartialRead:
    """How much of a file one sample has read through file objects."""

    def __init__(self, nbytes: int, waited_ns: int = 0) -> None:
        """`nbytes`: size of the file."""
        self.nbytes = nbytes
        self._since = -1  # what the thread had read when its reads began to count
        self._read = 0
        #: How long the storage made the thread wait for the open, in ns.
        self.waited_ns = waited_ns
        self.got_last = 0  # what `got` gave last

    def count(self, nbytes: int) -> None:
        """Count bytes that were read through a file object."""
        self._read += nbytes

    def count_thread(self) -> None:
        """Count all that this thread reads from now on: nobody sees what it reads of the file."""
        self._since = _thread_nbytes()

    def got(self) -> int:
        """Bytes that were read, at the end of the sample."""
        unseen = _thread_nbytes() - self._since if self._since >= 0 else 0
        self.got_last = self._read + unseen
        return self.got_last

    @property
    def copied_sooner(self) -> bool:
        """Whether a copy of the file, at 1 GB/s, takes less time than its open."""
        return self.nbytes <= self.waited_ns


def _thread_nbytes() -> int:
    """Bytes that this thread has read by system calls; -1 where the system does not tell."""
    try:
        fd = os_open("/proc/thread-self/io", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1
    try:
        return int(os.read(fd, 40).split()[1])
    finally:
        os.close(fd)


def is_local(address: str) -> bool:
    """Whether an address, in the form of `absolute`, is a path."""
    return "://" not in address


def version_at(path: str) -> int:
    """The version that a local file has now (`cache/storage/version.py`)."""
    now_ns = time.time_ns()
    try:
        return of_stat(os.stat(path), now_ns)  # noqa: PTH116  a third of the time
    except (OSError, ValueError):
        return MISSING


def enter_version(versions: dict[str, int], address: str, of: int) -> None:
    """Enter the version of which a sample has found a file; MISSING once it had two.

    >>> versions: dict[str, int] = {}
    >>> for of in (CHANGING, 5, CHANGING, 5):
    ...     enter_version(versions, "/a", of)
    >>> enter_version(versions, "/b", 5)
    >>> enter_version(versions, "/b", 6)
    >>> versions == {"/a": 5, "/b": MISSING}
    True
    """
    known = versions.setdefault(address, of)
    if known == CHANGING:
        versions[address] = of
    elif of not in {known, CHANGING}:
        versions[address] = MISSING


class ObservedReads:
    """Records what this thread reads inside the `with`."""

    def __init__(
        self,
        *,
        whole: bool = False,
        copies: FileCopies | None = None,
        versions: dict[str, int] | None = None,
    ) -> None:
        """Make a record.

        Args:
            whole: whether a file is worth caching however little of it is seen to be read.
            copies: where to keep what is read of slow files.
            versions: where to enter those of local files by address (see `enter_version`).
        """
        self._whole = whole
        self.copies = copies
        self._versions = {} if versions is None else versions
        self._asked: dict[Asked, PartialRead | None] = {}  # None: it was read as a whole
        self._outer: ObservedReads | None = None

    def wanted(self) -> list[Asked]:
        """Each read once, in order; small parts of files only where a copy saves time."""
        found: list[Asked] = []
        for what, part in self._asked.items():
            got = -1 if self._whole or part is None else part.got()
            if part is None or got < 0 or worth(got, part.nbytes):
                found.append(what)
            elif part.copied_sooner and isinstance(what, str):
                found.append((what, got, part.nbytes))
        return found

    def add(self, asked: Asked) -> None:
        """Record a read that succeeded: one that failed would be repeated by the daemon."""
        self._asked[asked] = None
        if isinstance(asked, str) and is_local(asked):
            enter_version(self._versions, asked, version_at(asked))

    def opened(self, path: str, nbytes: int, of: int, waited_ns: int) -> PartialRead | None:
        """Record a file that was opened, and that the storage made the thread wait for `waited_ns`.

        `of`: its version. Returns where its reads are to be counted, one place for all file objects
        of a path; None where the file is worth caching however little is read.
        """
        enter_version(self._versions, path, of)
        if nbytes <= _SMALL:
            self._asked[path] = None
            return None
        part = self._asked.setdefault(path, PartialRead(nbytes))
        if part is not None:
            part.waited_ns = max(part.waited_ns, waited_ns)
        return part

    def __enter__(self) -> ObservedReads:
        self._outer, _thread.observed = _thread.observed, self
        return self

    def __exit__(self, *_: object) -> None:
        _thread.observed = self._outer


def observing() -> ObservedReads | None:
    """The active record of this thread, or None."""
    return _thread.observed


def leased() -> bool:
    """Whether this thread is inside a lease: creel's loader, or a proxy, decides how to read."""
    return _thread.lease is not None


def take(
    leaf: CreelDataset, object_id: int, direct: Callable[[int], bytes], kind: type[Copied]
) -> Copied:
    """A copy of the bytes of an object of `leaf`: from the arena, else by `direct`.

    Args:
        direct: reads an object from the source.
        kind: `bytes` or `bytearray`.
    """
    if _thread.intercepts:
        return by_creel(lambda: take(leaf, object_id, direct, kind))
    lease, observed = _thread.lease, _thread.observed
    if lease is None:
        data = kind(direct(object_id))
    else:
        data = lease.take(lease.number(leaf, object_id), lambda: direct(object_id), kind)
    if observed is not None:
        observed.add(leaf.address(object_id) or (id(leaf), int(object_id)))
    return data


def take_rows(
    leaf: CreelDataset,
    ids: NDArray[np.int64],
    out: NDArray[np.uint8],
    direct: Callable[[NDArray[np.int64], NDArray[np.uint8]], None],
) -> None:
    """`take` for many objects of one size, which are parts of files, one to each row of `out`.

    Args:
        ids: (n,) objects of `leaf`, n > 0.
        out: (n, nbytes), contiguous.
        direct: reads (k,) objects from the source into (k, nbytes) rows.
    """
    if _thread.intercepts:
        by_creel(lambda: take_rows(leaf, ids, out, direct))
        return
    lease, observed = _thread.lease, _thread.observed
    if lease is None:
        direct(ids, out)
    else:
        lease.take_rows(leaf, ids, out, direct)
    if observed is not None:
        for object_id in ids.tolist():
            observed.add((id(leaf), object_id))


def find(address: str) -> int | None:
    """Number of the object at an address in the session of this thread's lease, or None."""
    lease = _thread.lease
    return None if lease is None else lease.find(address)


def take_address(address: str, number: int | None, direct: Callable[[str], bytes]) -> bytes:
    """The bytes at an address: from the arena if the lease has it, as `find` says, else direct."""
    if _thread.intercepts:
        return by_creel(lambda: take_address(address, number, direct))
    lease = _thread.lease
    data = direct(address) if lease is None else lease.take(number, partial(direct, address), bytes)
    if _thread.observed is not None:
        _thread.observed.add(address)
    return data


def copy_at(address: str, copying: Callable[[Buffer], T]) -> T | None:
    """A copy, made by `copying`, of the cached bytes of a file that is to be read.

    None if they are not there. What `copying` is given is good during the call only, and may be
    torn; then its result is not used.
    """
    lease = _thread.lease
    number = None if lease is None else lease.find(address)
    copied = None if lease is None or number is None else lease.copy(number, copying)
    if copied is not None and _thread.observed is not None:
        _thread.observed.add(address)
    return copied


# --- what other code opens --------------------------------------------------------------------


class Intercepting:
    """Inside the `with`, `intercepts` is true in this thread, but for creel's own reads."""

    __slots__ = ("_outer",)

    def __enter__(self) -> None:
        self._outer, _thread.intercepts = _thread.intercepts, True

    def __exit__(self, *_: object) -> None:
        _thread.intercepts = self._outer


def intercepts() -> bool:
    """Whether this thread runs a person's code, whose files creel may serve."""
    return _thread.intercepts


def by_creel(read: Callable[[], T]) -> T:
    """Call `read`; the files that it opens are creel's own affair."""
    outer, _thread.intercepts = _thread.intercepts, False
    try:
        return read()
    finally:
        _thread.intercepts = outer


def passes_on() -> bool:
    """Whether this thread has nothing to serve files from, and records none."""
    lease = _thread.lease
    return _thread.observed is None and (lease is None or not lease.serves)


def open_source(original: Callable[..., T], *args: object) -> T:
    """Open a file at the source; the lease counts it, not what is read of it later."""
    lease = _thread.lease
    if lease is None:
        return original(*args)
    began = time.monotonic_ns()
    opened = original(*args)
    lease.direct_reads += 1
    lease.direct_ns += time.monotonic_ns() - began
    return opened


#: ns; from the page cache h5py.File takes 100 us, os.open 5.
_QUICK_OPEN_NS = 200_000


def timed(opening: Callable[[], T]) -> tuple[T, int]:
    """Call `opening`; also how long the storage made this thread wait, in ns.

    0 where it did not, or nothing is recorded.
    """
    if _thread.observed is None:
        return opening(), 0
    before, began = _usage().ru_nvcsw, time.monotonic_ns()
    opened = opening()
    took = time.monotonic_ns() - began
    return opened, took if took > _QUICK_OPEN_NS and _usage().ru_nvcsw > before else 0


def read_whole(address: str) -> None:
    """Record that a sample has read all of a file."""
    if _thread.observed is not None:
        _thread.observed.add(address)
