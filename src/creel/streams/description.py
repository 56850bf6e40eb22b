"""Description: what `stream.json` says of a log."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from creel.errors import ConfigError

#: Kinds of numpy's types that torch has: bool, int, uint, float, complex.
_KINDS = "biufc"


class Description(msgspec.Struct, frozen=True):
    """What `stream.json` says.

    Attributes:
        id: of this log; another one in the same folder has another.
        fields: of a record, in order: name, numpy's type ("<f4"), shape.
        records: of a full chunk.
        ahead: bytes that producers may be ahead of the slowest reader.
        keep: bytes that stay behind it.
        producers: as many must end before the log has ended.
        readers: names of readers that count before they have begun.
    """

    id: str
    fields: tuple[tuple[str, str, tuple[int, ...]], ...]
    records: int
    ahead: int
    keep: int
    producers: int = 1
    readers: tuple[str, ...] = ()

    def layout(self) -> np.dtype[Any]:
        """Return the structured type of a record, laid out as a C struct.

        Raises:
            ConfigError: there are no fields, or one has no numbers.
        """
        try:
            spec = [(name, np.dtype(kind), shape) for name, kind, shape in self.fields]
            made = np.dtype(spec, align=True)
        except (TypeError, ValueError) as e:
            raise ConfigError(f"the fields {self.fields} are not those of a record: {e}") from e
        kinds = [np.dtype(kind) for _, kind, _ in self.fields]
        wrong = [kind for kind in kinds if kind.kind not in _KINDS or kind.char in "gG"]
        if wrong or not made.itemsize or any(not kind.isnative for kind in kinds):
            raise ConfigError(f"fields are of numbers that torch has, not {wrong or self.fields}")
        return made
