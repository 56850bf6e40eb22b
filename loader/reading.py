"""Where a dataset's bytes come from right now: the arena while a lease is active, else the source.

`Binding.reading(session)` makes a lease the active one of this thread. A creel dataset asks
`take` for the bytes of an object; inside a lease it gets a copy of what lies in the arena.

A copy is safe even for an object that nobody pinned (a person's own code may read any object at any
time): its place in the table is looked up before and after, and a copy made while the object moved
is thrown away.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from creel.cache.board import ABSENT

Copied = TypeVar("Copied", bytes, bytearray)


class Places(Protocol):
    """The part of `cache.board.Table` that a reader needs."""

    @property
    def offset(self) -> NDArray[np.int64]:
        """(n,) first byte of each object in the arena, or ABSENT."""
        ...


class Session(Protocol):
    """The part of `loader.session.Session` that a reader needs."""

    @property
    def table(self) -> Places:
        """Where each object lies."""
        ...

    def view(self, object_id: int, /) -> memoryview | None:
        """The bytes of an object in the arena, read-only; None when it is not there."""
        ...

    def stamp(self) -> int:
        """Another number once anything that could be copied before may not be any more."""
        ...

    def rows(self, offset: NDArray[np.int64], out: NDArray[np.uint8], /) -> NDArray[np.bool_]:
        """Fill row i of `out` with what lies at offset[i] in the arena; (n,) whether it did."""
        ...


class Named(Protocol):
    """A leaf whose objects can be found by their address."""

    def find(self, address: str) -> int | None:
        """Number of the object with this address, or None."""
        ...


class _Active(threading.local):
    lease: Lease | None = None
    hearing: Hearing | None = None


_active = _Active()


class Lease:
    """Reads of some leaves go to one session's arena, in this thread, inside the `with`.

    After use it tells what it could not serve: `direct_reads`, `direct_nbytes` and `direct_ns`
    count the reads of its leaves that went to the source. One object serves one `with`.
    """

    __slots__ = (
        "_allowed",
        "_session",
        "_stamp",
        "bases",
        "direct_nbytes",
        "direct_ns",
        "direct_reads",
        "named",
        "outer",
    )

    def __init__(
        self,
        session: Session | None,
        bases: Mapping[int, int],
        named: Sequence[Named],
        allowed: frozenset[int] | None,
        stamp: int = -1,
    ) -> None:
        """Without a session nothing is taken, and reads are only counted.

        `bases`: first object id by `id(leaf)`; `allowed`: the only ids to take, None for all;
        `stamp`: what `session.stamp()` must still be after each copy, -1: what it is now.
        """
        self._session = session
        self._stamp = session.stamp() if session is not None and stamp < 0 else stamp
        self.bases = bases
        self.named = named
        self._allowed = allowed
        self.outer: Lease | None = None
        self.direct_reads = 0
        self.direct_nbytes = 0
        self.direct_ns = 0

    def __enter__(self) -> Lease:
        self.outer = _active.lease
        _active.lease = self
        return self

    def __exit__(self, *_: object) -> None:
        _active.lease = self.outer

    @property
    def serves(self) -> bool:
        """Whether anything may be taken."""
        return self._session is not None

    def copy(self, object_id: int, kind: Callable[[memoryview], Copied]) -> Copied | None:
        session = self._session
        if session is None or (self._allowed is not None and object_id not in self._allowed):
            return None
        offset = session.table.offset
        before = offset[object_id]
        view = session.view(object_id)
        if view is None:
            return None
        data = kind(view)
        whole = offset[object_id] == before and session.stamp() == self._stamp
        return data if whole else None

    def rows(self, ids: NDArray[np.int64], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """`copy` of many objects, one to a row of `out`; (n,) which of them were copied."""
        session = self._session
        if session is None:
            return np.zeros(len(ids), np.bool_)
        offset = session.table.offset
        before = offset.take(ids)
        if self._allowed is not None and not self._allowed.issuperset(ids.tolist()):
            may = np.array([i in self._allowed for i in ids.tolist()])
            before = np.where(may, before, ABSENT)
        copied = session.rows(before, out)
        copied &= offset.take(ids) == before
        return copied if session.stamp() == self._stamp else np.zeros(len(ids), np.bool_)

    def note(self, nbytes: int, ns: int, reads: int = 1) -> None:
        self.direct_reads += reads
        self.direct_nbytes += nbytes
        self.direct_ns += ns


def _lease_of(leaf: object) -> tuple[Lease | None, int]:
    """The innermost active lease that covers `leaf`, and the leaf's first object id there."""
    lease = _active.lease
    while lease is not None:
        base = lease.bases.get(id(leaf))
        if base is not None:
            return lease, base
        lease = lease.outer
    return None, 0


