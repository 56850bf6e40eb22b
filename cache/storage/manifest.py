"""Manifest: the objects of a dataset, as an Arrow table, which is sent as one buffer.

An *object* is a byte range in storage: (uri, offset, length). A row is a *run* of `count` objects
of `length` bytes each, one after the other from `offset` on: a folder of files has one row per file
with count 1; a binary file of a million records is a single row. Object ids number the objects from
0 in row order. `length` is -1 if it is unknown until the object is read (a file whose size was not
asked for); then `offset` is 0 and `count` is 1.

Only the loader knows which samples need which objects; plans contain object ids.
"""

from __future__ import annotations

import io
import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from mmap import mmap
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from creel.cache.memory.pools.allocator import Lengths
from creel.cache.storage import version
from creel.cache.storage.stores.access import Access, StorageOptions
from creel.cache.storage.uris import (
    equal_to_next,
    has_scheme,
    is_remote,
    scheme_of,
    text_array,
    text_column,
)
from creel.errors import ConfigError, MalformedError
from creel.messages import Grants
from creel.policies.arrays import Ints, Mask

if TYPE_CHECKING:  # 28 MB resident and 0.2 s, which a daemon without data saves
    import pyarrow as pa

_ROOT, _SALT = b"creel.root", b"creel.salt"
_ACCESS, _PINS = b"creel.access", b"creel.pins"
UNKNOWN = -1
ANY = version.UNKNOWN
MAX_OBJECTS = 2**31 - 1
#: Addresses compared at a time, a few megabytes of text.
_COMPARE = 1 << 15
_OBJECTS_AT_ONCE = 1 << 18


@cache
def _schema() -> pa.Schema:
    import pyarrow as pa

    numbers = ((name, pa.int64()) for name in ("offset", "length", "count"))
    return pa.schema([("uri", pa.large_string()), *numbers])


