"""The store of decoded samples: bounded, never half a sample, never a version that was replaced."""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
import signal
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from numpy.typing import NDArray

from creel.loader.data.decoded.codec import UnkeptError
from creel.loader.data.decoded.stores import memory as memory_module
from creel.loader.data.decoded.stores import named_store
from creel.loader.data.decoded.stores import store as store_module
from creel.loader.data.decoded.stores.memory import END, Locked, new_memory
from creel.loader.data.decoded.stores.named_store import NamedFile, open_named
from creel.loader.data.decoded.stores.store import CLOSED_NS, DecodedStore
from creel.policies.memory import UNKNOWN, SampleCost, decoded_room, decoded_share
from creel.system import limits
from creel.system.limits import MemoryLimits
from kit import seeds, until

N = 64
NBYTES = 20_000


Make = Callable[..., DecodedStore]


def maker(kind: str, folder: Path) -> Make:
    keys = itertools.count()

    def on_disk(limit: int | None = None, samples: int = N) -> DecodedStore:
        about = {"name": "n", "dataset": "d", "samples": samples}
        return open_named(NamedFile(str(folder), f"{next(keys)}", 0), about, samples, limit)

    if kind == "on disk":
        return on_disk
    if kind == "alone":
        return lambda limit=None, samples=N: DecodedStore(new_memory(samples), samples, limit)
    memory_module._shared.reset_for_process()
    return lambda limit=None, samples=N: DecodedStore.of_process(samples, limit)


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep on writing to a disk that a busy machine makes slow."""
    monkeypatch.setattr(named_store, "_SLOW_NS", 1 << 60)


@pytest.fixture(params=["of process", "alone"])
def in_memory(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    return maker(request.param, tmp_path)


@pytest.fixture
def on_disk(tmp_path: Path) -> Make:
    return maker("on disk", tmp_path)


@pytest.fixture(params=["of process", "alone", "on disk"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    return maker(request.param, tmp_path)


def sample(number: int, version: int = 0, nbytes: int = NBYTES) -> NDArray[np.uint8]:
    return np.random.default_rng([number, version]).integers(0, 255, nbytes, np.uint8)


def taken(store: DecodedStore, number: int, version: int = 0) -> Any:
    entry = store.take(number, lambda of: of == version)
    return None if entry is None else entry.sample


def memory_of(store: DecodedStore) -> int:
    return os.fstat(store.own.fd).st_blocks * 512


def test_a_sample_is_returned_as_it_was_put_and_each_time_anew(make: Any) -> None:
    store = make()
    assert taken(store, 3) is None
    assert store.put(3, 0, sample(3)) > 0
    first = taken(store, 3)
    assert np.array_equal(first, sample(3))
    first[:] = 0
    assert np.array_equal(taken(store, 3), sample(3))
    assert (store.kept, store.complete) == (1, False)


@pytest.mark.parametrize("addresses", [True, False])
def test_a_sample_may_lie_anywhere(
    in_memory: Any, monkeypatch: pytest.MonkeyPatch, addresses: bool
) -> None:
    """Over the end of a mapping, beyond it, and where the process may map no more (`ulimit -v`)."""
    store = in_memory()

    def refused(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOMEM, "no addresses")

    if not addresses:
        monkeypatch.setattr(store_module, "mapped", refused)
    for number, gib in enumerate((0, 1, 5, (1 << 15) - 1)):
        end = (gib + 1 << 30) - (4096 if gib < 5 else 1 << 15)  # the memfd has 32 TiB
        os.pwrite(store.own.fd, struct.pack("<q", end), store.own.first + 8 * END)
        assert store.put(number, 0, sample(number)) > 0
        assert np.array_equal(taken(store, number), sample(number))


def test_bytes_that_are_no_sample_are_a_miss(make: Any) -> None:
    store = make()
    assert store.put(3, 0, sample(3)) > 0
    first = store.own.first + memory_module.index_nbytes(N)
    for at in range(64):
        kept = os.pread(store.own.fd, 1, first + at)
        os.pwrite(store.own.fd, bytes([kept[0] ^ 0x55]), first + at)
        sample_read = taken(store, 3)
        assert sample_read is None or isinstance(sample_read, np.ndarray)
        os.pwrite(store.own.fd, kept, first + at)
    assert np.array_equal(taken(store, 3), sample(3))


def test_the_more_samples_are_the_same_again_the_fewer_are_made_twice(make: Any) -> None:
    store = make()
    assert sum(store.to_make_twice() for _ in range(8192)) == 4 + 31


def test_a_sample_that_is_kept_takes_three_locks_and_seldom_a_look_at_the_memory(
    in_memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first epoch pays for each; where there is plenty of memory it is looked at less often."""
    monkeypatch.setattr(store_module, "_LOOK_NBYTES", 1 << 16)
    look, lock = Mock(return_value=MemoryLimits(1 << 40, 1 << 39)), Mock(side_effect=Locked)
    monkeypatch.setattr(limits, "memory", look)
    monkeypatch.setattr(store_module, "Locked", lock)
    store, samples = in_memory(None, 512), 512
    twice = 0
    for number in range(samples):
        twice += store.to_make_twice()
        assert store.put(number, 0, bytes(1000)) > 0
    assert (store.kept, twice) == (samples, 4 + 1)
    assert lock.call_count == 3 * samples
    assert look.call_count <= 1 + samples * 1100 // (store_module._LOOKS_APART << 16) + 1


