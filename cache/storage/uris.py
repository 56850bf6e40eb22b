"""What an address of a file says, in which form creel has it, and columns of many addresses."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast
from urllib.parse import quote, unquote, urlsplit

import numpy as np

from creel.cache.storage.stores.access import ARROW
from creel.errors import ConfigError, NotFoundError
from creel.policies.arrays import Index, Ints, Mask

if TYPE_CHECKING:  # as in `manifest`
    import pyarrow as pa

#: Addresses compared at a time, a few megabytes of text.
_AT_ONCE = 1 << 15


def scheme_of(address: str) -> str:
    """Return the scheme of a URI in lower case, "" for a path.

    >>> scheme_of("s3://bucket/a"), scheme_of("/data/a"), scheme_of("file:///data/a")
    ('s3', '', 'file')
    """
    head, separator, _ = address.partition("://")
    return head.lower() if separator else ""


def is_remote(uri: str) -> bool:
    """Return whether an address is outside this machine's file systems.

    >>> is_remote("s3://bucket/a"), is_remote("file:///a"), is_remote("/odd://name")
    (True, False, False)
    """
    if "://" not in uri:  # asked of every file that is read
        return False
    scheme = uri.partition("://")[0]
    return "/" not in scheme and scheme.lower() != "file"


def absolute(address: str | os.PathLike[str]) -> str:
    """Return the address as a URI or absolute path, which any process of this machine can read.

    >>> absolute("file:///data/a%20b"), absolute("s3://bucket/a/")
    ('/data/a b', 's3://bucket/a')

    Raises:
        ConfigError: neither a string nor a path.
        NotFoundError: an empty path (it would mean the working directory), or only a scheme.
    """
    if not isinstance(address, (str, os.PathLike)):
        raise ConfigError(f"a path is a string or a Path, not {address!r}")
    text = os.fspath(address)
    if text.startswith("/") and "//" not in text and "/." not in text and text[-1] != "/":
        return text  # the usual case; the rest takes several times as long
    if not text:
        raise NotFoundError("the path is empty: name a file or a folder ('.' is this one)")
    scheme = scheme_of(text)
    if scheme == "file":
        return unquote(urlsplit(text).path)
    if scheme:
        if not text.partition("://")[2].strip("/"):
            raise NotFoundError(
                f"{text} lacks a bucket or host: write {scheme}://bucket-or-host/path"
            )
        return text.rstrip("/")
    return absolute_path(os.path.expanduser(text))  # noqa: PTH111


def absolute_path(path: str) -> str:
    """Return an absolute path without empty and `.` components.

    `..` stays, because after a symbolic link only the file system can resolve it.

    >>> absolute_path("/data/./a//b/../c/")
    '/data/a/b/../c'
    """
    whole = path if path.startswith("/") else f"{os.getcwd()}/{path}"  # noqa: PTH109
    return "/" + "/".join(step for step in whole.split("/") if step not in {"", "."})


def is_local(address: str) -> bool:
    """Whether an address in the form of `absolute` is a local path."""
    return "://" not in address


def several(given: object) -> list[str | os.PathLike[str]]:
    """Return one address or many, as a list.

    Raises:
        ConfigError: not an address or an iterable of addresses.
    """
    if isinstance(given, (str, os.PathLike)):
        return [given]
    if not isinstance(given, Iterable):
        raise ConfigError(f"give a path or a list of paths, not {given!r}")
    listed = list(given)
    for path in listed:
        if not isinstance(path, (str, os.PathLike)):
            raise ConfigError(f"a path is a string or a Path, not {path!r}")
    return listed


def escape(root: str, name: str) -> str:
    """Escape a listed name so that `root/name` addresses that file.

    >>> escape("http://h/d", "hot dog/1#.png"), escape("s3://b", "hot dog/1#.png")
    ('hot%20dog/1%23.png', 'hot dog/1%23.png')
    """
    scheme = scheme_of(root)
    if scheme in {"http", "https"}:
        return quote(name)
    if scheme in ARROW:
        return name.replace("%", "%25").replace("?", "%3F").replace("#", "%23")
    return name


def unescape(root: str, name: str) -> str:
    """Invert `escape`.

    >>> unescape("http://h/d", "hot%20dog/1%23.png"), unescape("/d", "50%25.png")
    ('hot dog/1#.png', '50%25.png')
    """
    return unquote(name) if scheme_of(root) in ARROW | {"http", "https"} else name


def strings(values: Sequence[str] | pa.Array) -> pa.Array:
    """Return a column of strings as one Arrow array that is not a slice of a larger one.

    Raises:
        ConfigError: a name that is not UTF-8.
    """
    import pyarrow as pa

    try:
        column = values if isinstance(values, pa.Array) else text_array(values)
    except UnicodeEncodeError as e:
        raise ConfigError(f"a file's name is not UTF-8: {e.object!r}") from e
    if column.type != pa.large_string():  # a cast to the same type would import pyarrow.compute
        column = column.cast(pa.large_string())
    # A pickle of a slice contains the whole array.
    sliced = column.get_total_buffer_size() > column.nbytes
    return text_array(column.to_pylist()) if sliced else column


def addresses(values: Sequence[str | os.PathLike[str]]) -> pa.Array:
    """Return a column of addresses in the form of `absolute`, as one Arrow array.

    Raises:
        ConfigError, NotFoundError: see `absolute`.
    """
    if set(map(type, values)) == {str}:
        column = strings(cast(Sequence[str], values))
        if _absolute(column):
            return column
    return strings([absolute(value) for value in values])


def _absolute(column: pa.Array) -> bool:
    """Whether `absolute` would change none of these addresses. Vectorized, as they may be many."""
    _, ends, text = column.buffers()
    bounds = np.frombuffer(ends, np.int64)
    letters = np.frombuffer(text, np.uint8)
    if (bounds[1:] == bounds[:-1]).any():
        return False
    slash = letters == ord("/")
    odd = slash[:-1] & (slash[1:] | (letters[1:] == ord(".")))
    begin, last = bounds[:-1], bounds[1:] - 1
    return bool(slash[begin].all()) and not slash[last].any() and not odd.any()


def has_scheme(text: memoryview) -> bool:
    """Return whether "://" is anywhere in a long text, without copying all of it."""
    step = _AT_ONCE << 8
    return any(b"://" in bytes(text[at : at + step + 2]) for at in range(0, len(text), step))


def equal_to_next(bounds: Ints, text: memoryview, rows: Index) -> Mask:
    """Return (k,) whether the uris of rows[i] and rows[i] + 1 are equal; `bounds`: in `text`.

    Does without `pyarrow.compute`, which costs every daemon 8 MB: the text of equal neighbours of L
    bytes repeats after L bytes, so rows of one length are compared together.
    """
    same = np.zeros(len(rows), np.bool_)
    if len(rows) == 0:
        return same
    start, size = bounds[rows], np.diff(bounds)
    alike = size[rows] == size[rows + 1]
    same |= alike & (size[rows] == 0)
    data = np.frombuffer(text, np.uint8)
    for length in np.unique(size[rows[alike & ~same]]).tolist():
        window = np.lib.stride_tricks.sliding_window_view(data, 2 * length)
        members = np.flatnonzero(alike & (size[rows] == length))
        for some in np.array_split(members, len(members) // _AT_ONCE + 1):
            pair = window[start[some]]
            same[some] = (pair[:, :length] == pair[:, length:]).all(axis=1)
    return same


def text_column(uris: Sequence[str] | pa.Array) -> pa.Array:
    import pyarrow as pa

    text = pa.large_string()
    if not isinstance(uris, pa.Array):
        return text_array(uris)
    return uris if uris.type == text else uris.cast(text)  # a cast imports pyarrow.compute


def text_array(values: Sequence[str]) -> pa.Array:
    """Make a large_string array as `pa.array` does, in 2 ms instead of 12 for 20,000 names.

    Raises:
        UnicodeEncodeError: a value has a surrogate, such as a file's name that is not UTF-8.
    """
    import pyarrow as pa

    text = "".join(values)
    sizes = map(len, values) if text.isascii() else (len(value.encode()) for value in values)
    ends = np.zeros(len(values) + 1, np.int64)
    np.cumsum(np.fromiter(sizes, np.int64, len(values)), out=ends[1:])
    return pa.LargeStringArray.from_buffers(
        len(values), pa.py_buffer(ends), pa.py_buffer(text.encode())
    )
