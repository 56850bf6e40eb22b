"""The observer: every read of a sample's bytes passes through here, in the reading thread.

A read names an object of one of creel's datasets (`take`, `take_rows`), or an address
(`take_address`, for creel.read and creel.open). If the thread is inside a `Lease` that covers the
object, the bytes come from the arena of a session. Otherwise the read is direct, and the lease
counts it. Inside `ObservedReads` the read is also recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from creel.loader.data.reading.inputs import records
from creel.loader.data.reading.lease import Buffer, Copied
from creel.loader.data.reading.this_thread import this_thread

if TYPE_CHECKING:
    from creel.cache.storage.stores.access import Options
    from creel.loader.data.reading.lease import Leaf

T = TypeVar("T")


def take(leaf: Leaf, object_id: int, direct: Callable[[int], bytes], kind: type[Copied]) -> Copied:
    """Return a copy of the bytes of an object of `leaf`: from the arena, else by `direct`.

    Args:
        direct: reads an object from the source.
        kind: `bytes` or `bytearray`.
    """
    if this_thread.intercepts:
        return by_creel(lambda: take(leaf, object_id, direct, kind))
    lease, observed = this_thread.lease, this_thread.observed
    if lease is None:
        data = kind(direct(object_id))
    else:
        data = lease.take(lease.number(leaf, object_id), lambda: direct(object_id), kind)
    if observed is not None:
        observed.add(leaf.address(object_id) or (id(leaf), int(object_id)))
    return data


def take_rows(
    leaf: Leaf,
    ids: NDArray[np.int64],
    out: NDArray[np.uint8],
    direct: Callable[[NDArray[np.int64], NDArray[np.uint8]], None],
) -> None:
    """`take` many objects of one size, each a part of a file, into the rows of `out`.

    Args:
        ids: (n,) objects of `leaf`, n > 0.
        out: (n, nbytes), contiguous.
        direct: reads (k,) objects from the source into (k, nbytes) rows.
    """
    if this_thread.intercepts:
        by_creel(lambda: take_rows(leaf, ids, out, direct))
        return
    lease, observed = this_thread.lease, this_thread.observed
    if lease is None:
        direct(ids, out)
    else:
        lease.take_rows(leaf, ids, out, direct)
    if observed is not None:
        for object_id in ids.tolist():
            observed.add((id(leaf), object_id))


def find(address: str, options: Options = None) -> int | None:
    """Return the number of the object at an address in the session of the thread's lease.

    None if this thread has no lease, or the lease does not cover the object. `options`: of the
    store, if it is remote.
    """
    lease = this_thread.lease
    return None if lease is None else lease.find(address, options)


def take_address(
    address: str, number: int | None, direct: Callable[[str], bytes], options: Options = None
) -> bytes:
    """Return the bytes at an address: object `number` of the lease (see `find`), else direct."""
    if this_thread.intercepts:
        return by_creel(lambda: take_address(address, number, direct, options))
    lease, observed = this_thread.lease, this_thread.observed
    data = direct(address) if lease is None else lease.take(number, partial(direct, address), bytes)
    if observed is not None:
        observed.add_address(address, options)
    return data


def copy_at(address: str, copying: Callable[[Buffer], T]) -> T | None:
    """Return `copying(bytes)` for a cached file that is about to be read; None if it is not cached.

    `copying` gets a buffer that is valid during the call only. If the bytes changed meanwhile, its
    result is dropped.
    """
    lease = this_thread.lease
    number = None if lease is None else lease.find(address)
    copied = None if lease is None or number is None else lease.copy(number, copying)
    if copied is not None and this_thread.observed is not None:
        this_thread.observed.add(address)
    return copied


# --- files that other code opens --------------------------------------------------------------


class Intercepting:
    """Inside the `with`, opens of this thread are intercepted, except creel's own."""

    __slots__ = ("_outer",)

    def __enter__(self) -> None:
        self._outer, this_thread.intercepts = this_thread.intercepts, True
        if not self._outer:
            this_thread.begins()

    def __exit__(self, *_: object) -> None:
        this_thread.intercepts = self._outer
        if not self._outer:
            this_thread.ends()


def by_creel(read: Callable[[], T]) -> T:
    """Call `read` without intercepting the files that it opens."""
    outer, this_thread.intercepts = this_thread.intercepts, False
    try:
        return read()
    finally:
        this_thread.intercepts = outer


def passes_on() -> bool:
    """Whether this thread neither serves files from the cache nor records reads."""
    lease = this_thread.lease
    return this_thread.observed is None and (lease is None or not lease.serves)


def announce(path: object) -> None:
    """Note that a library in C is about to open a file, where reads are recorded."""
    for record in records():
        record.opens_in_c(path)


def open_source(original: Callable[..., T], *args: object) -> T:
    """Open a file at the source; the lease counts the open, but no later reads of the file."""
    began = time.monotonic_ns()
    opened = original(*args)
    took = time.monotonic_ns() - began
    lease = this_thread.lease
    if lease is not None:
        lease.direct_reads += 1
        lease.direct_ns += took
    return opened


def timed(opening: Callable[[], T]) -> tuple[T, int]:
    """Call `opening`; also return how long the storage made this thread wait, in ns.

    The time is 0 if the thread did not wait, or nothing is recorded.
    """
    began = time.monotonic_ns()
    opened = opening()
    took, observed = time.monotonic_ns() - began, this_thread.observed
    return opened, took if observed is not None and observed.waited(took) else 0
