"""Leases: reads of a dataset's objects, from the arena while a lease is active, else the source.

`Binding.reading(session)` returns a lease; its `with` makes it the active one of this thread. A
creel dataset calls `take` for the bytes of an object and gets a copy of the arena's bytes.

A copy is safe even for an object that is not pinned (user code may read any object at any time):
its entry in the location table is read before and after, and a copy made while the object moved is
discarded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from creel.cache.memory import offsets
from creel.cache.memory.shared_words import ABSENT

Copied = TypeVar("Copied", bytes, bytearray)


class Locations(Protocol):
    """The part of the location table that a reader needs."""

    @property
    def offset(self) -> offsets.Places:
        """(n,) first byte of each object in the arena, or ABSENT."""
        ...


class ReadableSession(Protocol):
    """The part of `loader.session.Session` that a reader needs."""

    @property
    def table(self) -> Locations:
        """The location table."""
        ...

    def pieces(self, object_id: int, /) -> list[memoryview] | None:
        """The bytes of an object in the arena, read-only and in order; None when it is absent."""
        ...

    def stamp(self) -> int:
        """A number that changes once anything that could be copied before may be invalid."""
        ...

    def rows(self, offset: NDArray[np.int64], out: NDArray[np.uint8], /) -> NDArray[np.bool_]:
        """Copy the object at place offset[i] to row i of `out`; (n,) whether each was copied."""
        ...


class Named(Protocol):
    """A leaf whose objects can be found by their address."""

    def find(self, address: str) -> int | None:
        """Number of the object with this address, or None."""
        ...


class _Active(threading.local):
    lease: Lease | None = None
    hearing: ObservedReads | None = None


_active = _Active()


class Lease:
    """Inside the `with`, this thread's reads of some leaves are served from a session's arena.

    Counts what it could not serve: `direct_reads`, `direct_nbytes` and `direct_ns` are the direct
    reads of its leaves; `blocked` is how often the thread slept meanwhile, counted only with
    `without_daemon`. Use each lease for one `with` only.
    """

    __slots__ = (
        "_allowed",
        "_session",
        "_stamp",
        "bases",
        "blocked",
        "direct_nbytes",
        "direct_ns",
        "direct_reads",
        "named",
        "outer",
        "without_daemon",
    )

    def __init__(
        self,
        session: ReadableSession | None,
        bases: Mapping[int, int],
        named: Sequence[Named],
        allowed: frozenset[int] | None,
        stamp: int = -1,
        *,
        without_daemon: bool = False,
    ) -> None:
        """Make a lease.

        Args:
            session: where bytes are copied from; None to only count direct reads.
            bases: first object id by `id(leaf)`.
            named: leaves whose objects can be found by address.
            allowed: the only ids that may be copied, None for all.
            stamp: what `session.stamp()` must still be after each copy; -1 for its value now.
            without_daemon: `creel.wrap` proxies inside this lease do not ask the daemon either.
        """
        self._session = session
        self._stamp = session.stamp() if session is not None and stamp < 0 else stamp
        self.bases = bases
        self.named = named
        self.without_daemon = without_daemon
        self._allowed = allowed
        self.outer: Lease | None = None
        self.direct_reads = 0
        self.direct_nbytes = 0
        self.direct_ns = 0
        self.blocked = 0

    def __enter__(self) -> Lease:
        if self.without_daemon:
            self.blocked -= _sleeps()
        self.outer = _active.lease
        _active.lease = self
        return self

    def __exit__(self, *_: object) -> None:
        _active.lease = self.outer
        if self.without_daemon:
            self.blocked += _sleeps()

    @property
    def serves(self) -> bool:
        """Whether it has a session to copy from."""
        return self._session is not None

    def copy(self, object_id: int, kind: Callable[..., Copied]) -> Copied | None:
        session = self._session
        if session is None or (self._allowed is not None and object_id not in self._allowed):
            return None
        offset = session.table.offset
        before = offset[object_id]
        pieces = session.pieces(object_id)
        if pieces is None:
            return None
        data = kind(pieces[0]) if len(pieces) == 1 else kind().join(pieces)
        whole = offset[object_id] == before and session.stamp() == self._stamp
        return data if whole else None

    def rows(self, ids: NDArray[np.int64], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Copy many objects, one to each row of `out`; (n,) which of them were copied."""
        session = self._session
        if session is None:
            return np.zeros(len(ids), np.bool_)
        offset = session.table.offset
        before = offset[ids]
        if self._allowed is not None and not self._allowed.issuperset(ids.tolist()):
            may = np.array([i in self._allowed for i in ids.tolist()])
            before = np.where(may, before, ABSENT)
        copied = session.rows(before, out)
        copied &= offset[ids] == before
        return copied if session.stamp() == self._stamp else np.zeros(len(ids), np.bool_)

    def note(self, nbytes: int, ns: int, reads: int = 1) -> None:
        self.direct_reads += reads
        self.direct_nbytes += nbytes
        self.direct_ns += ns


