"""Slow files that stay in the page cache, and whether creel reads there what an epoch maps."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler

import creel
from kit import until
from testbed.same import same
from testbed.slowfs import SlowFS


@contextmanager
def slow_pages(folder: Path, mountpoint: Path) -> Iterator[Any]:
    """Mount a folder whose files the kernel caches; each read takes a millisecond."""
    fs: Any = SlowFS(str(folder), str(mountpoint), page_cache=True, read_latency=1.0)  # type: ignore[no-untyped-call]
    with fs:
        yield fs


def shuffled(dataset: Any) -> Any:
    return RandomSampler(dataset, generator=torch.Generator().manual_seed(3))


def all_read() -> bool:
    """Whether no thread reads pages ahead: all are there, or the window is full."""
    return "creel-pages" not in {thread.name for thread in threading.enumerate()}


def check_read_ahead(fs: Any, ours: Any, theirs: Any, first: int = 1, **more: Any) -> None:
    """Compare a shuffled epoch with torch's, all of which is read while a batch is used.

    Args:
        ours: a dataset of files of `fs`.
        theirs: the same of files that are quick.
        first: the number of that batch, from 1 on.
    """
    batches = iter(creel.DataLoader(ours, sampler=shuffled(ours), **more))
    batches_read = [next(batches) for _ in range(first)]
    until(all_read)
    reads = fs.totals()["reads"]
    batches_read += batches
    assert fs.totals()["reads"] == reads
    assert same(batches_read, list(DataLoader(theirs, sampler=shuffled(theirs), **more)))
