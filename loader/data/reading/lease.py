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
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from creel.cache.storage.stores.access import Options
from creel.cache.storage.stores.store import version_at
from creel.cache.storage.uris import is_local
from creel.cache.storage.version import MISSING, UNKNOWN, stands_for
from creel.loader.data.reading.this_thread import this_thread, thread_use
from creel.policies.direct import NO_USE

if TYPE_CHECKING:
    from creel.loader.client.session import Session

Copied = TypeVar("Copied", bytes, bytearray)
T = TypeVar("T")
Buffer = bytes | memoryview
_NONE: NDArray[np.int32] = np.empty(0, np.int32)
_NOTHING = None, None


class FileInBlocks(NamedTuple):
    """A file whose blocks are objects: number of the first, bytes of each, bytes of the file."""

    address: str
    first: int
    size: int
    nbytes: int


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
    """One whose objects are whole files, or blocks of them (`data.binding.adapters`)."""

    @property
    def whole_files(self) -> bool:
        """Whether they are whole files."""
        ...

    @property
    def storage_options(self) -> Options:
        """With which remote ones are read."""
        ...

    def addresses(self, ids: NDArray[np.integer]) -> list[str]:
        """Return the addresses of (k,) objects that are whole files."""
        ...

    def in_blocks(self, ids: NDArray[np.integer]) -> list[FileInBlocks]:
        """Return the files of (k,) objects that are blocks, each once."""
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
    `decodes` and `measured` (ns and bytes of one) tell of those that are not to be kept. The end of
    the `with` calls `at_end`. Use each lease for one `with` only.
    """

    __slots__ = (  # made for each batch: 250 ns with slots, 280 without
        "_bases",
        "_blocks",
        "_ids",
        "_named",
        "_numbers",
        "_outer",
        "_pieces",
        "_session",
        "_stamp",
        "_step",
        "at_end",
        "decoded_hits",
        "decoded_misses",
        "decodes",
        "direct_nbytes",
        "direct_ns",
        "direct_reads",
        "ended",
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
        #: By address, once they are asked for; see `_by_address`.
        self._numbers: dict[str, tuple[int, Files]] | None = None
        self._blocks: dict[str, tuple[FileInBlocks, Files]] = {}  # large files, by address
        #: Memory of the objects, by number, once asked for.
        self._pieces: Mapping[int, list[memoryview]] | None = None
        self._outer: Lease | None = None  # the thread's lease before this one
        self.direct_reads = 0  # of objects that were not in the arena
        self.direct_nbytes = 0
        self.direct_ns = 0  # how long these took
        self.use = NO_USE
        self.decoded_hits = self.decoded_misses = self.decodes = 0
        self.measured = 0, 0
        self.at_end: Callable[[], None] | None = None  # called once the batch is read
        self.ended = False  # whether its `with` is over

    def __enter__(self) -> Lease:
        if self._session is None:
            self.use = thread_use()  # so far
        self._outer, this_thread.lease = this_thread.lease, self
        return self

    def __exit__(self, *_: object) -> None:
        this_thread.lease = self._outer
        self._pieces = None
        self.ended = True
        if self.at_end is not None:
            self.at_end()
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
        number, leaf = self._by_address()[0].get(address, _NOTHING)
        if number is None or leaf is None or not _reads(leaf, address, options):
            return None
        if leaf.checked and is_local(address):
            return number if stands_for(self._version(number), version_at(address)) else None
        return number

    def in_blocks(self, address: str, options: Options = None) -> bool:
        """Whether blocks of a file are objects of the step; `options` as for `find`."""
        _, leaf = self._by_address()[1].get(address, _NOTHING)
        return leaf is not None and _reads(leaf, address, options)

    def copy_part(
        self,
        address: str,
        at: int,
        nbytes: int,
        version: int,
        out: memoryview,
        options: Options = None,
    ) -> int | None:
        """Copy bytes of a file, from `at` on, from one object of the step.

        Args:
            nbytes: of the file now; blocks of a file of another size are not copied.
            version: that the file has now; its bytes in another version are not copied. UNKNOWN
                for a remote file: in any.
            out: where to; filled as far as the object goes.
            options: as for `find`.

        Returns:
            How many bytes were copied; None if no object of the step has the first one.
        """
        whole, blocks = self._by_address()
        places: list[tuple[int, int, Files]] = []
        file, leaf = blocks.get(address, _NOTHING)
        if file is not None and leaf is not None and file.nbytes == nbytes:
            places.append((file.first + at // file.size, at % file.size, leaf))
        number, leaf = whole.get(address, _NOTHING)
        if number is not None and leaf is not None:
            places.append((number, at, leaf))
        for number, skip, leaf in places:
            checked = leaf.checked if is_local(address) else version != UNKNOWN
            if not _reads(leaf, address, options) or (
                checked and not stands_for(self._version(number), version)
            ):
                continue
            copied = self.copy(number, partial(_fill, out, skip))
            if copied:
                return copied
        return None

    def _version(self, number: int) -> int:
        """Return the version in which an object's file was read."""
        session = self._session
        version = None if session is None else session.table.version
        return MISSING if version is None else int(version[number])

    def _there(self, session: Session) -> Mapping[int, list[memoryview]]:
        """Return the step's objects that are in the arena; all take little longer than one."""
        pieces = self._pieces
        if pieces is None:
            pieces = self._pieces = session.pieces(self._ids)
        return pieces

    def _by_address(
        self,
    ) -> tuple[dict[str, tuple[int, Files]], dict[str, tuple[FileInBlocks, Files]]]:
        """Return the step's whole files, and those of which blocks are its objects."""
        if self._numbers is not None:
            return self._numbers, self._blocks
        numbers: dict[str, tuple[int, Files]] = {}
        blocks: dict[str, tuple[FileInBlocks, Files]] = {}
        there = self._session is not None and self._there(self._session)
        for leaf in self._named if there else ():
            base = self._bases[id(leaf)]
            own = self._ids[(self._ids >= base) & (self._ids < base + leaf.object_count)]
            if leaf.whole_files:
                names = leaf.addresses(own - base)
                numbers.update(zip(names, zip(own.tolist(), repeat(leaf)), strict=True))
            for file in () if leaf.whole_files else leaf.in_blocks(own - base):
                blocks[file.address] = file._replace(first=base + file.first), leaf
        self._blocks, self._numbers = blocks, numbers  # in this order: other threads look, too
        return numbers, blocks

    def take(self, number: int | None, direct: Callable[[], bytes], kind: type[Copied]) -> Copied:
        """Return an object's bytes: copied from the arena if they are there, else from `direct`."""
        copied = None if number is None else self.copy(number, kind)
        if copied is not None:
            return copied
        began = time.monotonic_ns()
        data = kind(direct())
        self.count_direct(1, len(data), time.monotonic_ns() - began)
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
            missing_rows = np.empty((len(missing), out.shape[1]), np.uint8)
            direct(ids[missing], missing_rows)
            out[missing] = missing_rows
        self.count_direct(len(missing), len(missing) * out.shape[1], time.monotonic_ns() - began)

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

    def count_direct(self, reads: int, nbytes: int, ns: int) -> None:
        """Count reads that the lease could not serve."""
        self.direct_reads += reads
        self.direct_nbytes += nbytes
        self.direct_ns += ns


def _reads(leaf: Files, address: str, options: Options) -> bool:
    """Whether a leaf has an address as a person reads it with these options."""
    return is_local(address) or leaf.storage_options == options


def _fill(out: memoryview, skip: int, data: Buffer) -> int:
    """Copy `data` from byte `skip` on to `out`, as far as both go; return how many bytes."""
    part = memoryview(data)[skip : skip + len(out)]
    out[: len(part)] = part
    return len(part)
