"""Rows of a mapped file that a person's dataset holds: whether they are what its samples read.

That a dataset of n samples, which holds an array or table of n rows, reads row i for sample i is a
hypothesis. No code of the dataset is run or read for it. The page cache proves it: memory has the
rows of the first samples, which the dataset has just read, and has hardly any other. Rows that the
samples do not read pass that in one of a million cases (29 of 32 by chance, of at most a half that
memory has), and cost reads then, never a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from creel.loader.data.maps.mappings import MappedRange
from creel.loader.data.maps.ranges import RangesOf, joined, ranges_of, rows_in_file
from creel.loader.data.user_code.protected import length

#: Rows that are looked at: of those that were read, and of others.
_ROWS = 32
#: Shares of these that memory must have, and may have.
_READ, _OTHERS = 0.9, 0.5


def held_ranges(dataset: object) -> RangesOf | None:
    """Return what samples map if they are rows of what the dataset holds; None if it holds none."""
    return ranges_of(dataset, _held)


def _held(dataset: Any) -> RangesOf | None:
    count = length(dataset)
    known = [
        (rows_in_file(value), value) for value in list(getattr(dataset, "__dict__", {}).values())
    ]
    return joined(rows for rows, value in known if rows is not None and length(value) == count)


def proved(
    ranges: RangesOf, read: Sequence[int], count: int, resident: Callable[[MappedRange], bool]
) -> bool | None:
    """Return whether samples that were `read` are these rows; None if that cannot be said now.

    Args:
        count: of all samples.
        resident: whether memory has a part of a file.
    """

    def there(samples: Sequence[int]) -> float:
        # Where the next part lies may stand in one that memory lacks, which is then not asked for.
        rows = [all(all(map(resident, part)) for part in ranges(i)) for i in samples]
        return sum(rows) / max(len(rows), 1)

    others = sorted({k * count // _ROWS for k in range(_ROWS)} - set(read))
    if not others or not read or there(others) > _OTHERS:
        return None
    return there(read[:_ROWS]) >= _READ
