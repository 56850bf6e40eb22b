"""Batches for Keras 3, with any backend, made by creel's loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
from torch.utils.data import DistributedSampler

import creel
from creel.integrations.arrays import arrays


class PyDataset(keras.utils.PyDataset):  # type: ignore[misc]  # an optional package
    """A `keras.utils.PyDataset`: `model.fit(PyDataset(data, 32, shuffle=True), shuffle=False)`.

    `shuffle=False` of `fit` leaves the order of batches to creel, which then reads ahead. Other
    orders are right, too, but each batch is made when Keras asks for it. An epoch has the order of
    torch's `DistributedSampler` of this seed.

    Args:
        data: map-style; samples are tensors, arrays or numbers, or tuples and dicts of these.
        batch_size, shuffle, drop_last: as of a loader.
        seed: of the shuffle.
        rank, world: this process, and how many there are (`jax.process_index()`).
        options: further arguments of `creel.DataLoader`. Workers need a
            `multiprocessing_context="forkserver"` where JAX runs.
    """

    def __init__(
        self,
        data: Any,
        batch_size: int = 32,
        *,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(workers=1, use_multiprocessing=False)
        self._sampler: DistributedSampler[Any] = DistributedSampler(
            data, world, rank, shuffle=shuffle, seed=seed
        )
        self._loader: creel.DataLoader[Any] = creel.DataLoader(
            data, batch_size, sampler=self._sampler, drop_last=drop_last, **options
        )
        self._size = batch_size
        self._taken: Iterator[Any] = iter(())
        self._next = 0

    def __len__(self) -> int:
        return len(self._loader)

    def __getitem__(self, index: int) -> Any:
        """Return a batch of this epoch."""
        if index != self._next:
            return self._new_batch(index)
        if index == 0:
            self._taken = iter(self._loader)
        self._next = index + 1
        return arrays(next(self._taken))

    def _new_batch(self, index: int) -> Any:
        """Return a batch that is asked for out of its order."""
        rows = list(self._sampler)[index * self._size : (index + 1) * self._size]
        return arrays(self._loader.collate_fn([self._loader.dataset[row] for row in rows]))

    def on_epoch_end(self) -> None:
        """Begin the next epoch, with another order.

        Keras takes one batch to learn its shape, and says that this was an epoch: it was none.
        """
        if self._next == len(self):
            next(self._taken, None)  # the loader's epoch ends where its iterator does
        if self._next != 1 or len(self) == 1:
            self._sampler.set_epoch(self._sampler.epoch + 1)
        self._next = 0