@dataclass(frozen=True)
class Manifest:
    """All objects of a dataset.

    Args:
        table: columns uri (large_string, relative to `root` where `root` is not empty), offset,
            length, count (int64), without nulls.
        root: prefix of every uri ("/data/train", "s3://bucket/x", "http://host/d"), or "".
        salt: distinguishes datasets of the same addresses, such as streams that were made anew.
        access: how remote addresses are reached: (first row, access), in order; () without any.
        pins: (first row, version of its file), in order, for all rows up to the next: no other
            version is read, as the rows are the layout of this one. ANY: each is.
    """

    table: pa.Table
    root: str = ""
    salt: str = ""
    access: tuple[tuple[int, Access], ...] = ()
    pins: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of_files(
        cls,
        uris: Sequence[str] | pa.Array,
        *,
        root: str = "",
        lengths: Sequence[int] | Ints | None = None,
    ) -> Manifest:
        """Make a manifest with one object per file.

        >>> Manifest.of_files(["a", "b"], root="/d").location(1)
        ('/d/b', 0, -1)
        """
        column = text_column(uris)
        n = len(column)
        length = np.full(n, UNKNOWN, np.int64) if lengths is None else np.asarray(lengths, np.int64)
        return cls.of_runs(column, np.zeros(n, np.int64), length, np.ones(n, np.int64), root=root)

    @classmethod
    def of_runs(
        cls,
        uris: Sequence[str] | pa.Array,
        offset: Ints,
        length: Ints,
        count: Ints,
        *,
        root: str = "",
    ) -> Manifest:
        """Make a manifest; row i: count[i] objects of length[i] bytes from offset[i] of uris[i]."""
        import pyarrow as pa

        # pa.array would import numpy.ma and pandas to check the type of the values.
        columns = (np.ascontiguousarray(c, np.int64) for c in (offset, length, count))
        buffers = ((len(c), [None, pa.py_buffer(c)]) for c in columns)
        numbers = (pa.Array.from_buffers(pa.int64(), n, pair) for n, pair in buffers)
        return cls(pa.table([text_column(uris), *numbers], schema=_schema()), root)

    @classmethod
    def concat(cls, parts: Sequence[Manifest]) -> Manifest:
        """Join manifests in order; ids of part i continue after those of part i-1."""
        import pyarrow as pa

        if not parts:
            return cls.of_files([])
        if len(parts) == 1:
            return replace(parts[0], table=parts[0].table.combine_chunks())
        roots, access = {p.root for p in parts}, _joined_access(parts)
        root = roots.pop() if len(roots) == 1 else ""
        tables = [p.table if p.root == root else p.absolute() for p in parts]
        joined = pa.concat_tables(tables).combine_chunks()
        return cls(joined, root, access=access, pins=_joined_pins(parts))

    def reached(self, given: StorageOptions) -> Manifest:
        """Return the same objects with the access of their remote addresses.

        Raises:
            ConfigError: an option that no client of these addresses has.
        """
        if self.root:
            uris = [self.root]
        elif has_scheme(self._text()[1]):
            uris = self.addresses(self.file_rows[:-1])
        else:
            return self
        schemes = {scheme_of(uri) for uri in uris if is_remote(uri)}
        access = ((0, Access.of(schemes, given)),) if schemes else ()
        return replace(self, access=access) if access else self

    def pinned(self, pins: Iterable[tuple[int, int]]) -> Manifest:
        """Return the same objects, of these versions only (see `pins`)."""
        given = tuple(pins)
        return replace(self, pins=given if any(pin != ANY for _, pin in given) else ())

    def pin(self, row: int) -> int:
        """Return the version that is to be read of a row's file, or ANY."""
        at = bisect_right(self._pinned_rows, row) - 1
        return self.pins[at][1] if at >= 0 else ANY

    @cached_property
    def _pinned_rows(self) -> list[int]:
        return [row for row, _ in self.pins]

    def begins_with(self, other: Manifest) -> bool:
        """Whether the first rows are all those of `other`, reached in the same way."""
        n = other.table.num_rows
        access = tuple((row, grant) for row, grant in self.access if row < n)
        pins = tuple(pin for pin in self.pins if pin[0] < n)
        if not 0 < n < self.table.num_rows or other.salt or self.salt:
            return False
        if (access, pins) != (other.access, other.pins):
            return False
        numbers = zip(self._numbers, other._numbers, strict=True)
        if not all(np.array_equal(mine[:n], its) for mine, its in numbers):
            return False
        if len(self._prefix) > len(other._prefix):
            return other._same_addresses(self, n)
        return self._same_addresses(other, n)

    def _same_addresses(self, other: Manifest, n: int) -> bool:
        """Whether the first n addresses are the same; the root of `other` is as long or longer."""
        if not other._prefix.startswith(self._prefix):
            return False
        lead = np.frombuffer(other._prefix.removeprefix(self._prefix).encode(), np.uint8)
        (bounds, text), (ends, other_text) = self._letters, other._letters
        if not np.array_equal(np.diff(bounds[: n + 1]), np.diff(ends[: n + 1]) + len(lead)):
            return False
        step = max(_COMPARE // (1 + len(lead) // 32), 1)
        for first in range(0, n, step):
            last = min(first + step, n)
            whole = np.frombuffer(text[bounds[first] : bounds[last]], np.uint8)
            at = (bounds[first:last] - bounds[first])[:, None] + np.arange(len(lead))
            left = np.ones(len(whole), np.bool_)
            left[at] = False
            part = np.frombuffer(other_text[ends[first] : ends[last]], np.uint8)
            if not ((whole[at] == lead).all() and np.array_equal(whole[left], part)):
                return False
        return True

    @property
    def _numbers(self) -> tuple[Ints, Ints, Ints]:
        return self.offsets, self._lengths, self.counts

    def grants(self) -> Grants:
        """Return how a daemon is to reach the remote addresses: the present grants of each access.

        Raises:
            UnavailableError: no other process can.
        """
        return [access.grants() for _, access in self.access]

    def __len__(self) -> int:
        return int(self._ends[-1]) if self.table.num_rows else 0

    @cached_property
    def _ends(self) -> Ints:
        return np.cumsum(self._column("count"))

    @cached_property
    def _one_a_row(self) -> bool:
        """Whether row i is object i."""
        return bool((self.counts == 1).all())

    def _column(self, name: str) -> Ints:
        """Return (rows,) a column of numbers, without a copy if it is in one piece.

        Arrow's own conversions, like `pa.array`, import pandas if it is installed: 0.25 s.
        """
        column = self._one_piece(name)
        if not len(column):
            return np.zeros(0, np.int64)
        first, last = column.offset, column.offset + len(column)
        return np.frombuffer(column.buffers()[1], np.int64, last)[first:]

    def absolute(self) -> pa.Table:
        """Return the table with full addresses, as under an empty root."""
        if not self.root:
            return self.table
        uris = self.addresses(np.arange(self.table.num_rows))
        return self.table.set_column(0, "uri", text_array(uris))

    @cached_property
    def place(self) -> str:
        """Where the files lie, for people: `root`; else the only file, or the common folder.

        The folder is that of the first file, the last one and up to 62 between: all would take
        long. "" if they have none in common.

        >>> Manifest.of_files(["/a/b/c", "/a/b/d/e"]).place, Manifest.of_files(["/a/b"]).place
        ('/a/b', '/a/b')
        >>> Manifest.of_files(["/a/b", "/c/d"]).place, Manifest.of_files(["s3://a/b", "s3://c"]).place
        ('', '')
        """
        rows = self.table.num_rows
        if self.root or not rows:
            return self.root.rstrip("/") or self.root
        some = set(self.addresses(np.unique(np.linspace(0, rows - 1, 64).astype(np.int64))))
        common = os.path.commonprefix(list(some))  # noqa: RUF071  of addresses; cut below
        if len(some) == 1:
            return common
        folder = common.rpartition("/")[0]
        return "" if folder.endswith(":/") else folder

    @cached_property
    def title(self) -> str:
        """What people call the dataset: `place`, else its first file and how many more there are.

        >>> Manifest.of_files(["/a/b", "/c/d", "/e"]).title
        '/a/b and 2 more'
        """
        rows = self.table.num_rows
        if self.place or not rows:
            return self.place
        return f"{self.addresses(np.zeros(1, np.int64))[0]} and {rows - 1:,} more"

    @cached_property
    def _prefix(self) -> str:
        """Prefix of all addresses."""
        return self.root.rstrip("/") + "/" if self.root else ""

    def rows(self, ids: NDArray[np.integer]) -> Ints:
        """Return (k,) the row of the table that has each object."""
        if self._one_a_row:
            return np.asarray(ids, np.int64)
        if self.table.num_rows == 1:
            return np.zeros(len(ids), np.int64)
        return np.searchsorted(self._ends, ids, side="right")

    def ranges(self, ids: NDArray[np.integer], rows: Ints | None = None) -> tuple[Ints, Ints]:
        """Return (k,) offsets in their files and (k,) lengths (or UNKNOWN) of objects.

        rows: result of `rows(ids)`, if known.
        """
        rows = self.rows(ids) if rows is None else rows
        length = self._lengths[rows]
        if self._one_a_row:
            return self.offsets[rows], length
        first = self._ends[rows] - self.counts[rows]
        return self.offsets[rows] + (np.asarray(ids) - first) * length, length

    @cached_property
    def file_rows(self) -> Ints:
        """(files + 1,) first row of each file, and the number of rows.

        A *file* is a run of rows with one address; files are numbered from 0. An address that
        appears again further down counts as another file, which costs one more open or check.
        """
        n = self.table.num_rows
        if n == 0:
            return np.zeros(1, np.int64)
        begins = np.ones(n + 1, np.bool_)  # begins[i]: row i is the first of a file; n is the end
        # Two rows at offset 0 count as two files (one file twice does no harm).
        rows = np.flatnonzero((self.offsets[1:] != 0) | (self.offsets[:-1] != 0))
        begins[1 + rows[equal_to_next(*self._letters, rows)]] = False
        return np.flatnonzero(begins)

    @cached_property
    def file_bounds(self) -> Ints:
        """(files + 1,) file f holds the objects from file_bounds[f] up to file_bounds[f + 1]."""
        if self._one_a_row:
            return self.file_rows
        return np.append(0, self._ends)[self.file_rows]

    def file_of(self, ids: NDArray[np.integer]) -> NDArray[np.int32]:
        """Return (k,) the number of the file that has each object."""
        bounds = self.file_bounds
        if self._one_a_row and len(bounds) == self.table.num_rows + 1:  # a file for each object
            return np.asarray(ids, np.int32)
        if len(bounds) == 2:
            return np.zeros(len(ids), np.int32)
        return (np.searchsorted(bounds, ids, side="right") - 1).astype(np.int32)

    @cached_property
    def remote(self) -> Mask:
        """(files,) whether each file is outside this machine's file systems."""
        n = len(self.file_rows) - 1
        if self.root or not has_scheme(self._text()[1]):
            return np.broadcast_to(np.bool_(is_remote(self.root)), n)
        return np.array([is_remote(uri) for uri in self.addresses(self.file_rows[:-1])], np.bool_)

    def extent(self, row: int) -> int:
        """Return the least size of a row's file in bytes, or UNKNOWN."""
        file = int(np.searchsorted(self.file_rows, row, side="right")) - 1
        rows = slice(*self.file_rows[file : file + 2].tolist())
        ends = self.offsets[rows] + self._lengths[rows] * self.counts[rows]
        return int(ends.max())

    def addresses(self, rows: NDArray[np.integer]) -> list[str]:
        """Return the full addresses of many rows; see `uri` for a single one."""
        prefix, (bounds, text) = self._prefix, self._letters
        spans = zip(bounds[rows].tolist(), bounds[1:][rows].tolist(), strict=True)
        return [prefix + str(text[start:stop], "utf-8") for start, stop in spans]

    @cached_property
    def offsets(self) -> Ints:
        """(rows,) first byte of each row in its file."""
        return self._column("offset")

    @cached_property
    def _lengths(self) -> Ints:
        return self._column("length")

    @cached_property
    def counts(self) -> Ints:
        """(rows,) objects of each row."""
        return self._column("count")

    def _one_piece(self, name: str) -> pa.Array:
        """Return a column as one array; `combine_chunks` would copy even a single chunk."""
        column = self.table.column(name)
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()

    def uri(self, row: int) -> str:
        bounds, text = self._letters
        return self._prefix + str(text[bounds[row] : bounds[row + 1]], "utf-8")

    def location(self, object_id: int) -> tuple[str, int, int]:
        """Return (uri, offset, length) of one object; length is UNKNOWN if not asked for."""
        ids = np.array([object_id])
        offset, length = self.ranges(ids)
        return self.uri(int(self.rows(ids)[0])), int(offset[0]), int(length[0])

    def lengths(self) -> Ints:
        """Return (n,) bytes of every object, UNKNOWN where not asked for."""
        out = np.empty(len(self), np.int64)
        self.fill_lengths(out)
        return out

    @cached_property
    def summed(self) -> Lengths:
        """Summary of the lengths of all objects; costs per row of the table, not per object."""
        return Lengths.of(self._lengths, self.counts)

    def fill_lengths(self, out: Ints) -> None:
        """Write the bytes of every object to `out` (n,), UNKNOWN where not asked for.

        Works on about _OBJECTS_AT_ONCE objects to limit memory and the time of holding the GIL.
        """
        row, rows, done = 0, self.table.num_rows, 0
        while row < rows:
            stop = max(int(self._ends.searchsorted(done + _OBJECTS_AT_ONCE, side="right")), row + 1)
            end = int(self._ends[stop - 1])
            if stop == row + 1:
                for at in range(done, end, _OBJECTS_AT_ONCE):
                    out[at : min(at + _OBJECTS_AT_ONCE, end)] = self._lengths[row]
            else:
                out[done:end] = np.repeat(self._lengths[row:stop], self.counts[row:stop])
            row, done = stop, end

    @cached_property
    def key(self) -> str:
        """Content identity (XXH3-128): equal for equal manifests, in all processes."""
        root = self.root.encode()
        digest = xxhash.xxh3_128(f"{len(root)} {self.table.num_rows} ".encode() + root)
        digest.update(self.salt.encode())
        for row, access in self.access:
            digest.update(f"{row} {access.identity}".encode())
        digest.update(_words(self.pins))
        for name in ("offset", "length", "count"):
            digest.update(np.ascontiguousarray(self._column(name)).view(np.uint8).data)
        for part in self._text():
            digest.update(part)
        return digest.hexdigest()

    def _text(self) -> tuple[memoryview, memoryview]:
        """Return the ends of all uris in their text, and the text; equal for sliced tables."""
        ends, text = self._letters
        first, last = int(ends[0]), int(ends[-1])
        return (ends[1:] - first).view(np.uint8).data, text[first:last]

    @cached_property
    def _letters(self) -> tuple[Ints, memoryview]:
        """(rows + 1,) bounds of each row's uri in a text, and the text; without a copy."""
        uris = self._one_piece("uri")
        if not len(uris):
            return np.zeros(1, np.int64), memoryview(b"")
        _, ends, text = uris.buffers()
        bounds = np.frombuffer(ends, np.int64)[uris.offset :][: len(uris) + 1]
        return bounds, memoryview(b"" if text is None else text)

    def to_arrow(self) -> bytes:
        """Return an Arrow IPC file."""
        file = io.BytesIO()
        self.write_arrow(file)
        return file.getvalue()

    def write_arrow(self, file: BinaryIO) -> None:
        """Write an Arrow IPC file (70 MB for a million files)."""
        import pyarrow as pa

        access = _words((row, grant.identity) for row, grant in self.access)
        also = {_ROOT: self.root.encode(), _SALT: self.salt.encode(), _ACCESS: access}
        also |= {_PINS: _words(self.pins)} if self.pins else {}
        table = self.table.replace_schema_metadata(also)
        with pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)

    @classmethod
    def from_arrow(cls, data: bytes | memoryview | mmap | pa.Buffer) -> Manifest:
        """Read a manifest from an Arrow file and check everything that a hostile sender can change.

        Raises:
            MalformedError: no such file, another schema, nulls, negative or overflowing numbers.
        """
        import pyarrow as pa

        try:
            with pa.ipc.open_file(pa.py_buffer(data)) as reader:
                table = reader.read_all().combine_chunks()
            table.validate(full=True)
            also = table.schema.metadata or {}
            root, salt = also.get(_ROOT, b"").decode(), also.get(_SALT, b"").decode()
        except (pa.ArrowException, OSError, ValueError) as e:
            raise MalformedError(f"not a manifest: {e}") from e
        if not table.schema.equals(_schema()):
            names = _schema().names
            raise MalformedError(f"a manifest must have the columns {names}, not {table.schema}")
        if any(column.null_count for column in table.columns):
            raise MalformedError("a manifest must not have nulls")
        access, pins = (_parsed(also.get(key, b""), table.num_rows) for key in (_ACCESS, _PINS))
        manifest = cls(
            table.replace_schema_metadata(None),
            root,
            salt,
            tuple((row, Access(identity)) for row, identity in access),
            _parsed_pins(pins),
        )
        manifest.check()
        return manifest

    def check(self) -> None:
        """Raise MalformedError for impossible numbers, ConfigError for too many objects."""
        offset, length, count = self.offsets, self._lengths, self.counts
        if (offset < 0).any() or (length < UNKNOWN).any() or (count < 0).any():
            raise MalformedError("a manifest must not have negative offsets, lengths or counts")
        if ((length == UNKNOWN) & ((count != 1) | (offset != 0))).any():
            raise MalformedError("an object of unknown length must be a whole file")
        total = float(np.sum(count, dtype=np.float64))
        if total > MAX_OBJECTS:
            raise ConfigError(f"{total:.0f} objects are more than {MAX_OBJECTS}: split the dataset")
        nbytes = float(np.sum(length.clip(0) * count.astype(np.float64)))
        if (
            nbytes >= 2.0**62
            or (offset.astype(np.float64) + length * count.astype(np.float64) >= 2.0**62).any()
        ):
            raise MalformedError("a manifest's ranges must end below 2**62, and so must their sum")