def _sleeps() -> int:
    """Voluntary context switches of this thread so far."""
    import resource  # there is none on Windows, where this module is imported, too

    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def _lease_of(leaf: object) -> tuple[Lease | None, int]:
    """The innermost active lease that covers `leaf`, and the leaf's first object id in it."""
    lease = _active.lease
    while lease is not None:
        base = lease.bases.get(id(leaf))
        if base is not None:
            return lease, base
        lease = lease.outer
    return None, 0


#: What a thread reads: an address, or an object of a leaf as (id(leaf), object number).
Asked = str | tuple[int, int]


class Partly(Protocol):
    """An open file, of which only a part may be read."""

    def wanted(self) -> bool:
        """Whether the whole file is worth caching."""
        ...


class ObservedReads:
    """Records what this thread reads inside the `with`."""

    def __init__(self) -> None:
        self.asked: dict[Asked, Partly | None] = {}
        self._outer: ObservedReads | None = None

    def wanted(self) -> list[Asked]:
        """Each read once, in order, without files of which only a small part was read."""
        return [asked for asked, file in self.asked.items() if file is None or file.wanted()]

    def __enter__(self) -> ObservedReads:
        self._outer, _active.hearing = _active.hearing, self
        return self

    def __exit__(self, *_: object) -> None:
        _active.hearing = self._outer


def hearing() -> ObservedReads | None:
    """The active recorder of this thread, or None."""
    return _active.hearing


def hear(asked: Asked) -> None:
    """Record a read that succeeded; failed reads are not recorded, so not read ahead."""
    if _active.hearing is not None:
        _active.hearing.asked[asked] = None


def foreign(leaf: object) -> bool:
    """Whether this thread reads for a dataset of which `leaf` is not a known part."""
    if _active.hearing is None and _active.lease is None:
        return False
    return _lease_of(leaf)[0] is None


def leasing() -> bool:
    """Whether this thread is inside a lease that has a session, or that reads `without_daemon`."""
    lease = _active.lease
    return lease is not None and (lease.serves or lease.without_daemon)


def leased(leaf: object, object_id: int) -> bytes | None:
    """A copy of an object of `leaf` from the arena; None without a lease or when absent."""
    lease, base = _lease_of(leaf)
    return None if lease is None else lease.copy(base + object_id, bytes)


def take(
    leaf: object, object_id: int, direct: Callable[[int], bytes], kind: Callable[..., Copied]
) -> Copied:
    """A copy of the bytes of an object of `leaf`: from the arena, else by `direct`.

    Args:
        direct: reads an object from the source.
        kind: `bytes` or `bytearray`.
    """
    lease, base = _lease_of(leaf)
    if lease is None:
        data = kind(direct(object_id))
        hear((id(leaf), int(object_id)))
        return data
    copied = lease.copy(base + object_id, kind)
    if copied is not None:
        return copied
    began = time.monotonic_ns()
    data = kind(direct(object_id))
    lease.note(len(data), time.monotonic_ns() - began)
    return data


def take_rows(
    leaf: object,
    ids: NDArray[np.int64],
    out: NDArray[np.uint8],
    direct: Callable[[NDArray[np.int64], NDArray[np.uint8]], None],
) -> None:
    """`take` for many objects of one size, one to each row of `out`.

    Args:
        ids: (n,) objects of `leaf`, n > 0.
        out: (n, nbytes), contiguous.
        direct: reads (k,) objects from the source into (k, nbytes) rows.
    """
    lease, base = _lease_of(leaf)
    if lease is None:
        direct(ids, out)
        if _active.hearing is not None:
            for object_id in ids.tolist():
                hear((id(leaf), object_id))
        return
    missing = np.flatnonzero(~lease.rows(ids + base, out))
    if not len(missing):
        return
    began = time.monotonic_ns()
    if len(missing) == len(ids):
        direct(ids, out)
    else:
        rest = np.empty((len(missing), out.shape[1]), np.uint8)
        direct(ids[missing], rest)
        out[missing] = rest
    lease.note(len(missing) * out.shape[1], time.monotonic_ns() - began, len(missing))


def take_address(address: str, direct: Callable[[str], bytes]) -> bytes:
    """The bytes at an address: from the arena if an active lease's dataset declares it."""
    lease = _active.lease
    if lease is not None and (lease.serves or lease.outer is not None):
        return take_found(declared(address), address, direct)
    began = time.monotonic_ns()  # no session could serve it, whichever leaf declares it
    data = direct(address)
    if lease is not None:
        lease.note(len(data), time.monotonic_ns() - began)
    if _active.hearing is not None:
        hear(address)
    return data


def take_found(
    found: tuple[Named, int] | None, address: str, direct: Callable[[str], bytes]
) -> bytes:
    """`take_address` where `found` is what `declared(address)` returned."""
    data = direct(address) if found is None else take(*found, lambda _: direct(address), bytes)
    hear(address)
    return data


def declared(address: str) -> tuple[Named, int] | None:
    """(leaf, object number) of an address in the innermost active lease that covers it, or None."""
    lease = _active.lease
    while lease is not None:
        for leaf in lease.named:
            object_id = leaf.find(address)
            if object_id is not None:
                return leaf, object_id
        lease = lease.outer
    return None
