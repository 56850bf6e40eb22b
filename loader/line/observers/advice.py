"""Mistakes with `DistributedSampler` that cost a training its quality, each said once per process.

torch says nothing: a training with one order for all epochs, or with a part of the data, runs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from torch.utils.data import DistributedSampler, Sampler

from creel.loader.client.cluster.ranks import speaks
from creel.loader.data.user_code.protected import attribute

_log = logging.getLogger("creel.loader")
_said: set[str] = set()


class Advice:
    """What one loader's epochs say of its sampler."""

    def __init__(self) -> None:
        self._before: tuple[Sampler[object], int] | None = None  # of the epoch before

    def epoch_begins(self, index_sampler: object, *, after_a_whole_one: bool) -> None:
        """Look at the sampler that torch iterates in this epoch.

        Args:
            after_a_whole_one: whether all batches of the epoch before were read, and the training
                was not resumed since. Who looks at a few batches begins the same epoch anew.
        """
        dealing = list(_dealing(index_sampler))
        if len(dealing) > 1:
            _say(f"{' and '.join(dealing)} both deal samples to ranks: most are never read")
        sampler = _shuffled(index_sampler)
        now = None if sampler is None else (sampler, sampler.epoch)
        if now is not None and now == self._before and after_a_whole_one:
            _say(
                f"each epoch has the same order: DistributedSampler is at epoch {now[1]} again;"
                " call loader.set_epoch(epoch) before each"
            )
        self._before = now


def _say(text: str) -> None:
    """Warn once, on one rank: the others have the same samplers."""
    if text not in _said and speaks():
        _said.add(text)
        _log.warning(text)


def _shuffled(index_sampler: object) -> DistributedSampler[object] | None:
    """Return torch's own sampler whose order depends on its epoch; a subclass may count itself."""
    inner = attribute(index_sampler, "sampler")
    for sampler in (index_sampler, inner):
        if type(sampler) is DistributedSampler and sampler.shuffle:
            return sampler
    return None


def _dealing(sampler: object) -> Iterator[str]:
    """Yield the names of all samplers, the outer one first, that deal samples to several ranks.

    They are torch's DistributedSampler and its subclasses, and accelerate's BatchSamplerShard.
    """
    seen: set[int] = set()
    while sampler is not None and id(sampler) not in seen:
        seen.add(id(sampler))
        ranks = attribute(sampler, "num_processes")
        if isinstance(sampler, DistributedSampler):
            ranks = attribute(sampler, "num_replicas")  # a subclass may lack it
        if type(ranks) is int and ranks > 1:
            yield type(sampler).__name__
        sampler = _inner(sampler)


def _inner(sampler: object) -> object:
    """Return the sampler that a sampler draws from; None: it draws itself."""
    for name in ("batch_sampler", "sampler", "dataset"):
        inner = attribute(sampler, name)
        if isinstance(inner, Sampler):
            return inner
    return None
