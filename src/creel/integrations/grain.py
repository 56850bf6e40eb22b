"""A dataset for grain, whose samples are numpy arrays, over the same daemon."""

from __future__ import annotations

import operator
from typing import Any, SupportsIndex

from creel.integrations.arrays import arrays


class DataSource:
    """grain's `RandomAccessDataSource` of a dataset: `grain.MapDataset.source(DataSource(data))`.

    The order is grain's, which asks for samples one by one, so nothing is read ahead: files are
    read once, and are in memory from then on. docs/recipes/jax.md has a loader that reads ahead in
    grain's order.

    Args:
        data: map-style: one of creel's, or what `creel.wrap` or `creel.kept` returned. It is
            pickled into grain's workers.
    """

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: SupportsIndex) -> Any:
        return arrays(self._data[operator.index(index)])

    def __repr__(self) -> str:
        return f"creel.integrations.grain.DataSource({self._data!r})"