#: What a thread asks for: an address, or an object of a leaf: (id(leaf), its number).
Asked = str | tuple[int, int]


class Partly(Protocol):
    """A file that is open, of which some may be read."""

    def wanted(self) -> bool:
        """Whether a copy of all of it would do as well."""
        ...


class Hearing:
    """Inside of the `with`, what this thread asks for."""

    def __init__(self) -> None:
        self.asked: dict[Asked, Partly | None] = {}
        self._outer: Hearing | None = None

    def wanted(self) -> list[Asked]:
        """Each once, in order, without files of which only a little was read."""
        return [asked for asked, file in self.asked.items() if file is None or file.wanted()]

    def __enter__(self) -> Hearing:
        self._outer, _active.hearing = _active.hearing, self
        return self

    def __exit__(self, *_: object) -> None:
        _active.hearing = self._outer


def hearing() -> Hearing | None:
    """Who listens to this thread."""
    return _active.hearing


def hear(asked: Asked) -> None:
    """Somebody got all of these bytes; what is not there is nothing to be read ahead."""
    if _active.hearing is not None:
        _active.hearing.asked[asked] = None


def foreign(leaf: object) -> bool:
    """Whether this thread reads for a dataset that does not know `leaf` for a part of it."""
    if _active.hearing is None and _active.lease is None:
        return False
    return _lease_of(leaf)[0] is None


def leasing() -> bool:
    """Whether this thread is inside of a lease that serves it."""
    lease = _active.lease
    return lease is not None and lease.serves


def leased(leaf: object, object_id: int) -> bytes | None:
    """A copy of the arena's bytes of an object of `leaf`; None without a lease or when absent."""
    lease, base = _lease_of(leaf)
    return None if lease is None else lease.copy(base + object_id, bytes)


def take(
    leaf: object, object_id: int, direct: Callable[[int], bytes], kind: Callable[..., Copied]
) -> Copied:
    """The bytes of an object of `leaf`, as the caller's own: from the arena, else by `direct`.

    Args:
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
    """`take` for many objects of one size, one to a row of `out`.

    Args:
        ids: (n,) objects of `leaf`, n > 0.
        out: (n, nbytes), contiguous.
        direct: fills such rows with such objects from the source.
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
    """The bytes at an address: from the arena when an active lease's dataset declares it."""
    return take_found(declared(address), address, direct)


def take_found(
    found: tuple[Named, int] | None, address: str, direct: Callable[[str], bytes]
) -> bytes:
    """`take_address` for an address that `declared` was asked about."""
    data = direct(address) if found is None else take(*found, lambda _: direct(address), bytes)
    hear(address)
    return data


def declared(address: str) -> tuple[Named, int] | None:
    """The leaf of this thread's innermost lease that covers the address, and the object's number.

    None where no active lease covers it.
    """
    lease = _active.lease
    while lease is not None:
        for leaf in lease.named:
            object_id = leaf.find(address)
            if object_id is not None:
                return leaf, object_id
        lease = lease.outer
    return None
