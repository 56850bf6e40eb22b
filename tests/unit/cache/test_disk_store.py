"""The disk store: stored objects are found, also by the next store; no wrong byte is returned."""

from __future__ import annotations

import errno
import itertools
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from creel.cache.disk import folder
from creel.cache.disk.journal import ENTRY, intact
from creel.cache.disk.store import DiskStore

MIB = 1 << 20


def content(object_id: int, nbytes: int, version: int = 1) -> bytes:
    return np.random.default_rng([object_id, version]).bytes(nbytes)


def put(store: DiskStore, name: str, objects: dict[int, bytes], version: int = 1) -> list[bool]:
    ids, data = np.array(list(objects), np.int32), [[memoryview(d)] for d in objects.values()]
    stored, full = store.write(name, ids, data, np.full(len(ids), version))
    assert not (full and stored.all())
    return [bool(good) for good in stored]


def get(store: DiskStore, name: str, object_id: int, nbytes: int) -> tuple[bytes, int] | None:
    """Return the object, read into three parts."""
    data = memoryview(bytearray(nbytes))
    cuts = [0, nbytes // 3, nbytes // 2, nbytes]
    parts = [data[a:b] for a, b in itertools.pairwise(cuts)]
    entry = store.read(name, object_id, nbytes, parts)
    return None if entry is None else (bytes(data), entry[1])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    store = DiskStore(str(tmp_path), 4 * MIB, keep_free=0)
    yield store
    store.check()
    store.close()


def data_file(path: Path) -> Path:
    return path / f"creel-{os.getuid()}" / "objects"


SIZES = [0, 1, 447, 448, 449, 4096, 32_704, 33_000, 100_000, 2 * MIB + 5]


def test_objects_of_any_size_come_back_with_their_versions(store: DiskStore) -> None:
    store.attach("a", len(SIZES))
    for i, nbytes in enumerate(SIZES):
        assert put(store, "a", {i: content(i, nbytes)}, version=70 + i) == [True]
    for i, nbytes in enumerate(SIZES):
        assert get(store, "a", i, nbytes) == (content(i, nbytes), 70 + i)


def test_an_object_of_another_size_than_asked_for_is_not_there(store: DiskStore) -> None:
    store.attach("a", 2)
    put(store, "a", {0: content(0, 5000), 1: content(1, 5000)})
    assert get(store, "a", 0, 4999) is None
    assert get(store, "a", 1, 5001) is None
    assert get(store, "a", 0, 5000) is None  # and was forgotten
    assert get(store, "a", 1, 5000) is None


def test_the_next_store_finds_what_the_last_one_stored(tmp_path: Path) -> None:
    objects = {i: content(i, n) for i, n in enumerate(SIZES)}
    first = DiskStore(str(tmp_path), 4 * MIB, keep_free=0)
    first.attach("a", 20)
    first.attach("b", 20)
    put(first, "a", objects, version=3)
    put(first, "b", {9: b"nine"}, version=4)
    first.close()
    second = DiskStore(str(tmp_path), 4 * MIB, keep_free=0)
    ids, nbytes = second.attach("a", 20)
    assert dict(zip(ids.tolist(), nbytes.tolist(), strict=True)) == dict(enumerate(SIZES))
    assert all(get(second, "a", i, len(d)) == (d, 3) for i, d in objects.items())
    assert second.attach("c", 20)[0].tolist() == []
    second.attach("b", 20)
    assert get(second, "b", 9, 4) == (b"nine", 4)
    second.check()
    second.close()


def test_a_dataset_of_fewer_objects_finds_no_others(tmp_path: Path) -> None:
    first = DiskStore(str(tmp_path), 4 * MIB, keep_free=0)
    first.attach("a", 20)
    put(first, "a", {3: b"three", 15: b"fifteen"})
    first.close()
    second = DiskStore(str(tmp_path), 4 * MIB, keep_free=0)
    assert second.attach("a", 10)[0].tolist() == [3]
    second.check()
    second.close()


class Twin:
    """A store, and dictionaries with the same contents: (version, bytes) by dataset and object."""

    def __init__(self, path: Path, rng: np.random.Generator, *, same: bool) -> None:
        self._path, self._rng, self._same = path, rng, same
        self._held: dict[str, dict[int, tuple[int, int]]] = {"a": {}, "b": {}}
        self._version = 0
        self.store = DiskStore(str(path), MIB, keep_free=0)
        for name in self._held:
            self.store.attach(name, 100)

    def _some(self) -> tuple[str, list[int]]:
        ids = self._rng.permutation(100)[: int(self._rng.integers(1, 12))]
        return ("a", "b")[int(self._rng.integers(2))], ids.tolist()

    def write(self) -> None:
        name, ids = self._some()
        self._version += 1
        size = {i: 9000 if self._same else int(self._rng.integers(0, 60_000)) for i in ids}
        new = {i: content(i, n, self._version) for i, n in size.items()}
        for i, stored in zip(ids, put(self.store, name, new, self._version), strict=True):
            self._held[name].pop(i, None)
            if stored:
                self._held[name][i] = self._version, size[i]

    def drop(self) -> None:
        name, ids = self._some()
        self.store.drop(name, np.array(ids))
        for i in ids:
            self._held[name].pop(i, None)

    def attach_again(self) -> None:
        name, _ = self._some()
        length = np.zeros(100, np.int64)
        for i, (_, nbytes) in self._held[name].items():
            length[i] = nbytes
        self.store.detach(name, length)
        assert sorted(self.store.attach(name, 100)[0].tolist()) == sorted(self._held[name])

    def reopen(self) -> None:
        """Open the store again: objects that left before may be found again, unchanged."""
        self.store.close()
        self.store = DiskStore(str(self._path), MIB, keep_free=0)
        for name, held in self._held.items():
            ids = self.store.attach(name, 100)[0].tolist()
            assert set(held) <= set(ids)
            self.store.drop(name, np.array([i for i in ids if i not in held], np.int64))

    def compare(self) -> None:
        self.store.check()
        for name, held in self._held.items():
            for i in range(100):
                version, nbytes = held.get(i, (0, 100))
                expected = (content(i, nbytes, version), version) if version else None
                assert get(self.store, name, i, nbytes) == expected


@pytest.mark.parametrize("seed", range(12))
def test_any_sequence_of_operations_gives_right_bytes_and_loses_nothing(
    tmp_path: Path, seed: int
) -> None:
    """Compared with dictionaries; the store is mostly full."""
    rng = np.random.default_rng(seed)
    twin = Twin(tmp_path, rng, same=seed % 3 == 0)
    for _ in range(8):
        for operation in rng.choice(4, 8, p=[0.7, 0.15, 0.07, 0.08]).tolist():
            (twin.write, twin.drop, twin.attach_again, twin.reopen)[operation]()
        twin.compare()
    twin.store.close()


def test_a_full_store_keeps_what_it_has_and_says_no(store: DiskStore) -> None:
    store.attach("a", 1000)
    stored = put(store, "a", {i: content(i, 20_000) for i in range(300)})
    assert stored == [True] * sum(stored) + [False] * (300 - sum(stored))
    assert sum(stored) == 4 * MIB // 20_480
    store.drop("a", np.arange(0, 200, 2))
    assert put(store, "a", {500: content(500, 1_400_000)}) == [True]  # in many pieces
    assert get(store, "a", 500, 1_400_000) == (content(500, 1_400_000), 1)
    assert get(store, "a", 1, 20_000) == (content(1, 20_000), 1)


def test_datasets_that_nobody_uses_make_room_the_one_written_to_first_goes_first(
    tmp_path: Path,
) -> None:
    first = DiskStore(str(tmp_path), 4 * MIB, keep_free=0)
    for name in ("old", "young"):
        first.attach(name, 40)
        put(first, name, {i: content(i, 50_000) for i in range(39)})
    first.close()
    second = DiskStore(str(tmp_path), 4 * MIB, keep_free=0)
    second.attach("new", 40)
    assert all(put(second, "new", {i: content(i, 50_000) for i in range(30)}))
    assert len(second.attach("young", 40)[0]) == 39
    assert len(second.attach("old", 40)[0]) == 0
    second.check()
    second.close()


def test_a_smaller_budget_cuts_off_the_end_and_nothing_else(tmp_path: Path) -> None:
    first = DiskStore(str(tmp_path), 4 * MIB, keep_free=0)
    first.attach("a", 40)
    put(first, "a", {i: content(i, 100_000) for i in range(40)})
    first.close()
    second = DiskStore(str(tmp_path), 2 * MIB, keep_free=0)
    assert data_file(tmp_path).stat().st_size == 2 * MIB
    ids = second.attach("a", 40)[0].tolist()
    assert len(ids) == 2 * MIB // 102_400
    assert all(get(second, "a", i, 100_000) == (content(i, 100_000), 1) for i in ids)
    second.check()
    second.close()


@pytest.mark.parametrize("seed", range(20))
def test_a_flipped_bit_is_a_miss_and_the_others_are_right(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    store = DiskStore(str(tmp_path), MIB, keep_free=0)
    store.attach("a", 30)
    put(store, "a", {i: content(i, 20_000 + i) for i in range(30)})
    with data_file(tmp_path).open("r+b") as file:
        at = int(rng.integers(30 * 20_480))
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << int(rng.integers(8)))]))
    objects = [get(store, "a", i, 20_000 + i) for i in range(30)]
    right = [(content(i, 20_000 + i), 1) for i in range(30)]
    missed = [i for i in range(30) if objects[i] is None]
    assert len(missed) <= 1  # none if it is after an object's end
    assert all(objects[i] == right[i] for i in range(30) if i not in missed)
    store.check()
    store.close()


