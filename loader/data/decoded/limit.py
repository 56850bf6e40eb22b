"""Decoded: how much of what was decoded is kept, and under which name for later jobs."""

from __future__ import annotations

from dataclasses import dataclass

from creel.errors import ConfigError
from creel.units import parse_size


@dataclass(frozen=True)
class Decoded:
    """A value of `keep_decoded=` and of `creel.kept`: samples that later jobs find again.

    Args:
        limit: most bytes of the disk: "1TiB", a number, or "auto", all but `disk.keep_free`.
        name: what these samples are called. It promises that the same files, decoded by the same
            code, make the same samples, also as far as creel does not see the code:
            docs/decoded-names.md.

    Raises:
        ConfigError: `limit` is not a size, or `name` no text.
    """

    limit: str | int = "auto"
    name: str | None = None

    def __post_init__(self) -> None:
        if self.name is not None and (type(self.name) is not str or not self.name):
            raise ConfigError(f"name={self.name!r}: give the samples a name, a text")
        _ = self.nbytes

    @property
    def nbytes(self) -> int | None:
        """Most bytes; None for "auto"."""
        if self.limit == "auto":
            return None
        if isinstance(self.limit, str):
            return parse_size(self.limit)
        if type(self.limit) is int and self.limit >= 0:
            return self.limit
        raise ConfigError(f'{self.limit!r} is not a size: write "64GiB", a number, or "auto"')
