"""Listings of remote folders that are kept for later jobs while a marker stays the same.

No store tells whether anything below a prefix has changed, but by listing it: a bucket has no
version, and the tag of a container of Azure's is that of its own settings. So a listing is taken
again only where the person names a marker: an object that whoever changes files below the root
writes again afterwards. One request asks for its version, before the files are listed: if a writer
ends meanwhile, the next job sees another version, and lists anew.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash

from creel.cache.storage.lookup import Listing, status_of
from creel.cache.storage.manifest import ANY, Manifest
from creel.cache.storage.stores.access import Access, Options, StorageOptions
from creel.cache.storage.stores.retry import public
from creel.cache.storage.stores.store import read_file
from creel.cache.storage.uris import scheme_of
from creel.errors import MalformedError, NotFoundError

_log = logging.getLogger("creel.loader")


def cache_folder() -> Path:
    """Return the user's folder for what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "creel"


def listing_since(
    root: str, options: Options, marker: str, list_anew: Callable[[], Listing]
) -> Listing:
    """Return the listing that was kept under the marker's present version, else `list_anew()`.

    marker: an address. If it has no version, or does not exist, a warning says so.
    """
    try:
        version = status_of(marker, options)[1]
    except NotFoundError:
        version = ANY
    if version == ANY:
        shown = public(marker)
        _log.warning("%s has no version: %s is listed, and not kept", shown, public(root))
        return list_anew()
    path = _path(root, options, version)
    try:
        return _listing(Manifest.from_arrow(read_file(str(path))))
    except (OSError, MalformedError):
        listing = list_anew()
    try:
        _keep(path, listing)
    except (OSError, ValueError) as e:
        _log.warning("the listing of %s cannot be kept at %s: %s", public(root), path, e)
    return listing


def _path(root: str, options: Options, version: int) -> Path:
    """Return where a listing is kept: of a root, of who may list it, under a marker's version."""
    access = Access.of([scheme_of(root)], StorageOptions(options)).identity
    digest = xxhash.xxh3_128_hexdigest(f"{root}\0{access}".encode(errors="surrogateescape"))
    return cache_folder() / f"listing-{digest}-{version:016x}.arrow"


def _listing(manifest: Manifest) -> Listing:
    lengths = manifest.lengths()
    names: list[str] = manifest.table.column("uri").to_pylist()
    return Listing(names, None if (lengths < 0).any() else lengths.tolist())


def _keep(path: Path, listing: Listing) -> None:
    """Write a listing, so that no reader sees half of it, in place of those of other versions."""
    lengths = None if listing.nbytes is None else np.array(listing.nbytes, np.int64)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    draft.touch(mode=0o600)
    draft.write_bytes(Manifest.of_files(listing.names, lengths=lengths).to_arrow())
    draft.replace(path)
    for other in path.parent.glob(f"{path.name.rpartition('-')[0]}-*.arrow"):
        if other != path:
            other.unlink(missing_ok=True)
