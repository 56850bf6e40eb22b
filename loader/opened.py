"""creel.open and creel.read: the bytes at an address, from the cache where it has them.

For a person's own `__getitem__`. A dataset that says which addresses it reads (see
`creel.loader.sources`) finds them in the cache; every other address is read directly.
"""

from __future__ import annotations

import builtins
import io
import os
from typing import IO

from creel.errors import ConfigError
from creel.loader.reading import declared, hear, take_address, take_found
from creel.loader.storage import absolute, read_all, scheme_of


class Opened(io.BytesIO):
    """A file in memory: the caller's own copy."""

    def __init__(self, data: bytes, name: str) -> None:
        super().__init__(data)
        self.name = name

    @property
    def mode(self) -> str:
        """As open() was asked for."""
        return "rb"


def read(uri: str | os.PathLike[str]) -> bytes:
    """All bytes of a file.

    Raises:
        OSError: as `open` would for a local file; SourceError (an OSError) for a remote one.
    """
    return take_address(absolute(uri), read_all)


def open(uri: str | os.PathLike[str], mode: str = "rb") -> IO[bytes]:  # noqa: A001 - creel.open
    """A file object over the bytes at an address.

    A local file that no lease covers is the real file (with a descriptor, so that it can be
    mapped); everything else is a copy in memory.

    Raises:
        ConfigError: a mode other than "rb".
    """
    if mode != "rb":
        raise ConfigError(f"creel.open reads bytes: its mode is 'rb', not {mode!r}")
    address = absolute(uri)
    found = declared(address)
    if found is None and not scheme_of(address):
        hear(address)
        return builtins.open(address, "rb")  # noqa: PTH123 - the caller closes it
    return Opened(take_found(found, address, read_all), address)
