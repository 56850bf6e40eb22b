"""The disk store when its process is killed, and when the disk is full."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from creel.cache.disk.store import DiskStore
from kit import seeds

MIB = 1 << 20
OBJECTS = 400
BUDGET = 12 * MIB

pytestmark = pytest.mark.faults


def content(object_id: int, version: int, nbytes: int) -> bytes:
    return np.random.default_rng([object_id, version]).bytes(nbytes)


def sizes(version: int, ids: list[int]) -> list[int]:
    rng = np.random.default_rng(version)
    return [int(n) for n in rng.integers(1, 80_000, len(ids))]


def rounds(seed: int) -> Iterator[tuple[int, list[int], list[int]]]:
    """Yield (version, objects to drop, objects to store) endlessly: what a process does."""
    rng = np.random.default_rng(seed)
    version = 0
    while True:
        version += 1
        ids = rng.permutation(OBJECTS)
        yield version, ids[:24].tolist(), ids[24:48].tolist()


def churn(path: str, seed: int, pipe: Connection) -> None:
    """Store and drop objects until killed; report what was stored after each round."""
    store = DiskStore(path, BUDGET, keep_free=0)
    store.attach("data", OBJECTS)
    for version, gone, ids in rounds(seed):
        store.drop("data", np.array(gone))
        data = [
            [memoryview(content(i, version, n))]
            for i, n in zip(ids, sizes(version, ids), strict=True)
        ]
        stored, _ = store.write("data", np.array(ids), data, np.full(len(ids), version))
        pipe.send(stored.tolist())


def killed_after(path: Path, seed: int, many: int) -> dict[int, tuple[int, int]]:
    """Kill -9 a process after `many` rounds, amid another one; return what must be there."""
    mine, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.Process(target=churn, args=(str(path), seed, theirs), daemon=True)
    process.start()
    theirs.close()
    writes = [mine.recv() for _ in range(many)]
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    try:
        while mine.poll():
            writes.append(mine.recv())
    except EOFError:
        pass
    mine.close()
    held: dict[int, tuple[int, int]] = {}
    for (version, gone, ids), stored in zip(rounds(seed), writes, strict=False):
        for i in gone:
            held.pop(i, None)
        for i, nbytes, good in zip(ids, sizes(version, ids), stored, strict=True):
            held.pop(i, None)
            if good:
                held[i] = version, nbytes
    return held


@pytest.mark.timeout(300)
def test_killed_again_and_again_it_gives_no_wrong_byte_and_finds_nearly_all(tmp_path: Path) -> None:
    """Each time in the middle of writing: objects that the last round replaced may be gone.

    SEEDS=4 kills it 60 times.
    """
    rng = np.random.default_rng(50)
    expected = right_bytes = 0
    kills = seeds(15)
    for kill in kills:
        held = killed_after(tmp_path, kill, int(rng.integers(1, 12)))
        store = DiskStore(str(tmp_path), BUDGET, keep_free=0)
        ids, nbytes = store.attach("data", OBJECTS)
        store.check()
        right = set()
        for i, n in zip(ids.tolist(), nbytes.tolist(), strict=True):
            data = memoryview(bytearray(n))
            got = store.read("data", i, n, [data])
            if got is None:
                continue
            assert data == content(i, got[1], n), f"kill {kill}: object {i} has wrong bytes"
            if held.get(i) == (got[1], n):
                right.add(i)
        expected, right_bytes = expected + len(held), right_bytes + len(right)
        store.remove("data")
        store.close()
    assert expected > len(kills) * 100
    assert right_bytes >= 0.95 * expected


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with 8 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    at = tmp_path / "small"
    at.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "creel-test", str(at)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system may be mounted here")
    yield at
    subprocess.run(["umount", "--lazy", str(at)], check=True)


def test_a_full_disk_holds_what_it_can_and_stops_nobody(small_disk: Path) -> None:
    store = DiskStore(str(small_disk), 64 * MIB, keep_free=0)
    store.attach("data", 1000)
    data = [[memoryview(content(i, 1, 50_000))] for i in range(400)]
    stored, full = store.write("data", np.arange(400), data, np.ones(400, np.int64))
    assert full
    assert 100 <= np.count_nonzero(stored) <= 8 * MIB // 50_000
    assert store.nbytes <= 8 * MIB
    for i in range(400):
        out = memoryview(bytearray(50_000))
        got = store.read("data", i, 50_000, [out])
        assert (got is not None) == stored[i]
        assert got is None or out == data[i][0]
    store.check()
    store.close()


def test_a_disk_without_room_for_the_index_ends_the_tier_once(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = DiskStore(str(small_disk), 4 * MIB, keep_free=0)
    store.attach("data", 10)
    assert store.write("data", np.array([0]), [[memoryview(b"x")]], np.ones(1, np.int64))[0].all()
    status = os.statvfs(small_disk)
    with (small_disk / "others").open("wb") as others:
        others.write(bytes(status.f_bavail * status.f_frsize))
    for i in range(1, 10):
        stored, full = store.write(
            "data", np.array([i]), [[memoryview(b"x")]], np.ones(1, np.int64)
        )
        assert not stored.any()
        assert not full, "the tier is off, and the core is told so"
    assert store.nbytes == 0
    assert [r.message for r in caplog.records] == [
        "the disk tier is switched off: the disk cannot write ([Errno 28] No space left on device)"
    ]
    store.close()
