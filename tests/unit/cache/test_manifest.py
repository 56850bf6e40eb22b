"""Manifests against a list of (uri, offset, length), and against hostile bytes."""

from __future__ import annotations

import random
import subprocess
import sys
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest

from creel.cache.storage.manifest import MAX_OBJECTS, UNKNOWN, Manifest
from creel.errors import ConfigError, MalformedError
from kit import lengths_of, seeds

Location = tuple[str, int, int]


def some(rng: random.Random, rows: int | None = None) -> tuple[Manifest, list[Location]]:
    """Return a manifest of any shape, and its objects."""
    rows = rng.randrange(12) if rows is None else rows
    root = rng.choice(["", "/d", "s3://b/x/"])
    uris = ["".join(rng.choices("aé/𝄞 ", k=rng.randrange(9))) for _ in range(rows)]
    files = rng.random() < 0.3
    offset, length, count, objects = [], [], [], []
    for uri in uris:
        unknown = rng.random() < 0.2
        offset.append(0 if unknown or files else rng.randrange(1000))
        length.append(UNKNOWN if unknown else rng.randrange(50))
        count.append(1 if unknown or files else rng.randrange(6))
        full = f"{root.rstrip('/')}/{uri}" if root else uri
        objects += [(full, offset[-1] + i * length[-1], length[-1]) for i in range(count[-1])]
    if files and rng.random() < 0.5:
        return Manifest.of_files(uris, root=root, lengths=length), objects
    numbers = [np.array(c, np.int64) for c in (offset, length, count)]
    return Manifest.of_runs(uris, *numbers, root=root), objects


def objects(manifest: Manifest) -> list[Location]:
    """Return the objects, from `rows` and `ranges` of all at once."""
    ids = np.arange(len(manifest))
    offset, length = manifest.ranges(ids)
    uris = [manifest.uri(int(row)) for row in manifest.rows(ids)]
    return list(zip(uris, offset.tolist(), length.tolist(), strict=True))


@pytest.mark.parametrize("seed", seeds(60))
def test_objects_are_what_the_rows_say(seed: int) -> None:
    rng = random.Random(seed)
    manifest, rows = some(rng)
    assert len(manifest) == len(rows)
    assert objects(manifest) == rows
    assert manifest.lengths().tolist() == [length for *_, length in rows]
    for i in rng.sample(range(len(rows)), min(3, len(rows))):
        assert manifest.location(i) == rows[i]
    ids = np.array(rng.choices(range(len(rows)), k=9 * bool(rows)), np.int32)
    offset, length = manifest.ranges(ids)
    assert [(o, n) for o, n in zip(offset, length, strict=True)] == [rows[i][1:] for i in ids]
    manifest.check()


@pytest.mark.parametrize("seed", seeds(40))
def test_parts_that_are_joined_keep_their_objects(seed: int) -> None:
    rng = random.Random(seed)
    parts = [some(rng) for _ in range(rng.randrange(1, 5))]
    whole = Manifest.concat([manifest for manifest, _ in parts])
    assert objects(whole) == [row for _, rows in parts for row in rows]
    assert objects(Manifest(whole.absolute())) == objects(whole)


def test_one_file_of_many_records_is_one_row() -> None:
    ones = np.ones(1, np.int64)
    manifest = Manifest.of_runs(["r.bin"], 16 * ones, 3072 * ones, 10**9 * ones, root="/d")
    assert len(manifest) == 10**9
    assert manifest.location(10**9 - 1) == ("/d/r.bin", 16 + 3072 * (10**9 - 1), 3072)
    assert len(manifest.to_arrow()) < 2000


# --- identity -------------------------------------------------------------------------------------


def cut(table: pa.Table, rng: random.Random) -> pa.Table:
    """Return the same rows in other buffers: pieces of a larger table, joined or not."""
    pad = table.slice(0, rng.randrange(len(table) + 1))
    larger = pa.concat_tables([pad, table, pad])
    larger = larger.combine_chunks() if rng.random() < 0.5 else larger
    middle = rng.randrange(len(table) + 1)
    pieces = [larger.slice(len(pad), middle), larger.slice(len(pad) + middle, len(table) - middle)]
    return pa.concat_tables(pieces)


@pytest.mark.parametrize("seed", seeds(40))
def test_the_key_is_of_the_content_alone(seed: int) -> None:
    rng = random.Random(seed)
    manifest, rows = some(rng)
    again = Manifest.from_arrow(manifest.to_arrow())
    assert again.key == manifest.key
    assert again.root == manifest.root
    assert objects(again) == rows
    for _ in range(3):
        other = Manifest(cut(manifest.table, rng), manifest.root)
        assert other.key == manifest.key
        assert Manifest.from_arrow(other.to_arrow()).key == manifest.key