def test_none_is_a_sample(make: Any) -> None:
    store = make()
    store.put(0, 0, None)
    entry = store.take(0, lambda _: True)
    assert entry is not None
    assert entry.sample is None


def test_another_version_replaces_a_sample_and_its_memory(make: Any) -> None:
    store = make()
    for version in range(50):
        store.put(3, version, sample(3, version))
        assert taken(store, 3, version - 1) is None
        assert np.array_equal(taken(store, 3, version), sample(3, version))
    assert store.kept == 1
    assert memory_of(store) < 12 * NBYTES  # less than 2 pages remain of each of 50


@pytest.mark.parametrize("nbytes", [100, 5000, NBYTES])
def test_with_room_for_a_part_it_keeps_what_came_first(make: Any, nbytes: int) -> None:
    empty = make().used_nbytes
    limit = empty + 10 * (nbytes + 256)
    store = make(limit)
    for number in range(N):
        store.put(number, 0, sample(number, nbytes=nbytes))
    kept = [number for number in range(N) if store.has(number)]
    assert kept == list(range(len(kept)))
    assert len(kept) >= 10
    assert memory_of(store) <= limit * 1.02 + 2 * 4096  # the words of the deleted one stay
    for number in kept:
        assert np.array_equal(taken(store, number), sample(number, nbytes=nbytes))


def test_a_sample_too_large_for_the_store_keeps_no_other_one_out(make: Any) -> None:
    store = make(1 << 20)
    assert store.put(0, 0, sample(0)) > 0
    assert store.put(1, 0, sample(1, nbytes=2 << 20)) == 0
    assert store.put(2, 0, sample(2)) > 0


