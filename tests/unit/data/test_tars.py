"""TarDataset against tarfile, for every format tarfile can write."""

from __future__ import annotations

import gzip
import io
import itertools
import pickle
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import DataLoader

from creel.errors import ConfigError, SourceError
from creel.loader.data.datasets import TarDataset, tarindex

pytestmark = pytest.mark.timeout(120)
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def write(path: Path, content: dict[str, bytes], form: int = tarfile.USTAR_FORMAT) -> None:
    with tarfile.open(path, "w", format=form) as tar:
        for name, data in content.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def members(path: Path) -> Iterator[tarindex.TarMember]:
    return tarindex.members(str(path), path.stat().st_size)


def content(n: int, seed: int, *, prefix: str = "") -> dict[str, bytes]:
    rng = np.random.default_rng(seed)
    files = {}
    for i in range(n):
        files[f"{prefix}{i:04d}.jpg"] = rng.bytes(int(rng.integers(0, 3000)))
        files[f"{prefix}{i:04d}.seg.PNG"] = rng.bytes(int(rng.integers(0, 700)))
        files[f"{prefix}{i:04d}.cls"] = str(i).encode()
    return files


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS.keys())
@pytest.mark.parametrize(
    "name", ["a.x", "d/" * 40 + "a.x", "d" * 95 + ".x", "long/" * 60 + "b.x", "ü.x"]
)
def test_members_are_tarfiles(tmp_path: Path, form: int, name: str) -> None:
    data = {name: b"1" * 700, "other.txt": b"", "big.bin": bytes(10_000)}
    path = tmp_path / "a.tar"
    try:
        write(path, data, form)
    except ValueError:
        pytest.skip("ustar has no place for this name")
    with tarfile.open(path, "a", format=form) as tar:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        link = tarfile.TarInfo("link.x")
        link.type, link.linkname = tarfile.SYMTYPE, "n" * 150
        if form != tarfile.USTAR_FORMAT:
            tar.addfile(link)
        tar.addfile(tarfile.TarInfo("last.x"))
    with tarfile.open(path) as tar:
        expected = [(m.name, m.offset_data, m.size) for m in tar if m.isfile()]
    assert [tuple(m) for m in members(path)] == expected


def test_numbers_in_base_256_and_pax_sizes_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "x"}) as tar:
        info = tarfile.TarInfo("a.x")
        info.size, info.pax_headers = 5, {"size": "5", "path": "b.y"}
        tar.addfile(info, io.BytesIO(b"12345"))
    assert [(m.name, m.nbytes) for m in members(path)] == [("b.y", 5)]
    data = bytearray(tarfile.TarInfo("a.x").tobuf(tarfile.GNU_FORMAT))
    data[124:136] = b"\x80" + (3).to_bytes(11, "big")
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data)
    path.write_bytes(bytes(data) + b"abc".ljust(512, b"\0") + bytes(1024))
    assert [(m.name, m.nbytes) for m in members(path)] == [("a.x", 3)]


def test_samples_are_the_members_by_extension(tmp_path: Path) -> None:
    first, second = content(5, 0), content(4, 1, prefix="v1.2/x")
    write(tmp_path / "s-00.tar", first)
    write(tmp_path / "s-01.tar", {"__meta__.json": b"{}", "noext": b"", **second})
    dataset = TarDataset(tmp_path / "s-{00..01}.tar", decode={"cls": int})
    assert len(dataset) == 9
    assert dataset.keys[4:6] == ["0004", "v1.2/x0000"]
    for i in range(9):
        data, key = (first, f"{i:04d}") if i < 5 else (second, f"v1.2/x{i - 5:04d}")
        assert (
            dataset[i]
            == dataset[i - 9]
            == {
                "__key__": key,
                "jpg": data[f"{key}.jpg"],
                "seg.png": data[f"{key}.seg.PNG"],
                "cls": int(data[f"{key}.cls"]),
            }
        )
    ids, counts = dataset.objects(np.array([8, 0, -1]))
    assert ids.tolist() == [24, 25, 26, 0, 1, 2, 24, 25, 26]
    assert counts.tolist() == [3, 3, 3]
    uri, offset, nbytes = dataset.manifest.location(26)
    assert Path(uri).read_bytes()[offset : offset + nbytes] == b"3"
    with pytest.raises(IndexError):
        dataset[9]


def test_frames_of_one_clip_may_be_more_than_a_short_number_counts(tmp_path: Path) -> None:
    """ "clip.000001", "clip.000002", ... are one sample with an extension for each."""
    data = {f"clip.{i:05d}": str(i).encode() for i in range(33_000)}
    write(tmp_path / "a.tar", data)
    dataset = TarDataset(tmp_path / "a.tar")
    assert (len(dataset), dataset.object_count) == (1, 33_000)
    some = ["00000", "00255", "00256", "32767", "32768", "32999"]
    sample = TarDataset(tmp_path / "a.tar", extensions=some)[0]
    assert sample.pop("__key__") == "clip"
    assert sample == {extension: data[f"clip.{extension}"] for extension in some}


def test_only_some_extensions_may_be_read(tmp_path: Path) -> None:
    data = content(6, 0)
    del data["0002.jpg"]
    write(tmp_path / "a.tar", data)
    dataset = TarDataset([tmp_path / "a.tar"], extensions=["jpg"], transform=lambda s: s["__key__"])
    assert [dataset[i] for i in range(5)] == ["0000", "0001", "0003", "0004", "0005"]
    assert len(dataset.manifest) == 5
    assert TarDataset(tmp_path / "a.tar", extensions=["cls", "jpg"])[2] == {
        "__key__": "0002",
        "cls": b"2",
    }