@pytest.mark.parametrize("seed", seeds(40))
def test_any_difference_changes_the_key(seed: int) -> None:
    rng = random.Random(seed)
    manifest, _ = some(rng, rows=rng.randrange(1, 8))
    rows, root = manifest.table.to_pylist(), manifest.root
    i, j = rng.randrange(len(rows)), rng.randrange(len(rows))
    differing = [
        (rows, root + "x"),
        (rows[:i] + rows[i + 1 :], root),
        ([*rows, rows[i]], root),
        *(
            ([*rows[:i], {**rows[i], c: rows[i][c] + 1}, *rows[i + 1 :]], root)
            for c in ("offset", "length", "count")
        ),
        ([*rows[:i], {**rows[i], "uri": rows[i]["uri"] + "y"}, *rows[i + 1 :]], root),
    ]
    if i != j and rows[i] != rows[j]:
        swapped = list(rows)
        swapped[i], swapped[j] = rows[j], rows[i]
        differing.append((swapped, root))
    schema = manifest.table.schema
    keys = {Manifest(pa.Table.from_pylist(r, schema=schema), at).key for r, at in differing}
    assert len(keys) == len(differing)
    assert manifest.key not in keys


@pytest.mark.parametrize("seed", seeds(40))
def test_pins_are_those_of_the_parts_and_part_of_the_identity(seed: int) -> None:
    rng = random.Random(seed)
    parts, expected_pins = [], []
    for _ in range(rng.randrange(1, 5)):
        part, _ = some(rng, rows=rng.randrange(1, 6))
        rows = sorted(rng.sample(range(len(part.table)), rng.randrange(len(part.table) + 1)))
        pins = [(row, rng.choice([0, rng.randrange(1, 1 << 63)])) for row in rows]
        parts.append(part.pinned(pins))
        expected = [0] * len(part.table)
        for row, pin in pins:
            expected[row:] = [pin] * (len(part.table) - row)
        expected_pins += expected
    whole = Manifest.concat(parts)
    again = Manifest.from_arrow(whole.to_arrow())
    for manifest in (whole, again):
        assert [manifest.pin(row) for row in range(len(expected_pins))] == expected_pins
    assert again.key == whole.key
    assert (whole.pinned([]).key == whole.key) == (not any(expected_pins))


@pytest.mark.parametrize(
    "pins", [b"0 x", b"1", b"3 1 2 1", b"9 1", b"0 -1", b"0 9223372036854775808"]
)
def test_impossible_pins_are_malformed(pins: bytes) -> None:
    table = Manifest.of_files(["a"] * 4).table.replace_schema_metadata({b"creel.pins": pins})
    file = pa.BufferOutputStream()
    with pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(MalformedError):
        Manifest.from_arrow(file.getvalue())


def test_text_that_moves_between_fields_changes_the_key() -> None:
    same_text = [["ab", "c"], ["a", "bc"], ["", "abc"], ["abc", ""], ["abc"]]
    keys = {Manifest.of_files(uris).key for uris in same_text}
    keys |= {Manifest.of_files(["bc"], root="a").key, Manifest.of_files(["c"], root="ab").key}
    assert len(keys) == 7


# --- from others ----------------------------------------------------------------------------------


def mutated(data: bytes, rng: random.Random) -> bytes:
    raw = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(raw))
        chance = rng.random()
        if chance < 0.7:
            raw[at] = rng.choice([rng.randrange(256), 0, 255, raw[at] ^ 1 << rng.randrange(8)])
        elif chance < 0.8:
            del raw[at : at + rng.randrange(1, 9)]
        elif chance < 0.9:
            raw[at:at] = rng.randbytes(rng.randrange(1, 9))
        else:
            raw = raw[: max(at, 1)]
    return bytes(raw)


@pytest.mark.parametrize("block", range(10))
def test_mutated_bytes_are_malformed_or_a_manifest_that_holds(block: int) -> None:
    for seed in range(60 * block, 60 * block + 60):
        rng = random.Random(seed)
        data = mutated(some(rng, rows=rng.randrange(1, 8))[0].to_arrow(), rng)
        try:
            manifest = Manifest.from_arrow(data)
        except (MalformedError, ConfigError):
            continue
        manifest.check()
        assert len(manifest) <= MAX_OBJECTS
        assert len(manifest.key) == 32
        few = np.unique(np.linspace(0, max(len(manifest) - 1, 0), 9).astype(np.int64))
        for i in few[few < len(manifest)].tolist():
            uri, offset, length = manifest.location(i)
            assert isinstance(uri, str)
            assert offset >= 0
            assert length >= UNKNOWN


def table(**columns: pa.Array) -> pa.Table:
    """Return a table of one whole file, except for the given columns."""
    column = {"uri": pa.array(["a"], pa.large_string()), "offset": [0], "length": [5], "count": [1]}
    return pa.table(column | columns)


def ints(*values: int | None) -> pa.Array:
    return pa.array(values, pa.int64())


