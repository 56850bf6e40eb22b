"""Datasets in S3 and GCS, through a daemon and torch, with a store that fails, cuts and refuses.

The clients are real (pyarrow's), the servers are `testbed/s3_server.py` and `gcs_server.py`.
"""

from __future__ import annotations

import errno
import io
import os
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import creel
from creel.cache.storage import lister, lookup
from creel.cache.storage.buckets.find import bucket_of
from creel.cache.storage.manifest import Manifest
from creel.cache.storage.source import Source
from creel.cache.storage.stores import arrow_store, obstore_store
from creel.cache.storage.stores.access import options_of
from creel.cache.storage.stores.requests import Requests
from creel.cache.storage.stores.retry import retried
from creel.cache.storage.version import MISSING
from creel.errors import ConfigError, CreelError, NotFoundError, SourceError
from creel.loader.client.client import Client
from creel.settings import FetchSettings
from kit import forget_stores, until
from testbed.gcs_server import gcs
from testbed.s3_server import S3, SECRET

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

N, NBYTES = 130, 3000  # files: more than one page of a listing


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("s3") / "bucket"
    rng = np.random.default_rng(0)
    (root / "files/a b").mkdir(parents=True)
    for i in range(N):
        (root / f"files/{'a b/' if i % 2 else ''}{i:03}#%.bin").write_bytes(rng.bytes(NBYTES))
    (root / "tokens.bin").write_bytes(rng.integers(0, 1 << 15, 64 * 128, np.int64).tobytes())
    with tarfile.open(root / "shard.tar", "w") as tar:
        for i in range(40):
            for name, data in (("img", rng.bytes(500 + i)), ("cls", str(i).encode())):
                info = tarfile.TarInfo(f"{i:03}.{name}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return root


@pytest.fixture
def s3(bucket: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    forget_stores(monkeypatch)
    with S3(bucket.parent) as server:
        for name in [n for n in os.environ if n.startswith("AWS_")]:
            monkeypatch.delenv(name)
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        yield server


def files(store: str = "s3://bucket", **more: Any) -> Dataset[object]:
    return creel.FileDataset(f"{store}/files", **more)


def records(store: str = "s3://bucket", **more: Any) -> Dataset[object]:
    return creel.RecordDataset(f"{store}/tokens.bin", dtype=np.int64, shape=(128,), **more)


def tars(store: str = "s3://bucket", **more: Any) -> Dataset[object]:
    return creel.TarDataset(f"{store}/shard.tar", **more)


def twin(dataset: Dataset[object], bucket: Path) -> list[object]:
    """Return the same samples from the local folder."""
    kind = type(dataset)
    if kind is creel.RecordDataset:
        local = creel.RecordDataset(str(bucket / "tokens.bin"), dtype=np.int64, shape=(128,))
        return [local[i] for i in range(len(local))]
    where = "files" if kind is creel.FileDataset else "shard.tar"
    other = kind(str(bucket / where))  # type: ignore[call-arg]
    return [other[i] for i in range(len(other))]  # type: ignore[arg-type]


def same(a: object, b: object) -> bool:
    if isinstance(a, (torch.Tensor, np.ndarray)):
        return np.array_equal(np.asarray(a), np.asarray(b))
    return a == b


def first(batch: list[object]) -> object:
    return batch[0]


@pytest.mark.parametrize("make", [files, records, tars])
@pytest.mark.parametrize("loader", [DataLoader, creel.DataLoader])
def test_every_kind_of_dataset_reads_what_is_there(
    s3: S3, bucket: Path, daemon_name: str, make: Callable[[], Dataset[object]], loader: type
) -> None:
    dataset = make()
    wanted = twin(dataset, bucket)
    for status in (503, 500, 0):
        s3.fail(1, status)
    got = list(loader(dataset, batch_size=None, num_workers=1))
    assert len(got) == len(wanted)
    assert all(same(a, b) for a, b in zip(got, wanted, strict=True))
    assert s3.count["faults"] == 3
    if loader is creel.DataLoader:
        with Client.connect(daemon_name, "cli") as client:
            stats = client.ask("stats")
            assert stats["sources"][0]["reads"] > 0
            assert SECRET not in str(stats)
            client.ask("stop")


def test_a_second_epoch_asks_the_store_for_nothing(s3: S3, daemon_name: str) -> None:
    loader = creel.DataLoader(files(), batch_size=None, num_workers=1)
    for _ in loader:
        pass
    asked = s3.count["gets"] + s3.count["heads"]
    assert s3.count["gets"] == N
    assert len(list(loader)) == N
    assert s3.count["gets"] + s3.count["heads"] == asked
    with Client.connect(daemon_name, "cli") as client:
        client.ask("stop")


@pytest.mark.parametrize("client", ["obstore", "pyarrow"])
@pytest.mark.parametrize("most", [0, 1000])
def test_a_listing_has_every_key_once_however_many_folders_are_listed_at_once(
    s3: S3, bucket: Path, monkeypatch: pytest.MonkeyPatch, most: int, client: str
) -> None:
    """A page of it that fails is asked for again, not the others."""
    s3.page = 10
    rows: list[tuple[str, int]] = []
    if client == "obstore":
        pytest.importorskip("obstore")
        monkeypatch.setattr(lister, "_MAX_FOLDERS", most)
        monkeypatch.setattr(obstore_store, "PAGE", 10)
        monkeypatch.setattr(lister, "PAGE", 10)
        server = bucket_of("s3://bucket", options_of("s3", None))
        assert server is not None
        store = obstore_store.ObstoreStore(server, 5.0, Requests())
        s3.fail_lists = 3
        ask = partial(retried, FetchSettings(backoff_s=0.001), uri="s3://bucket")
        lister.list_below(store, "s3://bucket", ask, rows.extend)
        listed = lookup.in_walk_order(rows)
        requests = 1 + 1 + 13 + 3
    else:
        monkeypatch.setattr(lister, "find_spec", lambda _: None)
        monkeypatch.setattr(arrow_store, "_MAX_FOLDERS", most)
        listed = lookup.list_remote("s3://bucket", None, rows)
        requests = 1 + (13 if most else 14)
    assert listed.names == lookup.walk(str(bucket)).names
    assert listed.nbytes == [(bucket / name).stat().st_size for name in listed.names]
    assert sorted(name for name, _ in rows) == sorted(listed.names), "so far, for people"
    assert s3.count["lists"] == requests


def test_a_listing_is_taken_again_while_its_marker_says_that_nothing_changed(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else it is made anew: without a marker, with other keys, where the kept one is broken."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(s3, "root", tmp_path)
    s3.keys.add("AKIAOTHER")
    root = tmp_path / "bucket/data"
    root.mkdir(parents=True)
    files = ["a b/1#%.bin", "c.bin"]

    def write(*names: str) -> None:
        for name in names:
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).write_bytes(os.urandom(9))

    def listed(**more: Any) -> tuple[list[str], int]:
        before = s3.count["lists"]
        data = creel.FileDataset("s3://bucket/data", **more)
        assert data.manifest.lengths().tolist() == [9] * len(data)
        names = [unquote(path.removeprefix("s3://bucket/data/")) for path in data.paths]
        return names, s3.count["lists"] - before

    write(*files, "_SUCCESS")
    first = listed(marker="_SUCCESS")
    assert (first[0], first[1] > 0) == (files, True)
    heads = s3.count["heads"]
    assert listed(marker="s3://bucket/data/_SUCCESS") == (files, 0)
    assert listed(marker="_SUCCESS") == (files, 0)
    assert s3.count["heads"] - heads == 2
    write("d.bin")
    assert listed(marker="_SUCCESS") == (files, 0), "what the marker means"
    assert listed()[1] > 0
    write("_SUCCESS")
    assert listed(marker="_SUCCESS") == ([*files, "d.bin"], first[1])
    assert listed(marker="_SUCCESS") == ([*files, "d.bin"], 0)
    other = {"key": "AKIAOTHER", "secret": SECRET}
    assert listed(marker="_SUCCESS", storage_options=other)[1] == first[1]
    for path in (tmp_path / "cache/creel").iterdir():
        assert path.stat().st_mode & 0o077 == 0
        path.write_bytes(path.read_bytes()[:-100])
    assert listed(marker="_SUCCESS") == ([*files, "d.bin"], first[1])
    assert len(list((tmp_path / "cache/creel").iterdir())) == 2, "one for each who may list"
    assert not caplog.records
    assert listed(marker="_NONE")[1] == first[1]
    assert "s3://bucket/data/_NONE has no version" in caplog.text
    for paths, marker in (("s3://bucket/data", ""), (str(root), "x"), (["a"], "x")):
        with pytest.raises(ConfigError, match="marker"):
            creel.FileDataset(paths, marker=marker)


def test_a_burst_of_faults_is_outlasted(s3: S3, caplog: pytest.LogCaptureFixture) -> None:
    """It lasts longer than the three attempts of Arrow's own client; creel's begin after these."""
    source = Source(Manifest.of_files(["tokens.bin"], root="s3://bucket"))
    s3.fail(4, 503)
    assert source.read(0) == (s3.root / "bucket/tokens.bin").read_bytes()
    assert s3.count["faults"] == 4
    assert SECRET not in caplog.text


def versions_of(source: Source, n: int) -> tuple[list[int], list[int]]:
    """Return the versions of the first n files when asked for, and when read."""
    ids = np.arange(n)
    length = source.manifest.ranges(ids)[1]
    parts = [[memoryview(bytearray(k))] for k in length.tolist()]
    return source.versions(ids).tolist(), source.read_parts(ids, length, parts).version.tolist()


def rewritten(root: Path, source: Source) -> None:
    """Check that reads and questions agree on versions, and that a rewritten file has another."""
    before, read = versions_of(source, 3)
    assert read == before
    assert len(set(before)) == 3
    assert min(before) > 0
    (root / "1").write_bytes(b"other bytes")
    after, read = versions_of(source, 3)
    assert read == after
    assert [a == b for a, b in zip(after, before, strict=True)] == [True, False, True]
    (root / "1").unlink()
    assert source.versions(np.array([1, 0])).tolist() == [MISSING, before[0]]


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """A bucket of three files."""
    (tmp_path / "three").mkdir()
    for name in "012":
        (tmp_path / "three" / name).write_bytes(b"some bytes" + name.encode())
    return tmp_path / "three"


def test_s3_tells_versions_and_no_read_costs_a_request_more(
    s3: S3, three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "root", three.parent)
    source = Source(Manifest.of_files([*"012"], root="s3://three", lengths=[11] * 3))
    versions_of(source, 3)
    assert (s3.count["heads"], s3.count["gets"]) == (3, 3), "one when asked for, none when read"
    rewritten(three, source)


def test_two_servers_named_in_addresses_are_not_one(s3: S3, tmp_path: Path) -> None:
    """The address names the server (`endpoint_override`); bucket and key are the same."""
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket/tokens.bin").write_bytes(b"other bytes")
    with S3(tmp_path) as other:
        uris = [f"s3://bucket/tokens.bin?{server.query}" for server in (s3, other)]
        wanted = [(server.root / "bucket/tokens.bin").read_bytes() for server in (s3, other)]
        assert [creel.read(uri) for uri in uris] == wanted
        source = Source(Manifest.of_files(uris))
        assert [source.read(i) for i in range(2)] == wanted


def test_google_cloud_storage_tells_versions(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with gcs(three.parent) as env:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        root = "gs://anonymous@three"
        rewritten(three, Source(Manifest.of_files([*"012"], root=root, lengths=[11] * 3)))


@pytest.mark.parametrize("silent, deadline_s", [("all", 0.3), ("media", 1.0)])
def test_google_cloud_storage_that_never_answers_is_given_up_in_time(
    three: Path, monkeypatch: pytest.MonkeyPatch, silent: str, deadline_s: float
) -> None:
    """Its client waits endlessly for an answer, however short its retries are."""
    settings = FetchSettings(attempts=3, deadline_s=deadline_s, backoff_s=0.001)
    forget_stores(monkeypatch, settings)
    root = "gs://anonymous@three"
    with gcs(three.parent, silent) as env:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        source = Source(Manifest.of_files([*"012"], root=root, lengths=[11] * 3), settings)
        start, buffer = time.monotonic(), memoryview(bytearray(11))
        assert source.read_parts(np.array([0]), np.array([11]), [[buffer]]).nbytes.tolist() == [-1]
        with pytest.raises(SourceError) as failed:
            source.read(1)
        assert failed.value.errno == errno.ETIMEDOUT
        with pytest.raises(SourceError, match="no answer"):
            lookup.read_all(f"{root}/2")
        versions = source.versions(np.arange(3))
        if silent == "all":
            assert versions.tolist() == [MISSING] * 3
            for ask in (lookup.nbytes_of, lookup.list_remote):
                with pytest.raises(SourceError, match="no answer"):
                    ask(f"{root}/0")
        assert time.monotonic() - start < 30
    until(lambda: not any(t.name == "creel-gs" for t in threading.enumerate()), event="all ended")


@pytest.mark.parametrize(
    "address, says",
    [
        ("s3://nowhere/files", "there is no s3://nowhere/files: there is no such bucket"),
        ("s3://bucket/nothing", "there is no s3://bucket/nothing"),
    ],
)
def test_a_wrong_address_is_one_clear_sentence(s3: S3, address: str, says: str) -> None:
    with pytest.raises(NotFoundError) as raised:
        creel.FileDataset(address)
    assert str(raised.value) == says
    with pytest.raises(SourceError, match=rf"{address}'$") as failed:
        lookup.read_all(address)
    assert isinstance(failed.value, FileNotFoundError)
    assert s3.count["gets"] == 0


def test_wrong_credentials_are_one_clear_sentence_without_them(
    s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAWRONG")
    account = f"access key AKIAWRONG at {s3.env['AWS_ENDPOINT_URL']}"
    wanted = f"s3://bucket/files: access denied: check the credentials ({account})"
    with pytest.raises(ConfigError) as raised:
        creel.FileDataset("s3://bucket/files")
    assert str(raised.value) == wanted
    for ask in (lookup.nbytes_of, lookup.read_all):
        with pytest.raises(CreelError, match="access denied") as failed:
            ask(f"s3://AKIAOTHER:{SECRET}@bucket/tokens.bin")
        assert SECRET not in str(failed.value)
    assert s3.count["gets"] == 0


@pytest.mark.parametrize("more", [{}, {"default_bucket_location": "EU"}], ids=["any", "pyarrow"])
@pytest.mark.parametrize("make", [files, records, tars])
def test_google_cloud_storage_is_read_as_s3_is(
    bucket: Path,
    daemon_name: str,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[..., Any],
    more: dict[str, str],
) -> None:
    """By obstore where it is installed, or by pyarrow's client, of which the second has an option.

    Both tell the same versions.
    """
    forget_stores(monkeypatch)
    with gcs(bucket.parent) as env:
        server = env["CLOUD_STORAGE_EMULATOR_ENDPOINT"]
        given = {"anon": True, "endpoint_url": server.partition("://")[2], "scheme": "http"}
        dataset = make("gs://bucket", storage_options=given | more)
        other = make("gs://bucket", storage_options=given)
        ask = np.arange(1)
        versions = [files._source().versions(ask).tolist() for files in (dataset, other)]
        assert versions[0] == versions[1]
        assert min(versions[0]) > 0
        wanted = twin(dataset, bucket)
        for loader in (DataLoader, creel.DataLoader):
            got = list(loader(dataset, batch_size=None, num_workers=1))
            assert len(got) == len(wanted)
            assert all(same(a, b) for a, b in zip(got, wanted, strict=True))
        with Client.connect(daemon_name, "cli") as client:
            assert client.ask("stats")["sources"][0]["reads"] > 0
            client.ask("stop")
        for address in ("gs://nowhere/files", "gs://bucket/nothing"):
            with pytest.raises(NotFoundError, match=f"there is no {address}"):
                creel.FileDataset(address, storage_options=given | more)