@pytest.mark.parametrize("share", [0, 0.3, 0.9])
def test_a_truncated_file_gives_what_is_left(tmp_path: Path, share: float) -> None:
    first = DiskStore(str(tmp_path), 4 * MIB, keep_free=0)
    first.attach("a", 100)
    put(first, "a", {i: content(i, 20_000) for i in range(100)})
    os.truncate(data_file(tmp_path), int(share * 100 * 20_480) // 4096 * 4096)
    assert sum(get(first, "a", i, 20_000) is not None for i in range(100)) == int(share * 100)
    first.close()
    second = DiskStore(str(tmp_path), 4 * MIB, keep_free=0)
    assert len(second.attach("a", 100)[0]) == int(share * 100)
    second.check()
    second.close()


@pytest.mark.parametrize("seed", range(10))
def test_a_damaged_index_loses_the_objects_it_names_and_no_byte(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    store = DiskStore(str(tmp_path), 4 * MIB, keep_free=0)
    store.attach("a", 100)
    for round_ in range(6):  # so that room is reused
        put(store, "a", {i: content(i, 30_000, round_) for i in rng.permutation(100)[:60].tolist()})
        store.drop("a", rng.permutation(100)[:30])
    store.close()
    index = data_file(tmp_path).with_name("index")
    damaged = bytearray(index.read_bytes())
    for at in rng.integers(len(damaged), size=2).tolist():
        damaged[at] ^= 255
    index.write_bytes(damaged[: len(damaged) - int(rng.integers(3000))])
    store = DiskStore(str(tmp_path), 4 * MIB, keep_free=0)
    for i in store.attach("a", 100)[0].tolist():
        entry = get(store, "a", i, 30_000)
        assert entry is None or entry[0] in {content(i, 30_000, v) for v in range(6)}
    store.check()
    store.close()


def test_the_index_stays_short(tmp_path: Path) -> None:
    """100 objects are written again and again; the rewritten index is right."""
    store = DiskStore(str(tmp_path), MIB, keep_free=0)
    store.attach("a", 100)
    put(store, "a", dict.fromkeys(range(50), b"first"))
    for _ in range(1100):
        put(store, "a", {77: b"again"})
    assert data_file(tmp_path).with_name("index").stat().st_size < 1100 * 4096
    store.close()
    store = DiskStore(str(tmp_path), MIB, keep_free=0)
    assert store.attach("a", 100)[0].tolist() == [*range(50), 77]
    store.close()


def test_a_forgotten_dataset_is_not_found_again(tmp_path: Path) -> None:
    store = DiskStore(str(tmp_path), MIB, keep_free=0)
    store.attach("a", 10)
    store.attach("b", 10)
    put(store, "a", {1: b"one"})
    put(store, "b", {2: b"two"})
    store.remove("a")
    store.check()
    store.close()
    store = DiskStore(str(tmp_path), MIB, keep_free=0)
    assert store.attach("a", 10)[0].tolist() == []
    assert store.attach("b", 10)[0].tolist() == [2]
    store.close()


def test_the_state_per_object_is_six_bytes(tmp_path: Path) -> None:
    """By the kernel's count of touched pages when all of a million objects are entered."""
    first = DiskStore(str(tmp_path), 16 * MIB, keep_free=0)
    first.attach("a", 1000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    first.attach("b", 1_000_000)
    put(first, "b", {0: b"x", 999_999: b"y"})
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < 7_000_000
    first.close()


def test_two_stores_never_share_a_folder(tmp_path: Path, store: DiskStore) -> None:
    with pytest.raises(BlockingIOError, match="another daemon"):
        DiskStore(str(tmp_path), MIB, keep_free=0)
    store.attach("a", 1)
    assert put(store, "a", {0: b"still"}) == [True]


def test_a_folder_that_is_about_to_be_left_is_waited_for(tmp_path: Path) -> None:
    first = DiskStore(str(tmp_path), MIB, keep_free=0)
    first.attach("a", 1)
    put(first, "a", {0: b"still"})
    first.leave()
    with mock.patch("creel.cache.disk.folder.time.sleep", side_effect=lambda _: first.close()):
        second = DiskStore(str(tmp_path), MIB, keep_free=0)
    assert second.attach("a", 1)[0].tolist() == [0]
    with pytest.raises(BlockingIOError, match="another daemon"):  # no store is closed any more
        DiskStore(str(tmp_path), MIB, keep_free=0)
    second.close()


def test_only_the_owner_may_read(tmp_path: Path, store: DiskStore) -> None:
    store.attach("a", 1)
    put(store, "a", {0: b"secret"})
    own = data_file(tmp_path).parent
    assert own.stat().st_mode & 0o777 == 0o700
    assert {p.name: p.stat().st_mode & 0o777 for p in own.iterdir()} == {
        "objects": 0o600,
        "index": 0o600,
    }


def test_a_folder_that_others_may_look_into_is_refused(tmp_path: Path) -> None:
    own = data_file(tmp_path).parent
    own.mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="0700"):
        DiskStore(str(tmp_path), MIB, keep_free=0)
    own.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    own.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="creel"):
        DiskStore(str(tmp_path), MIB, keep_free=0)


def test_a_missing_folder_is_no_disk(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        DiskStore(str(tmp_path / "not mounted"), MIB, keep_free=0)


def test_the_space_that_must_stay_free_limits_the_store(tmp_path: Path) -> None:
    stats = os.statvfs(tmp_path)
    store = DiskStore(str(tmp_path), 64 * MIB, stats.f_bavail * stats.f_frsize + (1 << 40))
    assert store.nbytes == 0
    store.attach("a", 1)
    assert put(store, "a", {0: b"no"}) == [False]
    store.close()


@pytest.mark.parametrize("action", ["read", "write", "grow"])
def test_an_io_error_ends_the_tier_with_one_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    action: str,
) -> None:
    store = DiskStore(str(tmp_path), MIB, keep_free=0)
    store.attach("a", 10)
    if action == "read":
        put(store, "a", dict.fromkeys(range(10), b"lost"))

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(folder.DataFile, action, broken)
    for i in range(10):
        if action == "read":
            assert get(store, "a", i, 4) is None
        assert put(store, "a", {i: b"lost"}) == [False]
    monkeypatch.undo()
    assert get(store, "a", 0, 4) is None
    assert store.nbytes == 0
    assert [r.message for r in caplog.records] == [
        f"the disk tier is switched off: the disk cannot {action} ([Errno 5] Input/output error)"
    ]
    store.close()


@pytest.mark.parametrize("seed", range(30))
def test_intact_entries_are_those_a_walk_through_the_journal_leaves(seed: int) -> None:
    """Against painting every unit: no record older than in a walk, no two in one unit."""
    rng = np.random.default_rng(seed)
    entries = np.zeros(60, ENTRY)
    entries["serial"] = np.arange(60)
    entries["object"] = rng.integers(25, size=60)
    entries["start"] = rng.integers(120, size=60)
    entries["units"] = entries["room"] = rng.integers(1, 4 if seed % 2 else 12, size=60)
    painted = np.full(140, -1)
    latest = {}
    for i, e in enumerate(entries):
        painted[e["start"] : e["start"] + e["units"]] = i
    for i, e in enumerate(entries):
        if (painted[e["start"] : e["start"] + e["units"]] == i).all():
            latest[int(e["object"])] = i
    entries_left = intact(entries, 140)
    assert set(latest.values()) <= set(entries_left["serial"].tolist()) or all(
        entries_left["serial"][entries_left["object"] == o][0] >= i for o, i in latest.items()
    )
    covered = np.concatenate([np.arange(e["start"], e["start"] + e["units"]) for e in entries_left])
    assert len(np.unique(covered)) == len(covered)
    assert len(np.unique(entries_left["object"])) == len(entries_left)