def test_memory_that_the_system_refuses_is_no_error(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make()
    store.put(0, 0, sample(0))
    used = store.used_nbytes

    def refused(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", refused)
        assert store.put(1, 0, sample(1)) == 0
    assert not store.open  # for a while
    assert np.array_equal(taken(store, 0), sample(0))
    assert not store.has(1)
    assert store.used_nbytes <= used + 8192


def test_half_a_sample_is_never_read(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that ends halfway, as where the memory of a cgroup ends."""
    store = make()
    write = os.pwritev
    left = [1]

    def half(fd: int, buffers: Any, place: int) -> int:
        if not left:
            raise OSError(errno.ENOMEM, "no memory")
        left.pop()
        return write(fd, [bytes(buffers[-1])[: NBYTES // 2]], place)

    monkeypatch.setattr(os, "pwritev", half)
    assert store.put(1, 0, sample(1)) == 0
    assert taken(store, 1) is None


def test_where_memory_is_short_nothing_more_is_kept(
    in_memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = MemoryLimits(total=1 << 30, available=100 << 20)
    monkeypatch.setattr(limits, "memory", lambda **_: short)
    store = in_memory()
    assert store.put(0, 0, sample(0)) == 0
    assert not store.open


def test_the_store_gives_memory_back_when_others_need_it(
    in_memory: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = in_memory()
    for number in range(40):
        store.put(number, 0, sample(number))
    before = memory_of(store)
    total = 1 << 20
    now = [MemoryLimits(total, (1 << 16) - 10 * NBYTES + (1 << 16))]  # 10 samples too few
    monkeypatch.setattr(limits, "memory", lambda **_: now[0])
    taken(store, 0)
    assert before - memory_of(store) > 9 * NBYTES
    assert "other processes need memory" in caplog.text
    now[0] = MemoryLimits(total, total)
    kept = [number for number in range(40) if store.has(number)]
    assert kept == list(range(len(kept)))
    assert 25 <= len(kept) <= 30
    assert all(np.array_equal(taken(store, k), sample(k)) for k in kept)


def test_a_refused_store_has_and_keeps_nothing(make: Any) -> None:
    store = make()
    for number in range(10):
        store.put(number, 0, sample(number))
    assert store.refuse()
    assert not store.refuse()
    assert store.put(11, 0, sample(11)) == 0
    assert (store.kept, store.open) == (0, False)
    assert memory_of(store) < 5 * 4096


def test_samples_that_cannot_be_kept_raise(make: Any) -> None:
    store = make()
    with pytest.raises(UnkeptError):
        store.put(0, 0, object())
    assert store.first_failure()
    assert not store.first_failure()


def test_after_many_samples_that_cannot_be_kept_no_more_are_tried(make: Any) -> None:
    hopeless, mixed = make(), make()
    assert mixed.put(0, 0, sample(0)) > 0
    for _ in range(100):
        hopeless.first_failure()
        mixed.first_failure()
    assert not hopeless.open
    assert mixed.open


def work(store: DecodedStore, seed: int) -> None:
    """Read and write random samples in random versions; end if one is not whole."""
    rng = np.random.default_rng(seed)
    while True:
        number, version = int(rng.integers(N)), int(rng.integers(2))
        sample_read = taken(store, number, version)
        if sample_read is None:
            store.put(number, version, sample(number, version))
        elif not np.array_equal(sample_read, sample(number, version)):
            os._exit(7)
        if rng.random() < 0.01:
            store.give_back(3 * NBYTES)


@pytest.mark.parametrize("seed", seeds(3))
def test_processes_that_fill_and_read_a_store_see_whole_samples(make: Any, seed: int) -> None:
    """Three processes work, and one after the other is killed."""
    store = make(40 * NBYTES)
    context = multiprocessing.get_context("fork")
    seeded = [100 * seed + i for i in range(9)]
    workers = [context.Process(target=work, args=(store, i), daemon=True) for i in seeded]
    for worker in workers[:3]:
        worker.start()
    for i in range(3, len(workers)):
        read = store.kept
        until(lambda read=read: store.kept != read or store.kept > 20)  # type: ignore[misc]
        workers[i].start()
        assert workers[i - 3].exitcode is None
        workers[i - 3].kill()
    for worker in workers:
        worker.kill()
        worker.join()
        assert worker.exitcode == -signal.SIGKILL
    assert memory_of(store) <= 1.02 * store.limit + 9 * NBYTES  # what killed writers left
    for number in range(N):
        for version in range(2):
            sample_read = taken(store, number, version)
            assert sample_read is None or np.array_equal(sample_read, sample(number, version))


@pytest.mark.parametrize("seed", seeds(200))
def test_room_never_exceeds_the_limit_nor_touches_the_reserve(seed: int) -> None:
    rng = np.random.default_rng(seed)
    used, available, reserve, whole, encoded = (int(n) for n in rng.integers(0, 1 << 20, 5))
    limit = None if rng.random() < 0.5 else int(rng.integers(0, 1 << 20))
    pace = UNKNOWN if rng.random() < 0.5 else SampleCost(*rng.uniform(0, 2, 3).tolist())
    room = decoded_room(limit, used, available, reserve, whole=whole, encoded=encoded, pace=pace)
    assert room >= 0
    assert room == 0 or available - room >= 2 * reserve
    assert limit is None or room == 0 or used + room <= limit
    if limit is None and pace is UNKNOWN and whole > encoded and room and used + room < whole:
        others = (1 - (used + room) / whole) * encoded  # whose files storage need not give
        assert available - room >= 2 * reserve + others - 1


@pytest.mark.parametrize("seed", seeds(100))
def test_no_division_of_the_memory_is_faster_than_the_one_that_is_chosen(seed: int) -> None:
    """Against all divisions in hundredths, by the law that a sample takes its scarcest resource."""
    rng = np.random.default_rng(seed)
    room, whole, encoded = rng.uniform(0.1, 4, 3)
    work_s, storage = rng.uniform(0, 2, 2)
    again_s = work_s * rng.uniform()

    def takes_s(decoded: Any, files: Any) -> Any:
        from_storage = np.maximum(storage * (1 - decoded - files), 0)
        return np.maximum(work_s - decoded * again_s, from_storage)

    x, y = np.meshgrid(np.linspace(0, 1, 101), np.linspace(0, 1, 101))
    fits = (x * whole + y * encoded <= room) & (x + y <= 1)
    share = decoded_share(room, whole, encoded, SampleCost(work_s, again_s, storage))
    files = min((room - share * whole) / encoded, 1 - share)
    takes = takes_s(share, files)
    assert takes <= takes_s(x, y)[fits].min() * 1.04 + 1e-9
    alone = takes_s(0, min(room / encoded, 1)), takes_s(min(room / whole, 1), 0)
    assert takes <= min(alone) / 0.98


@pytest.mark.parametrize(("spread", "left"), [(0.25, 0.71), (0.5, 0.63), (1.0, 0.45)])
def test_where_a_quarter_finds_room_the_slowest_are_kept(
    make: Any, spread: float, left: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of the decoding; .75 if those were kept that come first."""
    n, nbytes = 2000, 960  # and a header
    monkeypatch.setattr(store_module, "_LOOK_NBYTES", 16 * 1024)
    ns = np.random.default_rng(3).lognormal(np.log(30_000), spread, n)
    store = make(n * 1024 // 4, n)
    for number in range(n):
        store.put(number, 0, np.zeros(nbytes, np.uint8), ns=int(ns[number]))
    kept = np.array([store.has(number) for number in range(n)])
    assert 0.22 * n < kept.sum() <= 0.25 * n
    assert ns[~kept].sum() <= left * ns.sum()


def test_a_part_of_the_dataset_is_kept_whole_from_the_second_epoch_on(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows in the first one that no others will be read."""
    n = 400
    monkeypatch.setattr(store_module, "_LOOK_NBYTES", 16 * 1024)
    store = make(n * 1024 // 2, n)
    ns = np.random.default_rng(3).lognormal(np.log(30_000), 1.0, n)
    for epoch in range(2):
        for number in range(n // 3):
            if not store.has(number):
                store.put(number, 0, np.zeros(960, np.uint8), ns=int(ns[number]))
        assert (store.kept == n // 3) == (epoch == 1)
        store.slowest.again()


def test_files_that_exceed_memory_take_none_of_it_where_cores_are_the_bottleneck(
    in_memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it was measured; where workers wait for storage, files come first."""
    monkeypatch.setattr(store_module, "_LOOK_NBYTES", NBYTES)

    def kept(waited_ns: int, worked_ns: int, encoded: int = NBYTES // 2, ns: int = 10**7) -> int:
        store: DecodedStore = in_memory()
        total = 1 << 20

        def free(**_: Any) -> MemoryLimits:
            return MemoryLimits(total, 20 * (NBYTES + 64) + total // 8 - store.used_nbytes)

        monkeypatch.setattr(limits, "memory", free)
        store.read(N, 0, waited_ns, worked_ns)
        for number in range(N):
            store.put(number, 0, sample(number), encoded, ns)
            store._words[CLOSED_NS] = 0  # a second later
        return store.kept

    assert 18 <= kept(0, N * 12 * 10**6) <= 20
    assert kept(N * 60 * 10**6, N * 12 * 10**6) < 3
    for waited in (0, N * 60 * 10**6):  # of samples of `creel.kept` no files are known
        assert 18 <= kept(waited, N * 12 * 10**6, encoded=0) <= 20
        assert 18 <= kept(waited, N * 12 * 10**6, encoded=0, ns=0) <= 20


def test_a_stopped_process_that_has_the_lock_is_waited_for_but_not_forever(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_module, "_LOCK_S", 0.01)
    store = make()
    store.put(0, 0, sample(0))
    held = multiprocessing.get_context("fork").Event()

    def hold() -> None:
        with Locked(store.own, threading.Lock()):
            held.set()
            signal.pause()

    other = multiprocessing.get_context("fork").Process(target=hold, daemon=True)
    other.start()
    try:
        assert held.wait(30)
        assert store.put(1, 0, sample(1)) == 0
        assert np.array_equal(taken(store, 0), sample(0))
    finally:
        other.kill()
        other.join()
    until(lambda: store.open)
    assert store.put(1, 0, sample(1)) > 0


def test_a_disk_that_is_slow_is_left_alone_for_a_while(
    on_disk: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = on_disk()
    monkeypatch.setattr(named_store, "_SLOW_NS", -1)
    assert store.put(1, 0, sample(1)) > 0
    assert not store.open
    assert np.array_equal(taken(store, 1), sample(1))


def test_another_process_goes_on_where_one_ended(on_disk: Make, tmp_path: Path) -> None:
    """Its samples, its bytes and its end are those of the index, whatever the words say."""
    first = on_disk()
    for number in range(10):
        first.put(number, 0, sample(number))
    used = first.used_nbytes
    os.pwrite(first.own.fd, bytes(4096), 0)  # a loss of power: the index is there, the words not
    del first
    file = NamedFile(str(tmp_path), "0", 0)
    store = open_named(file, {"name": "n", "dataset": "d", "samples": N}, N, None)
    assert (store.kept, store.used_nbytes) == (10, used)
    assert store.put(20, 0, sample(20)) > 0
    for number in (*range(10), 20):
        assert np.array_equal(taken(store, number), sample(number))
