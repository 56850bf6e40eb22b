"""Where the batches of an epoch begin and end. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from creel.policies.arrays import Ints


@dataclass(frozen=True, eq=False)
class Division:
    """Division of an epoch's items into steps: of one size, or, with `starts`, of any sizes.

    Attributes:
        size: items per step; the last step may have fewer, or is left out (`drop_last`).
        starts: (b + 1,) step i has items [starts[i], starts[i + 1]).
    """

    size: int = 1
    drop_last: bool = False
    starts: Ints | None = None

    def steps(self, total: int) -> int:
        if self.starts is not None:
            return len(self.starts) - 1
        return total // self.size if self.drop_last else -(-total // self.size)

    def within(self, items: int) -> int:
        """Return the number of full steps in the first `items` items."""
        if self.starts is not None:
            return int(np.searchsorted(self.starts, items, side="right")) - 1
        return items // self.size

    def start(self, step: int) -> int:
        """Return the first item of `step`; beyond the last item after an incomplete last step."""
        return step * self.size if self.starts is None else int(self.starts[step])

    def ends(self, first: int, last: int, items: int) -> Ints:
        """Return the ends of steps [first, last), of `items` items, counted from `first`."""
        if self.starts is not None:
            return self.starts[first + 1 : last + 1] - self.start(first)
        ends = np.arange(1, last - first + 1, dtype=np.int64) * self.size
        return ends.clip(max=items)

    def same(self, other: Division) -> bool:
        if (self.size, self.drop_last) != (other.size, other.drop_last):
            return False
        return np.array_equal(self.starts, other.starts)  # type: ignore[arg-type]  # None equals only itself
