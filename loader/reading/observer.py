"""The observer: every read of a sample's bytes passes through here, in the thread that reads.

Reads are of objects of creel's datasets (`take`, `take_rows`) or of addresses (`take_address`,
below creel.read and creel.open). Each is served from the arena of a session if the thread is inside
a `Lease` that covers it, else it is direct, and counted by the lease; inside `ObservedReads` it is
recorded as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from creel.loader.reading.lease import Buffer, Copied
from creel.loader.reading.this_thread import this_thread

if TYPE_CHECKING:
    from creel.loader.datasets.base import CreelDataset

T = TypeVar("T")


def take(
    leaf: CreelDataset, object_id: int, direct: Callable[[int], bytes], kind: type[Copied]
) -> Copied:
    """A copy of the bytes of an object of `leaf`: from the arena, else by `direct`.

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


def find(address: str) -> int | None:
    """Number of the object at an address in the session of this thread's lease, or None."""
    lease = this_thread.lease
    return None if lease is None else lease.find(address)


def take_address(address: str, number: int | None, direct: Callable[[str], bytes]) -> bytes:
    """The bytes at an address: from the arena if the lease has it, as `find` says, else direct."""
    if this_thread.intercepts:
        return by_creel(lambda: take_address(address, number, direct))
    lease = this_thread.lease
    data = direct(address) if lease is None else lease.take(number, partial(direct, address), bytes)
    if this_thread.observed is not None:
        this_thread.observed.add(address)
    return data


def copy_at(address: str, copying: Callable[[Buffer], T]) -> T | None:
    """A copy, made by `copying`, of the cached bytes of a file that is to be read.

    None if they are not there. What `copying` is given is good during the call only, and may be
    torn; then its result is not used.
    """
    lease = this_thread.lease
    number = None if lease is None else lease.find(address)
    copied = None if lease is None or number is None else lease.copy(number, copying)
    if copied is not None and this_thread.observed is not None:
        this_thread.observed.add(address)
    return copied


# --- what other code opens --------------------------------------------------------------------


class Intercepting:
    """Inside the `with`, `intercepts` is true of this thread, but for creel's own reads."""

    __slots__ = ("_outer",)

    def __enter__(self) -> None:
        self._outer, this_thread.intercepts = this_thread.intercepts, True

    def __exit__(self, *_: object) -> None:
        this_thread.intercepts = self._outer


def by_creel(read: Callable[[], T]) -> T:
    """Call `read`; the files that it opens are creel's own affair."""
    outer, this_thread.intercepts = this_thread.intercepts, False
    try:
        return read()
    finally:
        this_thread.intercepts = outer


def passes_on() -> bool:
    """Whether this thread has nothing to serve files from, and records none."""
    lease = this_thread.lease
    return this_thread.observed is None and (lease is None or not lease.serves)


def open_source(original: Callable[..., T], *args: object) -> tuple[T, int]:
    """Open a file at the source; the lease counts it, not what is read of it later.

    Second, how long the storage made this thread wait, as of `timed`.
    """
    began = time.monotonic_ns()
    opened = original(*args)
    took = time.monotonic_ns() - began
    lease = this_thread.lease
    if lease is not None:
        lease.direct_reads += 1
        lease.direct_ns += took
    return opened, _waited_ns(took)


def timed(opening: Callable[[], T]) -> tuple[T, int]:
    """Call `opening`; also how long the storage made this thread wait, in ns.

    0 where it did not, or nothing is recorded.
    """
    began = time.monotonic_ns()
    opened = opening()
    return opened, _waited_ns(time.monotonic_ns() - began)


def _waited_ns(took: int) -> int:
    observed = this_thread.observed
    return took if observed is not None and observed.waited(took) else 0
