"""Leases: what serves the reads of a step, in which thread and for how long."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from binding_rig import Arena, Taken, bound, files, lent
from numpy.typing import NDArray
from torch.utils.data import (
    ConcatDataset,
    Subset,
)

from creel.loader.data.reading.lease import Lease
from creel.loader.data.reading.observer import Intercepting
from creel.loader.data.reading.this_thread import reader, this_thread
from testbed.same import same

pytestmark = pytest.mark.timeout(120)


def test_a_lease_serves_from_the_arena_and_ends(tmp_path: Path) -> None:
    a, b = files(tmp_path, "a", 4), files(tmp_path, "b", 3)
    tree: Any = ConcatDataset([a, Subset(b, [2, 0])])
    binding = bound(tree)
    plain = [tree[i] for i in range(6)]
    arena = Arena(binding.manifest, [0, 1, 6], flip=255)
    with lent(binding, arena) as lease:
        leased = [binding.dataset[i] for i in range(6)]
    for i in range(6):
        assert same(leased[i], ~plain[i] if i in {0, 1, 4} else plain[i])
    assert arena.taken == [0, 1, 6]
    assert (lease.direct_reads, lease.direct_nbytes) == (3, 60)
    assert lease.direct_ns > 0
    assert [same(tree[i], plain[i]) for i in range(6)] == [True] * 6
    leased[0].fill_(7)  # does not write to the arena
    assert a.read(0) == bytes(plain[0].numpy())


def test_only_the_steps_objects_are_taken_when_they_are_named(tmp_path: Path) -> None:
    binding = bound(files(tmp_path, "a", 4))
    arena = Arena(binding.manifest)
    with lent(binding, arena, np.array([1, 3], np.int32)):
        for i in range(4):
            binding.dataset[i]
    assert arena.taken == [1, 3]


def test_a_copy_made_while_the_step_was_revoked_is_thrown_away(tmp_path: Path) -> None:
    binding = bound(files(tmp_path, "a", 2))
    plain = binding.dataset[0]

    class Revoking(Arena):
        def pieces(self, ids: NDArray[np.integer]) -> Taken:
            self.revoked += 1
            return super().pieces(ids)

    arena = Revoking(binding.manifest, flip=255)
    with lent(binding, arena) as lease:
        assert same(binding.dataset[0], plain)
    assert arena.taken == [0]
    assert lease.direct_reads == 1


def test_a_copy_of_a_step_that_was_done_meanwhile_is_thrown_away(tmp_path: Path) -> None:
    """An iterator that begins again does not wait for its workers' reads for the old one.

    Their objects are not pinned, and the versions of their files were not checked.
    """
    binding = bound(files(tmp_path, "a", 2))
    plain = binding.dataset[0]
    arena = Arena(binding.manifest, flip=255)
    with lent(binding, arena) as lease:
        assert same(binding.dataset[0], ~plain)
        arena.done = 1
        assert same(binding.dataset[0], plain)
    assert lease.direct_reads == 1


def test_a_lease_belongs_to_its_thread_and_replaces_the_one_around_it(tmp_path: Path) -> None:
    a, b = files(tmp_path, "a", 2), files(tmp_path, "b", 2)
    outer, inner = bound(a), bound(b)
    first, second = Arena(outer.manifest), Arena(inner.manifest)
    with lent(outer, first):
        with lent(inner, second) as lease:
            a[0], b[0]
            other = threading.Thread(target=lambda: (a[1], b[1]))
            other.start()
            other.join()
        a[1], b[1]
    assert lease.direct_reads == 1
    assert first.taken == [1]
    assert second.taken == [0]


def test_a_lease_ends_with_an_error(tmp_path: Path) -> None:
    leaf = files(tmp_path, "a", 2)
    binding = bound(leaf)
    arena = Arena(binding.manifest)
    with pytest.raises(KeyError), lent(binding, arena):
        raise KeyError
    leaf[0]
    assert not arena.taken


def test_a_thread_of_a_library_reads_for_the_only_sample_that_is_being_read() -> None:
    def lease_of(prepare: Any = nullcontext) -> Any:
        """Return the lease of another thread."""
        leases: list[Any] = []

        def look() -> None:
            with prepare():
                leases.append(reader()[0])

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return leases[0]

    with Lease() as lease:
        assert lease_of() is None  # no code of a dataset runs
        with Intercepting():
            assert lease_of() is lease
            assert lease_of(Intercepting) is None  # that thread reads a sample of its own
            assert asyncio.run(asyncio.to_thread(lambda: this_thread.lease)) is lease
            with ThreadPoolExecutor(1) as other:
                begun = Intercepting()
                other.submit(begun.__enter__).result()
                assert lease_of() is None  # of two samples
                other.submit(begun.__exit__).result()
            assert lease_of() is lease
    assert lease_of() is None