def _joined_access(parts: Sequence[Manifest]) -> tuple[tuple[int, Access], ...]:
    """Return the access of manifests that are joined in order, without equal neighbours."""
    firsts: list[tuple[int, Access]] = []
    first = 0
    for part in parts:
        for row, access in part.access:
            if not firsts or firsts[-1][1] != access:
                firsts.append((first + row, access))
        first += part.table.num_rows
    return tuple(firsts)


def _joined_pins(parts: Sequence[Manifest]) -> tuple[tuple[int, int], ...]:
    """Return the pins of manifests that are joined in order."""
    firsts: list[tuple[int, int]] = []
    first = 0
    for part in parts:
        pins = part.pins
        if firsts and part.table.num_rows and not (pins and pins[0][0] == 0):
            firsts.append((first, ANY))
        firsts += [(first + row, pin) for row, pin in pins]
        first += part.table.num_rows
    return tuple(firsts)


def _words(pairs: Iterable[tuple[int, object]]) -> bytes:
    """Return what `_parsed` reads."""
    return " ".join(f"{row} {value}" for row, value in pairs).encode()


def _parsed(text: bytes, rows: int) -> list[tuple[int, str]]:
    """Read what `write_arrow` wrote for some of `rows` rows.

    Raises:
        MalformedError: it did not write that.
    """
    words = text.split()
    try:
        first = [int(word) for word in words[::2]]
        values = [word.decode("ascii") for word in words[1::2]]
    except ValueError as e:
        raise MalformedError(f"not the access of a manifest: {e}") from e
    ordered = all(a < b for a, b in pairwise([-1, *first, max(rows, 1)]))
    if len(first) != len(values) or not ordered:
        raise MalformedError("the access of a manifest is for other rows")
    return list(zip(first, values, strict=True))


def _parsed_pins(pairs: list[tuple[int, str]]) -> tuple[tuple[int, int], ...]:
    try:
        pins = tuple((row, int(text)) for row, text in pairs)
    except ValueError as e:
        raise MalformedError(f"not the versions of a manifest: {e}") from e
    if any(not ANY <= pin < 1 << 63 for _, pin in pins):
        raise MalformedError("the versions of a manifest must be numbers of 63 bits")
    return pins
