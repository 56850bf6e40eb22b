"""KeptDataset: what the rest of creel knows of a dataset that `creel.kept` returned.

`loader/data/kept.py` says what is kept of it, and until when.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch.utils.data import Dataset

from creel.loader.data.decoded.keeping import Keeping

T_co = TypeVar("T_co", covariant=True)


class KeepingSamples(Keeping):
    """Where the samples of a `KeptDataset` are kept."""

    def sample(self, owner: KeptDataset[Any], index: Any) -> Any:
        """Return a sample: kept, or read from the dataset, and then kept."""
        raise NotImplementedError


class KeptDataset(Dataset[T_co]):
    """The samples of another dataset, kept in memory once they were made; see `kept`."""

    def __init__(self, dataset: Dataset[T_co], keeping: KeepingSamples) -> None:
        self.dataset = dataset
        self._keeping = keeping.of(self)

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        _ = self.keeping  # which belongs to the copy from now on

    @property
    def keeping(self) -> Keeping:
        """Where the samples are kept."""
        self._keeping = self._keeping.of(self)
        return self._keeping

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # torch's Dataset promises no length

    def __getitem__(self, index: int) -> T_co:
        sample: T_co = self._keeping.sample(self, index)
        return sample
