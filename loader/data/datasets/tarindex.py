"""Members of an uncompressed tar and their offsets: ustar, pax and GNU, header by header."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from creel.cache.storage.lookup import read_range
from creel.cache.storage.stores.access import Options
from creel.cache.storage.uris import scheme_of
from creel.errors import ConfigError

_BLOCK = 512
#: Bytes of one remote request: about a round trip's time at some 100 MB/s.
_READ_NBYTES = 4 << 20
_COMPRESSED = (
    (b"\x1f\x8b", "gzip"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ\x00", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"\x04\x22\x4d\x18", "lz4"),
)


class TarMember(NamedTuple):
    """A regular file in a tar: `nbytes` bytes at `offset`."""

    name: str
    offset: int
    nbytes: int


class _TarBytes:
    """Reads at increasing offsets: from a buffered local file, or remotely 4 MiB at a time."""

    def __init__(self, path: str, options: Options, nbytes: int) -> None:
        self.nbytes = nbytes
        self._options = options
        self._path = path
        self._file = None if scheme_of(path) else Path(path).open("rb")  # noqa: SIM115
        self._start = 0
        self._data = b""

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def __call__(self, offset: int, nbytes: int) -> bytes:
        if self._file is not None:
            self._file.seek(offset)
            return self._file.read(nbytes)
        at = offset - self._start
        if at < 0 or at + nbytes > len(self._data):
            want = min(max(nbytes, _READ_NBYTES), self.nbytes - offset)
            data = read_range(self._path, offset, max(want, 0), self._options)
            self._start, self._data = offset, data
            at = 0
        return self._data[at : at + nbytes]


def members(path: str, nbytes: int, options: Options = None) -> Iterator[TarMember]:
    """Yield the regular files of a tar, in order.

    Args:
        nbytes: size of the tar.
        options: of the client of a remote one.

    Raises:
        ConfigError: compressed, damaged, truncated, or not a tar.
    """
    with closing(_TarBytes(path, options, nbytes)) as read:
        _refuse_compressed(path, read(0, min(8, read.nbytes)))
        try:
            yield from _walk(path, read)
        except ConfigError:
            raise
        except ValueError as e:  # a malformed number in a header
            raise ConfigError(f"{path} is damaged: {e}") from e


def _refuse_compressed(path: str, head: bytes) -> None:
    for magic, name in _COMPRESSED:
        if head.startswith(magic):
            raise ConfigError(
                f"{path} is compressed with {name}: creel cannot read single members of it;"
                " decompress it first"
            )


def _walk(path: str, read: _TarBytes) -> Iterator[TarMember]:
    at = 0
    extended: dict[str, str] = {}  # from extended headers, for the next member
    common: dict[str, str] = {}  # from global pax headers, for all later members
    while at + _BLOCK <= read.nbytes:
        head = read(at, _BLOCK)
        if not any(head):
            return
        _check(path, at, head)
        kind, body = head[156:157], at + _BLOCK
        nbytes = _number(head[124:136])
        if kind in b"LKxg":
            _extend(kind, read(body, nbytes), extended, common)
            at = body + _padded(nbytes)
            continue
        header = {**common, **extended}
        nbytes = int(header.get("size", nbytes))
        if nbytes < 0:
            raise ValueError(f"a member of {nbytes} bytes")
        if kind in b"0\x007" and "GNU.sparse.major" not in header:
            if body + nbytes > read.nbytes:
                raise ConfigError(f"{path} is cut short within the member at byte {at}")
            yield TarMember(header.get("path") or _name(head), body, nbytes)
        elif kind == b"S" or "GNU.sparse.major" in header:
            raise ConfigError(f"{path} has a sparse member at byte {at}: it is in several pieces")
        # links, folders and devices have no data, even if their size field is not 0
        at = body + (_padded(nbytes) if kind not in b"123456" else 0)
        extended = {}
    if at < read.nbytes or at == 0:
        raise ConfigError(f"{path} is not a tar file, or is cut short at byte {at}")


def _check(path: str, at: int, head: bytes) -> None:
    """Check the header's checksum: the sum of its bytes, with spaces for the checksum field."""
    try:
        right = sum(head) - sum(head[148:156]) + 8 * 0x20 == _number(head[148:156])
    except ValueError:
        right = False
    if not right:
        raise ConfigError(f"{path} is not a tar file, or is damaged at byte {at}")


def _extend(kind: bytes, body: bytes, extended: dict[str, str], common: dict[str, str]) -> None:
    if kind == b"L":
        extended["path"] = _text(body)
    elif kind == b"x":
        extended.update(_pax(body))
    elif kind == b"g":
        common.update(_pax(body))


def _pax(body: bytes) -> Iterator[tuple[str, str]]:
    """Yield (keyword, value) of records "length keyword=value\\n"."""
    while body and body[:1] != b"\0":
        digits, _, _ = body.partition(b" ")
        nbytes = int(digits)
        if nbytes <= len(digits):
            raise ValueError(f"a pax record of {nbytes} bytes")
        record, body = body[len(digits) + 1 : nbytes - 1], body[nbytes:]
        key, _, value = record.partition(b"=")
        yield key.decode(), value.decode("utf-8", "surrogateescape")


def _number(field: bytes) -> int:
    """Parse a number in octal digits, or (GNU) in base 256 after a byte 0x80."""
    if field[0] & 0x80:
        return int.from_bytes(field[1:], "big")
    return int(field.split(b"\0", 1)[0].strip() or b"0", 8)


def _name(head: bytes) -> str:
    name = _text(head[:100])
    prefix = _text(head[345:500]) if head[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def _padded(nbytes: int) -> int:
    return -(-nbytes // _BLOCK) * _BLOCK