def test_tars_in_torchs_loader(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", content(10, 0))
    dataset = TarDataset(tmp_path / "a.tar", decode={"cls": int})
    loader = DataLoader(dataset, 4, num_workers=2, multiprocessing_context="fork")
    for batch, plain in zip(loader, DataLoader(dataset, 4), strict=True):
        assert batch["cls"].tolist() == plain["cls"].tolist()
        assert batch["jpg"] == plain["jpg"]


@pytest.mark.parametrize("index", ["path", "beside", "user"])
def test_a_kept_index_is_used_until_the_shards_change(
    tmp_path: Path, index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write(tmp_path / "a.tar", content(3, 0))
    where = str(tmp_path / "kept/i.arrow") if index == "path" else index
    TarDataset(tmp_path / "a.tar", index=where)
    (kept,) = tmp_path.rglob("*.arrow")
    with monkeypatch.context() as broken:
        broken.setattr("creel.loader.data.datasets.tars.members", None)
        again = TarDataset(tmp_path / "a.tar", index=where)
    plain = TarDataset(tmp_path / "a.tar")
    assert [again[i] for i in range(3)] == [plain[i] for i in range(3)]
    write(tmp_path / "a.tar", content(4, 2))
    assert len(TarDataset(tmp_path / "a.tar", index=where)) == 4
    kept.write_bytes(b"damaged")
    assert len(TarDataset(tmp_path / "a.tar", index=where)) == 4
    assert len(list(tmp_path.rglob("*arrow*"))) == 1


@pytest.mark.parametrize("replace", [False, True])
def test_a_shard_that_was_written_since_gives_no_bytes_of_other_members(
    tmp_path: Path, replace: bool
) -> None:
    path, other = tmp_path / "a.tar", tmp_path / "b.tar"
    write(path, content(3, 1))
    write(other, content(3, 2))
    dataset = pickle.loads(pickle.dumps(TarDataset(path)))
    before = dataset[1]
    if replace:
        other.replace(path)
    else:
        path.write_bytes(other.read_bytes())
    with pytest.raises(SourceError, match=r"a.tar.*has changed|has changed.*a.tar"):
        dataset[1]
    assert TarDataset(path)[1] != before


def test_a_pickle_is_compact(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", {f"{i:06d}.x": b"1" for i in range(3000)})
    dataset = TarDataset(tmp_path / "a.tar")
    dataset.manifest  # noqa: B018 - built, and left out
    again = pickle.dumps(dataset)
    assert len(again) < 3000 * (6 + 8 + 4 + 2 + 8 + 8 + 8) + 4096
    assert pickle.loads(again)[7] == dataset[7]


def test_tars_that_cannot_be_read_say_why(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    write(path, content(3, 0))
    whole = path.read_bytes()
    bad = {
        "compressed with gzip": gzip.compress(whole),
        "compressed with zstd": b"\x28\xb5\x2f\xfd" + bytes(600),
        "not a tar file": b"nothing of the kind" * 100,
        "is not a tar": b"",
        "cut short": whole[:700],
        "damaged at byte 0": b"x" + whole[1:],
    }
    for words, data in bad.items():
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=words):
            TarDataset(path)
    write(path, {"a": b"", "b": b""})
    with pytest.raises(ConfigError, match="no samples"):
        TarDataset(path)
    with tarfile.open(path, "w") as tar:
        for _ in range(2):
            tar.addfile(tarfile.TarInfo("a.x"))
    with pytest.raises(ConfigError, match="twice in one sample"):
        TarDataset(path)
    with pytest.raises(ConfigError, match="there is no file"):
        TarDataset(tmp_path / "gone-{0..1}.tar")
    with pytest.raises(ConfigError, match="at least one shard"):
        TarDataset([])


@pytest.mark.parametrize("seed", range(60))
def test_damaged_headers_never_raise_anything_else(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    path = tmp_path / "a.tar"
    write(path, {"n" * 120 + ".x": b"1", "b.x": b"2" * 600}, list(FORMATS.values())[1 + seed % 2])
    data = bytearray(path.read_bytes())
    for at in rng.integers(0, len(data), 4):
        data[at] = rng.integers(0, 256)
    path.write_bytes(bytes(data[: rng.integers(0, len(data))] if seed % 3 else data))
    try:
        entries = list(members(path))
    except ConfigError:
        return
    end = path.stat().st_size
    assert all(0 <= m.offset <= m.offset + m.nbytes <= end for m in entries)


@pytest.mark.parametrize("record", [b"0  path=other.txt\n", b"18 size=-00001536\n"])
def test_a_pax_header_that_leads_backwards_ends(tmp_path: Path, record: bytes) -> None:
    """A length of 0 or less would be read again and again."""
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("a.txt")
        info.pax_headers = {"comment": "x" * (len(record) - len("18 comment=\n"))}
        tar.addfile(info)
    whole = path.read_bytes()
    end = whole.index(b"\0", 512)
    assert end - 512 == len(record)
    path.write_bytes(whole[:512] + record + whole[end:])
    with pytest.raises(ConfigError, match="is damaged: a "):
        list(itertools.islice(members(path), 100))
