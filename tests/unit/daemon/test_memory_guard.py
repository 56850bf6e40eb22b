"""Memory that the cache gives back: allocator, core, arena, and the guard that decides."""

from __future__ import annotations

import logging
import os
from contextlib import closing

import numpy as np
import pytest
from core_rig import Rig, absent

from creel.cache.memory.arena import Arena
from creel.cache.memory.pools.allocator import SYSTEM_PAGE, Allocator
from creel.cache.memory.pools.free_ranges import NOWHERE
from creel.daemon.core.events import MemoryFree, MemoryShort, ReleaseMemory
from creel.daemon.service.memory.memory_guard import MemoryGuard
from creel.system import limits
from kit import lengths_of

PAGES = 16


@pytest.fixture
def rig() -> Rig:
    """A core whose memory is full: 16 objects of a page, two of which a reader needs."""
    rig = Rig(PAGES * SYSTEM_PAGE)
    rig.register("d", [SYSTEM_PAGE] * 30)
    rig.open(1, "d")
    rig.extend(1, 0, [[k, k + 1] for k in range(0, 16, 2)])
    for step in range(8):
        rig.settle()
        rig.progress(1, step)
    return rig


def resident(rig: Rig) -> int:
    return int(np.count_nonzero(rig.offset["d"] != NOWHERE))


def withheld(rig: Rig) -> int:
    return rig.core.withheld_nbytes // SYSTEM_PAGE


def test_memory_given_back_is_evicted_and_not_used_until_it_is_free_again(rig: Rig) -> None:
    assert resident(rig) == PAGES
    (release,) = [a for a in rig.feed(MemoryShort(5 * SYSTEM_PAGE)) if isinstance(a, ReleaseMemory)]
    assert sum(nbytes for _, nbytes in release.ranges) == 5 * SYSTEM_PAGE
    assert (resident(rig), withheld(rig)) == (PAGES - 5, 5)
    assert not absent(rig, "d", [14, 15]), "the reader's own step stays"
    rig.extend(1, 1, [[k, k + 1] for k in range(16, 30, 2)])
    for step in range(8, 15):
        rig.settle()
        rig.progress(1, step)
        assert rig.readers[1].ready >= step, "the rest of the memory serves the reader"
        assert resident(rig) <= PAGES - 5
    rig.feed(MemoryFree(2 * SYSTEM_PAGE))
    assert withheld(rig) == 3
    rig.feed(MemoryFree(1 << 40))
    assert withheld(rig) == 0


def test_pinned_objects_and_those_in_flight_are_not_given_back(rig: Rig) -> None:
    rig.extend(1, 1, [[16, 17]])
    rig.feed(MemoryShort(1 << 40))
    assert not absent(rig, "d", [14, 15])
    assert withheld(rig) <= PAGES - 2
    rig.settle()


def test_a_byte_is_withheld_once_and_comes_back_once() -> None:
    space = Allocator(10 * SYSTEM_PAGE + 100)
    pool = space.pool(lengths_of(np.array([1000, 2000])))
    places = pool.alloc(np.full(9, 3000))
    pool.free(places[::2], np.full(5, 3000))
    held = space.free_bytes
    ranges = space.withhold(1 << 40)
    assert all(at % SYSTEM_PAGE == 0 and n % SYSTEM_PAGE == 0 for at, n in ranges)
    assert space.free_bytes == held - space.withheld < held
    space.check()
    while space.withheld:
        space.restore(1)
        space.check()
    assert space.free_bytes == held


def test_a_released_page_takes_no_memory_until_it_is_written_again() -> None:
    def allocated() -> int:
        return os.fstat(arena.fd).st_blocks * 512

    with closing(Arena.create(8 * SYSTEM_PAGE)) as arena:
        arena.write(0, memoryview(b"x" * 8 * SYSTEM_PAGE))
        full, where = allocated(), (np.array([3 * SYSTEM_PAGE]), np.array([SYSTEM_PAGE]))
        arena.release([(2 * SYSTEM_PAGE, 4 * SYSTEM_PAGE)])
        assert allocated() == full - 4 * SYSTEM_PAGE
        assert not arena.written(*where)
        assert bytes(arena.view[SYSTEM_PAGE : 3 * SYSTEM_PAGE]).count(b"x") == SYSTEM_PAGE
        arena.write(3 * SYSTEM_PAGE, memoryview(b"y" * SYSTEM_PAGE))
        assert arena.written(*where)


def test_the_guard_gives_back_what_others_lack_and_takes_it_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "creel.memory")
    reserve = 2 * SYSTEM_PAGE
    free = iter((9 * reserve, reserve - SYSTEM_PAGE, reserve, 3 * reserve, 9 * reserve))

    def memory(*, active: bool) -> limits.MemoryLimits:
        assert active
        return limits.MemoryLimits(1 << 30, next(free))

    monkeypatch.setattr(limits, "memory", memory)
    guard = MemoryGuard(rig.core, lambda event: bool(rig.feed(event)), reserve)
    history = []
    for _ in range(5):
        guard.poll(guard.due)
        history.append(withheld(rig))
    assert history == [0, 3, 3, 3, 0]
    assert len(caplog.messages) == 2


def test_without_a_reserve_nobody_looks(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(limits, "memory")
    MemoryGuard(rig.core, lambda event: bool(rig.feed(event)), 0).poll(1e9)
