"""List the files below a root: a local walk, a remote listing, or an index file.

An index replaces a slow or impossible listing (a plain web server). It is `index.arrow`, a manifest
of whole files as `Manifest.to_arrow` writes it, or `index.json`: a list of names, or `{"names":
[...], "nbytes": [...]}`. Names are relative to the folder of the index.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from creel.cache.storage.lookup import (
    Listing,
    in_walk_order,
    is_folder,
    list_remote,
    read_all,
    walk,
)
from creel.cache.storage.manifest import UNKNOWN, Manifest
from creel.cache.storage.stores.access import Options
from creel.cache.storage.stores.retry import public
from creel.cache.storage.uris import escape, scheme_of, unescape
from creel.errors import ConfigError, MalformedError, NotFoundError, SourceError
from creel.loader.client.cluster.ranks import rank_and_world
from creel.loader.data.reading.kept_listing import listing_since
from creel.system.progress import progress_line

#: File names of an index below an http(s) root, in the order they are tried.
INDEX_NAMES = ("index.arrow", "index.json")


class _Index(msgspec.Struct, forbid_unknown_fields=True):
    names: list[str]
    nbytes: list[int] | None = None


_decoder = msgspec.json.Decoder(list[str] | _Index)


def files_below(root: str, options: Options = None, marker: str | None = None) -> Listing:
    """Return all files below `root` (in the form of `absolute`), ordered by folder, then by name.

    marker: an object, which is no file of these, as for `FileDataset`.

    Raises:
        NotFoundError: there is no such local folder, or nothing below a remote root.
        ConfigError: a marker of a local folder, or one that is no name.
    """
    if marker is None:
        return _listed(root, options)
    if not marker:
        raise ConfigError(f"marker is the name of an object below the root, not {marker!r}")
    if not scheme_of(root):
        raise ConfigError(f"a marker keeps the listing of a remote folder, and {root} is local")
    address = marker if scheme_of(marker) else f"{root}/{escape(root, marker)}"
    listing = listing_since(root, options, address, lambda: _listed(root, options))
    below = address.startswith(f"{root}/")
    own = unescape(root, address[len(root) + 1 :]) if below else None
    kept = [i for i, name in enumerate(listing.names) if name != own]
    sizes = listing.nbytes
    return Listing([listing.names[i] for i in kept], sizes and [sizes[i] for i in kept])


def _listed(root: str, options: Options) -> Listing:
    rows: list[tuple[str, int]] = []
    counted = (lambda: len(rows)) if scheme_of(root) else None
    with progress_line(f"listing {public(root)}", counted, shown=rank_and_world()[0] == 0):
        listing = _found_below(root, options, rows)
    if scheme_of(root) and not len(listing):
        raise NotFoundError(
            f"nothing is listed below {public(root)}; where a server lists no folders, put an "
            "index there (ImageFolder.save_index) or name one (ImageFolder(..., index=...))"
        )
    return listing


def _found_below(root: str, options: Options, rows: list[tuple[str, int]]) -> Listing:
    if not scheme_of(root):
        if not is_folder(root):
            raise NotFoundError(f"there is no folder {root}")
        return walk(root)
    listing = _index_below(root, options) if scheme_of(root) in {"http", "https"} else None
    return list_remote(root, options, rows) if listing is None else listing


def _index_below(root: str, options: Options) -> Listing | None:
    for name in INDEX_NAMES:
        try:
            data = read_all(f"{root}/{name}", options)
        except SourceError as e:
            if e.errno == errno.ENOENT or getattr(e.__context__, "status", None) in {403, 404}:
                continue
            raise
        return parse_index(data, f"{root}/{name}")
    return None


def parse_index(data: bytes, address: str) -> Listing:
    """Return the files that an index names; the suffix of `address` gives its format.

    Raises:
        ConfigError: not an index.
    """
    try:
        if address.endswith(".json"):
            index = _decoder.decode(data)
            names, nbytes = (
                (index, None) if isinstance(index, list) else (index.names, index.nbytes)
            )
        else:
            manifest = Manifest.from_arrow(data)
            names, nbytes = manifest.table.column("uri").to_pylist(), manifest.lengths().tolist()
    except (msgspec.DecodeError, MalformedError, UnicodeDecodeError) as e:
        raise ConfigError(f"{public(address)} is not an index of files: {e}") from e
    if nbytes is not None and len(nbytes) != len(names):
        raise ConfigError(f"{public(address)} has {len(names)} names and {len(nbytes)} sizes")
    if any(name.startswith("/") or ".." in name.split("/") for name in names):
        raise ConfigError(f"{public(address)} names files outside of its own folder")
    return in_walk_order(zip(names, nbytes or [UNKNOWN] * len(names), strict=True))


def write_index(path: Path, names: Sequence[str], nbytes: NDArray[np.int64] | None) -> None:
    """Write an index; the suffix (.arrow or .json) gives the format."""
    if path.suffix == ".json":
        known = None if nbytes is None else nbytes.tolist()
        path.write_bytes(msgspec.json.encode(_Index(list(names), known)))
    elif path.suffix == ".arrow":
        path.write_bytes(Manifest.of_files(list(names), lengths=nbytes).to_arrow())
    else:
        raise ConfigError(f"an index is written as .arrow or .json, not {path.name}")


# --- patterns ---------------------------------------------------------------------------------


def glob_pattern(glob: str) -> re.Pattern[str]:
    """Return a regex for a glob over names relative to a root; as in `glob`, it skips hidden names.

    >>> [bool(glob_pattern("**/*.jpg").fullmatch(n)) for n in ("a.jpg", "b/c/d.jpg", ".x/a.jpg")]
    [True, True, False]
    """
    out = []
    for part in re.findall(r"(?:^|(?<=/))\*\*/|\*+|\?|\[!?[^]]+\]|.", glob):
        if part == "**/":
            out.append(r"(?:[^./][^/]*/)*")
        elif part.startswith("*"):
            out.append(r"[^/]*")
        elif part == "?":
            out.append(r"[^/]")
        elif part.startswith("[") and len(part) > 2:
            out.append(part.replace("[!", "[^").replace("\\", "\\\\"))
        else:
            out.append(re.escape(part))
    return re.compile(r"(?!\.)(?!.*/\.)" + "".join(out))


def braces(text: str) -> list[str]:
    """Expand {000..012} and {a,b} as a shell does, as in names of shards.

    >>> braces("s-{08..10}.tar"), braces("{a,b}{0..1}")
    (['s-08.tar', 's-09.tar', 's-10.tar'], ['a0', 'a1', 'b0', 'b1'])
    """
    match = re.search(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}", text)
    if match is None:
        return [text]
    first, last, words = match.groups()
    if words is not None:
        middle = words.split(",")
    else:
        middle = [f"{i:0{len(first)}d}" for i in range(int(first), int(last) + 1)]
    tails = braces(text[match.end() :])
    return [text[: match.start()] + m + tail for m in middle for tail in tails]
