"""Lease: serves the reads of one step in one thread from the arena of a session.

A local file that a person's own code opens is served only in the version that it has at this
moment: the daemon publishes of which version the bytes in the arena are (`LocationTable`), and the
file's status says which one the sample's own `open` would read. The sample may have just rewritten
the file, from C code, from another process or under another name.

Only objects of the lease's step are copied. The daemon keeps them pinned until the step is done, or
until it revokes the step and changes the session's stamp. A step can be done early: an iterator
that begins anew leaves its workers with unwanted batches. A copy made meanwhile is discarded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from creel.cache.storage.version import stands_for
from creel.loader.data.reading.storage import Options, is_local, version_at
from creel.loader.data.reading.this_thread import this_thread, thread_use
from creel.policies.thread_use import NO_USE

if TYPE_CHECKING:
    from creel.loader.client.session import Session

Copied = TypeVar("Copied", bytes, bytearray)
T = TypeVar("T")
Buffer = bytes | memoryview
_NONE: NDArray[np.int32] = np.empty(0, np.int32)


class Leaf(Protocol):
    """A dataset that has objects (`creel.loader.data.datasets`)."""

    @property
    def object_count(self) -> int:
        """Number of objects."""
        ...

    def address(self, object_id: int) -> str | None:
        """Return the address of an object that is a whole file, None for a part of a file."""
        ...


class Files(Leaf, Protocol):
    """One whose objects are whole files (`creel.loader.data.binding.adapters`)."""

    @property
    def storage_options(self) -> Options:
        """With which remote ones are read."""
        ...

    def addresses(self, ids: NDArray[np.integer]) -> list[str]:
        """Return the addresses of (k,) objects."""
        ...

    @property
    def checked(self) -> bool:
        """Whether a local file is served only in the version that it has when it is opened."""
        ...


class Lease:
    """Inside the `with`, this thread's reads of a step's objects are served from the arena.

    It replaces an outer lease. It counts the reads that it could not serve: `direct_reads`,
    `direct_nbytes` and `direct_ns`; without a session also `use`, what the thread has used
    meanwhile. `decoded_hits` and `decoded_misses` count samples that were kept decoded, or not;
    `decodes` and `measured` (ns and bytes of one) tell of those that are not to be kept. Use each
    lease for one `with` only.
    """

    __slots__ = (  # made for each batch: 250 ns with slots, 280 without
        "_bases",
        "_ids",
        "_named",
        "_numbers",
        "_outer",
        "_pieces",
        "_session",
        "_stamp",
        "_step",
        "decoded_hits",
        "decoded_misses",
        "decodes",
        "direct_nbytes",
        "direct_ns",
        "direct_reads",
        "measured",
        "serves",
        "use",
    )

    def __init__(
        self,
        session: Session | None = None,
        step: int = -1,
        ids: NDArray[np.integer] = _NONE,
        stamp: int = -1,
        bases: Mapping[int, int] | None = None,
        named: Sequence[Files] = (),
    ) -> None:
        """Make a lease.

        Args:
            session: where bytes are copied from; None to only count direct reads.
            step: the step, which must still be held under `stamp` after each copy (`session.held`).
            ids: (k,) objects of the step; others are read directly.
            bases: first object id of each leaf, by `id(leaf)`.
            named: leaves whose objects can be found by address.
        """
        self._session = session
        #: Whether the lease has a session to copy from.
        self.serves = session is not None
        self._step = step
        self._ids = ids
        self._stamp = stamp
        self._bases = bases or {}
        self._named = named
        #: address -> (number, the leaf)
        self._numbers: dict[str, tuple[int, Files]] | None = None
        self._pieces: Mapping[int, list[memoryview]] | None = None
        self._outer: Lease | None = None
        self.direct_reads = 0
        self.direct_nbytes = 0
        self.direct_ns = 0
        self.use = NO_USE
        self.decoded_hits = self.decoded_misses = self.decodes = 0
        self.measured = 0, 0

    def __enter__(self) -> Lease:
        if self._session is None:
            self.use = thread_use()  # so far
        self._outer, this_thread.lease = this_thread.lease, self
        return self

    def __exit__(self, *_: object) -> None:
        this_thread.lease = self._outer
        self._pieces = None
        if self._session is None:
            self.use = thread_use() - self.use

    def number(self, leaf: Leaf, object_id: int) -> int | None:
        """Return the session's number of an object of `leaf`; None if the lease does not cover it.

        A leaf that is not in `bases` may still have files that the lease finds by address.
        """
        if self._session is None:
            return None
        base = self._bases.get(id(leaf))
        if base is not None:
            return base + object_id
        address = leaf.address(object_id) if self._named else None
        return None if address is None else self.find(address)

    def find(self, address: str, options: Options = None) -> int | None:
        """Return the session's number of the step's object at an address.

        None if there is no such object, if the file is not what the daemon has read, or if the
        object is read with other `options` of a remote store.
        """
        if self._session is None:
            return None
        if self._numbers is None:
            self._numbers = self._by_address() if self._there(self._session) else {}
        number, leaf = self._numbers.get(address, (None, None))
        if number is None or leaf is None:
            return None
        if not is_local(address):
            return number if leaf.storage_options == options else None
        version = self._session.table.version if leaf.checked else None
        if version is not None and not stands_for(int(version[number]), version_at(address)):
            return None
        return number

    def _there(self, session: Session) -> Mapping[int, list[memoryview]]:
        """Return the step's objects that are in the arena; all take little longer than one."""
        pieces = self._pieces
        if pieces is None:
            pieces = self._pieces = session.pieces(self._ids)
        return pieces

    def _by_address(self) -> dict[str, tuple[int, Files]]:
        numbers: dict[str, tuple[int, Files]] = {}
        for leaf in self._named:
            base = self._bases[id(leaf)]
            own = self._ids[(self._ids >= base) & (self._ids < base + leaf.object_count)]
            found = zip(own.tolist(), repeat(leaf))
            numbers.update(zip(leaf.addresses(own - base), found))  # noqa: B905  `repeat` ends never
        return numbers

    def take(self, number: int | None, direct: Callable[[], bytes], kind: type[Copied]) -> Copied:
        """Return an object's bytes: copied from the arena if they are there, else from `direct`."""
        copied = None if number is None else self.copy(number, kind)
        if copied is not None:
            return copied
        began = time.monotonic_ns()
        data = kind(direct())
        self._note(1, len(data), time.monotonic_ns() - began)
        return data

    def copy(self, number: int, copying: Callable[[Buffer], T]) -> T | None:
        """Return `copying(bytes of the object)`, which must not keep a reference to them.

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
        leaf: Leaf,
        ids: NDArray[np.int64],
        out: NDArray[np.uint8],
        direct: Callable[[NDArray[np.int64], NDArray[np.uint8]], None],
    ) -> None:
        """Serve the function `observer.take_rows`."""
        base = self._bases.get(id(leaf))
        copied = None if base is None else self._copy_rows(ids + base, out)
        if copied is not None and np.count_nonzero(copied) == len(ids):
            return
        missing = np.arange(len(ids)) if copied is None else np.flatnonzero(~copied)
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
        """Copy object numbers[i] to row i of `out`; (n,) which were copied, None for none."""
        session = self._session
        if session is None:
            return None
        # The usual case is all objects of the step; `isin` sorts, which costs as much as copying 64
        # rows.
        n = len(numbers)
        whole = n == len(self._ids) and np.count_nonzero(numbers == self._ids) == n
        copied = np.ones(n, np.bool_) if whole else np.isin(numbers, self._ids)
        if whole or copied.all():
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