@pytest.mark.parametrize(
    "bad",
    [
        table(offset=ints(-1)),
        table(length=ints(-2)),
        table(count=ints(-1)),
        table(offset=ints(None)),
        table(uri=pa.array([None], pa.large_string())),
        table(uri=pa.array(["a"], pa.string())),
        table(length=pa.array([5], pa.int32())),
        table(length=ints(UNKNOWN), count=ints(2)),
        table(length=ints(UNKNOWN), offset=ints(7)),
        table(offset=ints(2**62)),
        table(length=ints(2**40), count=ints(2**30)),
        table(more=ints(1)),
        table().select(["uri", "offset", "length"]),
        table().replace_schema_metadata({b"creel.root": b"\xff"}),
    ],
    ids=range(14),
)
def test_impossible_tables_are_malformed(bad: pa.Table) -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, bad.schema) as writer:
        writer.write_table(bad)
    with pytest.raises(MalformedError):
        Manifest.from_arrow(sink.getvalue())


@pytest.mark.parametrize(
    "data", [b"", b"ARROW1", b"x" * 100, b"ARROW1\0\0" + bytes(50) + b"ARROW1"]
)
def test_bytes_that_are_no_arrow_file_are_malformed(data: bytes) -> None:
    with pytest.raises(MalformedError):
        Manifest.from_arrow(data)


def test_more_objects_than_ids_are_refused_with_advice() -> None:
    ones = np.ones(1, np.int64)
    Manifest.of_runs(["a"], 0 * ones, ones, MAX_OBJECTS * ones).check()
    with pytest.raises(ConfigError, match="split the dataset"):
        Manifest.of_runs(["a"], 0 * ones, ones, (MAX_OBJECTS + 1) * ones).check()


@pytest.mark.parametrize("seed", range(8))
def test_the_sum_of_the_lengths_is_that_of_all_objects(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(0, 40))
    count = rng.integers(0, [3, 70_000][seed % 2], rows)
    length = np.where(count == 1, rng.integers(-1, 5, rows), rng.integers(0, 5, rows))
    zeros = np.zeros(rows, np.int64)
    manifest = Manifest.of_runs([f"{i}" for i in range(rows)], zeros, length, count)
    assert manifest.lengths().tolist() == np.repeat(length, count).tolist()
    assert manifest.summed == lengths_of(manifest.lengths())


def test_no_pandas_is_imported_where_it_is_installed() -> None:
    """Arrow's conversions to and from numpy import it: 0.25 s in the daemon and in each rank."""
    code = """
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        assert name.partition(".")[0] != "pandas", "pandas is imported"

sys.meta_path.insert(0, Finder())
import numpy as np
from creel.cache.storage.manifest import Manifest
from creel.cache.storage.source import Source

numbers = np.arange(3)
runs = Manifest.of_runs(["a", "b", "\\xfc"], numbers, numbers, numbers, root="/d")
both = Manifest.concat([Manifest.of_files(["a", "b"], root="/e"), runs])
again = Manifest.from_arrow(both.to_arrow())
assert again.key == both.key and again.location(3)[0] == "/d/\\xfc"
Source(again).versions(np.arange(2))
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_columns_are_looked_at_where_they_lie() -> None:
    """A copy takes 57 bytes per file, in the trainer and again in the daemon."""
    files = 100_000
    manifest = Manifest.of_files([f"{i}.jpg" for i in range(files)])
    ids = np.arange(5)
    for manifest_read in manifest, Manifest.from_arrow(manifest.to_arrow()):
        assert len(manifest_read) == files  # sums are kept
        before = pa.total_allocated_bytes()
        tracemalloc.start()
        assert manifest_read.location(7) == ("7.jpg", 0, UNKNOWN)
        assert manifest_read.addresses(ids)[4] == "4.jpg"
        assert manifest_read.offsets.sum() + manifest_read.counts.sum() == files
        kept = tracemalloc.get_traced_memory()[0] + pa.total_allocated_bytes() - before
        tracemalloc.stop()
        assert kept < files


@pytest.mark.parametrize(
    "files, place",
    [
        (["/data/a/1", "/data/a/2", "/data/b/1"], "/data"),
        (["/data/tokens.bin"], "/data/tokens.bin"),
        (["/data/train1/a", "/data/train2/a"], "/data"),
        (["s3://b/x/1", "s3://b/x/2"], "s3://b/x"),
        (["/a/1", "s3://b/1"], ""),
        ([], ""),
        ([f"/d/{i:06d}" for i in range(100_000)], "/d"),
    ],
)
def test_a_place_is_the_folder_that_files_have_in_common(files: list[str], place: str) -> None:
    assert Manifest.of_files(files).place == place


def test_a_root_is_the_place() -> None:
    assert Manifest.of_files(["a", "b"], root="/data/").place == "/data"
    assert Manifest.of_files(["a", "b"], root="/").place == "/"
