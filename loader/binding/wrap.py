"""creel.wrap: a proxy of a dataset, for loaders that are not creel's (accelerate, Trainer).

The proxy reads through the node's daemon in any process that takes samples from it (see
`creel.loader.binding.wrapped_reads`). Inside creel's own loader it only delegates.
`creel.loader.reading.intercept` serves a plain `open` of the dataset.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

from torch.utils.data import IterableDataset

from creel.errors import ConfigError
from creel.loader.binding.proxy import Wrapped
from creel.loader.binding.wrapped_reads import WrappedReads

D = TypeVar("D")


def wrap(dataset: D, *, whole: bool = False) -> D:
    """Return a proxy to use in place of a map-style dataset, for any loader.

    The files that the dataset opens are cached from its second epoch on (docs/datasets.md). A
    dataset that is wrapped already is returned as it is.

    Args:
        dataset: the dataset, unchanged.
        whole: cache every file that a sample opens, however little of it the sample is seen to
            read. For samples that map files (`np.memmap`, `mmap`), or read them by `os.open`, and
            need most of each.

    Raises:
        ConfigError: an iterable dataset, an object without `__getitem__`, or `whole` for a dataset
            that is wrapped already.
    """
    if type(dataset) is Wrapped:
        if whole:
            raise ConfigError(
                "this dataset is wrapped already: give whole=True to the first creel.wrap"
            )
        return dataset
    if isinstance(dataset, IterableDataset):
        raise ConfigError("creel.wrap takes a map-style dataset, not an IterableDataset")
    if not hasattr(dataset, "__getitem__"):
        raise ConfigError(f"creel.wrap takes a dataset, not {dataset!r}")
    proxied: Any = dataset
    return cast(D, Wrapped(proxied, WrappedReads(proxied, whole=whole)))
