"""What an object store is asked, how often, and what becomes of its faults, through obstore.

The client is the real one; `testbed/s3_server.py` counts and fails. `test_object_stores.py` has
what holds for any client.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

import creel
from creel.cache.storage import lookup, version
from creel.cache.storage.buckets import s3 as s3_bucket
from creel.cache.storage.manifest import Manifest
from creel.cache.storage.source import Source
from creel.cache.storage.stores import arrow_store, obstore_store, remote, retry
from creel.cache.storage.stores.access import StorageOptions, check_grants
from creel.cache.storage.stores.requests import Gate
from creel.errors import ConfigError, NotFoundError, SourceError
from creel.loader.client.client import Client
from creel.loader.data.files.chained import CreelFileSystem
from creel.settings import FetchSettings
from kit import forget_stores, seeds
from programs import Program
from testbed.fault_proxy import FAULTS, STALL, FaultyProxy
from testbed.s3_server import CUT, KEY, S3, SECRET, SHORT

pytest.importorskip("obstore")
pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

N, NBYTES = 48, 3000
NAMES = [f"files/{i:02}" for i in range(N)]
RECORDS = 64
#: An option that only pyarrow's client has, so that it reads.
BY_ARROW = {"background_writes": False}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("s3")
    rng = np.random.default_rng(0)
    (root / "bucket/files").mkdir(parents=True)
    for i in range(N):
        (root / f"bucket/files/{i:02}").write_bytes(rng.bytes(NBYTES))
    (root / "bucket/large").write_bytes(rng.bytes(1 << 20))
    np.arange(RECORDS * 50_000, dtype=np.int64).tofile(root / "bucket/records")
    with tarfile.open(root / "bucket/shard.tar", "w") as tar:
        for i in range(N):
            info = tarfile.TarInfo(f"{i:03}.bin")
            info.size = 300_000
            tar.addfile(info, io.BytesIO(rng.bytes(info.size)))
    return root


@pytest.fixture
def s3(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    forget_stores(monkeypatch, FetchSettings(backoff_s=0.001))
    with S3(root) as server:
        for name in [n for n in os.environ if n.startswith("AWS_")]:
            monkeypatch.delenv(name)
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        yield server


def files(**more: Any) -> Dataset[Any]:
    return creel.FileDataset([f"s3://bucket/{name}" for name in NAMES], **more)


def files_below() -> Dataset[Any]:
    return creel.FileDataset("s3://bucket/files")


def sized() -> Dataset[Any]:
    return files(nbytes=[NBYTES] * N)


def records(**more: Any) -> Dataset[Any]:
    return creel.RecordDataset("s3://bucket/records", dtype=np.int64, shape=(50_000,), **more)


def tars(**more: Any) -> Dataset[Any]:
    return creel.TarDataset("s3://bucket/shard.tar", **more)


@pytest.mark.parametrize(
    "make, loader, workers",
    [
        (files, DataLoader, 0),
        (files, creel.DataLoader, 1),
        (sized, creel.DataLoader, 1),
        (records, DataLoader, 0),
        (tars, creel.DataLoader, 1),
    ],
)
def test_an_object_costs_one_request(
    s3: S3, daemon_name: str, make: Callable[[], Any], loader: type, workers: int
) -> None:
    dataset = make()
    s3.count.clear()
    more = {"creel": {"loader.direct": "never"}} if workers else {}
    for _ in loader(dataset, None, sampler=far_apart(dataset), num_workers=workers, **more):
        pass
    assert (s3.count["gets"], s3.count["heads"]) == (len(dataset), 0)
    if loader is creel.DataLoader:
        with Client.connect(daemon_name, "cli") as client:
            (source,) = client.ask("stats")["sources"]
            assert source["requests"] == {"GET": len(dataset), "HEAD": 0, "LIST": 0}
            client.ask("stop")


def far_apart(dataset: Any) -> list[int]:
    """Return an order without neighbours near each other, which one request may read."""
    return [*range(0, len(dataset), 2), *range(1, len(dataset), 2)]


def test_all_that_a_process_reads_of_a_bucket_goes_through_one_client(
    s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients: list[object] = []

    class Counted(obstore_store.ObstoreStore):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            clients.append(self)

    monkeypatch.setattr(remote, "ObstoreStore", Counted)
    datasets = [files(), sized(), files_below()]
    first = [bytes(data[0].numpy()) for data in datasets]
    assert first == [creel.read("s3://bucket/files/00")] * 3
    assert len(clients) == 1
    files(storage_options={"key": KEY, "secret": "another"})[0]
    assert len(clients) == 2, "other keys"
    lookup.use(FetchSettings(deadline_s=9.0))
    creel.read("s3://bucket/files/00")
    assert len(clients) == 3, "other deadlines"
    assert s3.count["heads"] == 0


@pytest.mark.parametrize("read", [creel.read, lambda uri: creel.open(uri).read()])
def test_a_single_read_costs_one_request(s3: S3, read: Callable[[str], bytes]) -> None:
    assert read("s3://bucket/large") == (s3.root / "bucket/large").read_bytes()
    assert (s3.count["gets"], s3.count["heads"]) == (1, 0)


@pytest.mark.parametrize("make", [records, tars])
def test_without_obstore_the_size_of_a_file_is_asked_once(
    s3: S3, monkeypatch: pytest.MonkeyPatch, make: Callable[..., Dataset[Any]]
) -> None:
    """But now and then, as another object may lie there: then no other version is read."""
    monkeypatch.setattr(arrow_store, "_REOPEN_S", 1e9)
    dataset = make(storage_options=BY_ARROW)
    s3.count.clear()
    got = list(DataLoader(dataset, None))
    assert len(got) == s3.count["gets"] > 40
    assert s3.count["heads"] == 1
    monkeypatch.setattr(arrow_store, "_REOPEN_S", -1e9)
    assert len(list(DataLoader(dataset, None))) + 1 == s3.count["heads"]


def filled(source: Source, ids: NDArray[np.int64]) -> tuple[list[bytes | None], list[int]]:
    """Return the bytes of objects, None where they could not be read, and their versions."""
    length = source.manifest.ranges(ids)[1]
    buffers = [bytearray(n) for n in length.tolist()]
    read = source.read_parts(ids, length, [[memoryview(b)] for b in buffers])
    done = (read.nbytes >= 0).tolist()
    data = [bytes(b) if ok else None for b, ok in zip(buffers, done, strict=True)]
    return data, read.version.tolist()


def test_near_ranges_are_one_request_and_far_ones_are_not(s3: S3) -> None:
    whole = (s3.root / "bucket/large").read_bytes()
    offset = np.array([10, 500, 900_000])
    source = Source(
        Manifest.of_runs(["s3://bucket/large"] * 3, offset, *(np.array([k] * 3) for k in (100, 1)))
    )
    data, versions = filled(source, np.arange(3))
    assert data == [whole[at : at + 100] for at in offset.tolist()]
    assert s3.count["gets"] == 2
    assert len(set(versions)) == 1


@pytest.mark.parametrize("client", ["obstore", "pyarrow"])
@pytest.mark.parametrize("loader", [DataLoader, creel.DataLoader])
@pytest.mark.parametrize("make", [records, tars])
def test_no_sample_mixes_a_file_with_one_that_replaced_it(
    s3: S3,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    daemon_name: str,
    make: Callable[..., Any],
    loader: type,
    client: str,
) -> None:
    """Neither does an epoch: its samples are those of the file that the dataset was made of."""
    more: dict[str, Any] = {"storage_options": BY_ARROW} if client == "pyarrow" else {}
    more |= {"index": tmp_path / "index"} if make is tars else {}
    shutil.copytree(s3.root / "bucket", tmp_path / "bucket")
    monkeypatch.setattr(s3, "root", tmp_path)
    dataset = make(**more)
    wanted = [kept(dataset[i]) for i in range(10)]
    stamp = dataset.manifest.key
    for name in ("records", "shard.tar"):
        path = tmp_path / "bucket" / name
        path.write_bytes(path.read_bytes().replace(b"\x07", b"\x08"))
    arguments = {"creel": {"loader.direct": "never"}} if loader is creel.DataLoader else {}
    epoch = map(kept, loader(dataset, None, num_workers=1, **arguments))
    with pytest.raises(SourceError, match="was replaced since the dataset was made"):
        assert list(epoch) == wanted
    anew = make(**more)
    assert anew.manifest.key != stamp
    assert [kept(anew[i]) for i in range(10)] != wanted
    if loader is creel.DataLoader:
        with Client.connect(daemon_name, "cli") as connected:
            connected.ask("stop")


class Opened(Dataset[Any]):
    """Rows of a file that it opens by `creel::s3://...` and keeps open."""

    file: Any = None

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> Any:
        if self.file is None:
            fsspec = pytest.importorskip("fsspec")
            bucket = type("Bucket", (fsspec.AbstractFileSystem,), {"protocol": "s3"})()
            self.file = CreelFileSystem(fs=bucket).open("s3://bucket/records")
        self.file.seek(400_000 * i)
        return np.frombuffer(bytearray(self.file.read(100_000)), np.uint8)


def test_a_file_that_is_open_while_another_replaces_it_is_never_a_mixture(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, daemon_name: str
) -> None:
    shutil.copytree(s3.root / "bucket", tmp_path / "bucket")
    monkeypatch.setattr(s3, "root", tmp_path)
    path = tmp_path / "bucket/records"
    old, ours = list(map(kept, DataLoader(Opened(), None))), creel.wrap(Opened())
    never: dict[str, Any] = {"creel": {"loader.direct": "never"}}
    loader = creel.DataLoader(ours, None, **never)
    assert [list(map(kept, loader)) for _ in range(3)] == [old] * 3
    unwrapped = Opened()
    assert kept(unwrapped[0]) == old[0]
    path.write_bytes(path.read_bytes().replace(b"\x07", b"\x08"))
    new = list(map(kept, DataLoader(Opened(), None)))
    assert list(map(kept, loader)) == old  # in memory, as is all of its version
    with pytest.raises(SourceError, match="was replaced"):
        _ = unwrapped[39]
    again = creel.DataLoader(creel.wrap(Opened()), None, **never)
    assert [list(map(kept, again)) for _ in range(3)] == [new] * 3 != [old] * 3
    with Client.connect(daemon_name, "cli") as connected:
        connected.ask("stop")


def kept(sample: Any) -> bytes:
    data = sample["bin"] if isinstance(sample, dict) else sample
    return bytes(data.numpy().tobytes() if isinstance(data, torch.Tensor) else data)


#: How objects are read: of known lengths, of unknown ones, ranges of objects, and parts of one.
WAYS = {
    "files": lambda: Manifest.of_files(NAMES, root="s3://bucket", lengths=[NBYTES] * N),
    "unknown": lambda: Manifest.of_files(NAMES, root="s3://bucket"),
    "ranges": lambda: Manifest.of_runs(
        NAMES, *np.array([[0] * N, [NBYTES // 30] * N, [30] * N]), root="s3://bucket"
    ),
    "parts": lambda: Manifest.of_files(["large"], root="s3://bucket", lengths=[1 << 20]),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", seeds(1))
def test_no_fault_on_the_way_becomes_a_sample(
    s3: S3, monkeypatch: pytest.MonkeyPatch, way: str, seed: int
) -> None:
    """Thousands of them; SEEDS=4 makes it ten thousand.

    All are outlasted, but for an object that seems to have another length than was listed.
    """
    rng = np.random.default_rng(seed)
    # A checksum is that of a whole object.
    whole = way in {"files", "unknown"}
    faults = FAULTS if whole else tuple(f for f in FAULTS if f != "flipped")
    monkeypatch.setattr(obstore_store, "_LARGE_NBYTES", 1 << 18)
    monkeypatch.setattr(obstore_store, "_PART_NBYTES", 1 << 17)
    failed = 0
    with FaultyProxy(s3.port, rng, 0.4, faults) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        source = Source(WAYS[way](), FetchSettings(backoff_s=0.0, attempts=100))
        wanted = [wanted_of(s3, source, i) for i in range(len(source.manifest))]
        while proxy.count.total() < 700:
            some = rng.permutation(len(wanted))[:8]
            try:
                assert source.read(int(some[0])) == wanted[some[0]]
            except SourceError:
                failed += 1
            if way == "unknown":
                data = [whole and whole.data for whole in source.read_whole(some)]
            else:
                data = filled(source, some)[0]
            failed += data.count(None)
            assert all(d in (None, wanted[i]) for d, i in zip(data, some.tolist(), strict=True))
        assert set(proxy.count) == set(faults)
        assert failed <= (proxy.count["short"] if way in {"files", "parts"} else 0)


@pytest.mark.parametrize("make", [files, sized, tars])
def test_batches_are_those_of_a_store_without_faults(
    s3: S3, monkeypatch: pytest.MonkeyPatch, daemon_name: str, make: Callable[..., Any]
) -> None:
    dataset, rng = make(), np.random.default_rng(0)
    wanted = [kept(dataset[i]) for i in range(len(dataset))]
    faults = tuple(f for f in FAULTS if f not in {"short", "flipped"})
    with FaultyProxy(s3.port, rng, 0.2, faults) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        settings = {"loader.direct": "never", "fetch.backoff_s": 0.001}
        loader = creel.DataLoader(make(), None, num_workers=1, creel=settings)
        for _ in range(2):
            assert list(map(kept, loader)) == wanted
        assert proxy.count.total() > 3
    with Client.connect(daemon_name, "cli") as client:
        assert client.ask("stats")["sources"][0]["retries"] > 0
        client.ask("stop")


def test_a_connection_that_hangs_is_given_up_in_time_for_another(
    s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultyProxy(s3.port, np.random.default_rng(0), 1.0, (STALL,), most=1) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        source = Source(WAYS["unknown"](), FetchSettings(backoff_s=0.001, deadline_s=6.0))
        assert source.read(0) == wanted_of(s3, source, 0)
        assert proxy.count[STALL] == 1


def wanted_of(s3: S3, source: Source, i: int) -> bytes:
    uri, offset, length = source.manifest.location(i)
    data = (s3.root / uri.removeprefix("s3://")).read_bytes()
    return data if length < 0 else data[offset : offset + length]


@pytest.mark.parametrize("seed", seeds(3))
def test_no_fault_of_a_store_becomes_a_sample(s3: S3, seed: int) -> None:
    rng = np.random.default_rng(seed)
    patient = FetchSettings(backoff_s=0.0, attempts=100)
    source = Source(
        Manifest.of_files(
            [f"files/{i:02}" for i in range(N)], root="s3://bucket", lengths=[NBYTES] * N
        ),
        patient,
    )
    wanted = [(s3.root / f"bucket/files/{i:02}").read_bytes() for i in range(N)]
    for _ in range(5):
        for status in rng.choice([503, 500, 429, CUT, CUT, SHORT], 30).tolist():
            s3.fail(1, status)
        ids = rng.permutation(N)
        data, _ = filled(source, ids)
        assert all(d is None or d == wanted[i] for d, i in zip(data, ids.tolist(), strict=True))
        for i in ids.tolist():
            with suppress(SourceError):  # a shorter body that its headers agree with
                assert source.read(i) == wanted[i]
    assert s3.count["faults"] == 150


def test_a_broken_body_goes_on_at_the_byte_where_it_broke(s3: S3) -> None:
    source = Source(Manifest.of_files(["large"], root="s3://bucket", lengths=[1 << 20]))
    s3.fail(3, CUT)
    wanted = (s3.root / "bucket/large").read_bytes()
    assert source.read(0) == wanted
    assert (s3.count["gets"], s3.count["bytes"]) == (4, len(wanted))
    s3.fail(3, CUT)
    assert filled(source, np.array([0]))[0] == [wanted]
    assert (s3.count["gets"], s3.count["bytes"]) == (8, 2 * len(wanted))
    counts = source.counters.snapshot()
    assert (counts.retries, counts.requests.snapshot()["resumes"]) == (0, 6)


@pytest.mark.parametrize("large", [1 << 18, 1 << 30])
@pytest.mark.parametrize("heeds", [True, False])
@pytest.mark.parametrize("length", [-1, 1 << 20])
def test_an_object_replaced_in_the_middle_of_its_body_is_never_a_mixture(
    tmp_path: Path, s3: S3, *, length: int, heeds: bool, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(obstore_store, "_LARGE_NBYTES", large)
    monkeypatch.setattr(obstore_store, "_PART_NBYTES", 1 << 17)
    s3.heeds_if_match = heeds
    (tmp_path / "bucket").mkdir()
    path = tmp_path / "bucket/large"
    path.write_bytes(b"a" * (1 << 20))
    monkeypatch.setattr(s3, "root", tmp_path)
    monkeypatch.setattr(s3, "on_fault", lambda: path.write_bytes(b"b" * (1 << 20)))
    source = Source(Manifest.of_files(["large"], root="s3://bucket", lengths=[length]))
    s3.fail(1, CUT)
    if length < 0:
        assert source.read(0) == b"b" * (1 << 20)
    else:
        data, versions = filled(source, np.array([0]))
        assert data == [b"b" * (1 << 20)]
        assert versions == source.versions(np.array([0])).tolist()
        assert versions[0] > version.UNKNOWN


def test_a_large_object_is_read_in_parts(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(obstore_store, "_LARGE_NBYTES", 1 << 18)
    monkeypatch.setattr(obstore_store, "_PART_NBYTES", 300_000)
    for length in (1 << 20, (1 << 20) - 1):
        source = Source(Manifest.of_files(["large"], root="s3://bucket", lengths=[length]))
        wanted = (s3.root / "bucket/large").read_bytes()
        s3.fail(1, CUT)
        s3.fail(1, 503)
        data, _ = filled(source, np.array([0]))
        assert data == [wanted if length == len(wanted) else None]
    assert s3.count["gets"] == 4 + 2 + 1 + 2, (
        "parts and faults; one part shows that a size is wrong"
    )


def test_throttles_are_counted_and_outlasted(s3: S3) -> None:
    source = Source(
        Manifest.of_files(["large"], root="s3://bucket"), FetchSettings(backoff_s=0.001)
    )
    s3.fail(4, 503)
    s3.fail(1, 400, "RequestTimeout")
    assert source.read(0) == (s3.root / "bucket/large").read_bytes()
    counts = source.counters.snapshot()
    assert (counts.requests.snapshot()["throttles"], counts.retries) == (4, 5)
    assert s3.count["gets"] == counts.requests.snapshot()["GET"] == 6


def test_a_store_that_asks_for_fewer_requests_gets_fewer_until_it_is_content() -> None:
    gate = Gate()
    flying = [gate.request() for _ in range(8)]
    numbers = [request.__enter__() for request in flying]
    for number in numbers:
        gate.slow_down(number)
    assert gate.limit == 4, "one cut for all that were sent before it"
    waiting = threading.Thread(target=lambda: gate.request().__enter__())
    waiting.start()
    for request in flying[:4]:
        request.__exit__(None, None, None)
    assert waiting.is_alive(), "as many as the limit are still in flight"
    flying[4].__exit__(None, None, None)
    waiting.join(10)
    assert not waiting.is_alive()
    for _ in range(40):
        gate.success()
    assert gate.limit is None


@pytest.mark.parametrize(
    "status, code, says, requests",
    [
        (403, "AccessDenied", "access denied: check the credentials", 1),
        (403, "RequestTimeTooSkewed", "access denied: the clock of this machine is wrong", 1),
        (403, "SignatureDoesNotMatch", "access denied: the secret key does not fit", 1),
        (400, "AuthorizationHeaderMalformed", "access denied: check the region", 1),
        (301, "PermanentRedirect", "access denied: the bucket is at another endpoint", 1),
        (400, "ExpiredToken", "access denied: the keys have expired", 2),
        (404, "NoSuchKey", "No such file", 1),
        (404, "NoSuchBucket", "there is no such bucket", 1),
    ],
)
def test_a_refusal_is_one_clear_sentence_at_once(
    s3: S3, status: int, code: str, says: str, requests: int
) -> None:
    s3.fail(9, status, code)
    with pytest.raises(SourceError, match=says) as failed:
        creel.read("s3://bucket/large")
    assert SECRET not in str(failed.value)
    assert s3.count["faults"] == requests


@pytest.mark.parametrize("ask", [files_below, records])
@pytest.mark.parametrize(
    "status, code, says",
    [
        (403, "AccessDenied", "access denied: check the credentials"),
        (403, "RequestTimeTooSkewed", "access denied: the clock|access denied: check the cred"),
        (400, "AuthorizationHeaderMalformed", "access denied: check the region"),
        (301, "PermanentRedirect", "access denied: the bucket is at another endpoint"),
        (400, "ExpiredToken", "the keys have expired"),
        (404, "NoSuchKey", "there is no s3://bucket"),
    ],
)
def test_a_refusal_is_one_clear_sentence_before_there_is_a_dataset(
    s3: S3, ask: Callable[[], Any], status: int, code: str, says: str
) -> None:
    """A size is asked for by the other client; an answer to HEAD has only the status."""
    s3.refusal = status, code
    with pytest.raises((ConfigError, NotFoundError), match=says) as failed:
        ask()
    assert "AWS Error" not in str(failed.value)
    assert s3.count["refused"] <= 4


@pytest.mark.parametrize("ask", [files_below, records])
@pytest.mark.parametrize(
    "endpoint, says",
    [
        ("http://127.0.0.1:9", "cannot connect to the endpoint"),
        ("http://no-such-host.invalid", "no server has the name of the endpoint"),
        ("https", "the endpoint does not speak https"),
    ],
)
def test_a_wrong_endpoint_is_one_clear_sentence_soon(
    s3: S3,
    monkeypatch: pytest.MonkeyPatch,
    ask: Callable[[], Any],
    endpoint: str,
    says: str,
) -> None:
    """A read waits longer for the same: the store has answered before, perhaps to a daemon."""
    ours = s3.env["AWS_ENDPOINT_URL"].replace("http", "https")
    server = ours if endpoint == "https" else endpoint
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    tries: list[object] = []
    monkeypatch.setattr(retry, "_warn", lambda *_: tries.append(1))
    with pytest.raises(SourceError, match=f"{says} .*{server}"):
        ask()
    assert len(tries) == (ask is records), "a listing's are in a process of its own"
    with pytest.raises(SourceError, match=f"{says} .*{server}"):
        creel.read("s3://bucket/large")
    assert len(tries) == (ask is records) + FetchSettings().attempts - 1


def test_expired_keys_are_renewed_once(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment has new ones by then."""
    s3.fail(1, 400, "ExpiredToken")
    s3.keys = {KEY, "AKIANEXT"}

    def renew() -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIANEXT")
        s3.keys = {"AKIANEXT"}

    monkeypatch.setattr(s3, "on_fault", renew)
    assert creel.read("s3://bucket/large") == (s3.root / "bucket/large").read_bytes()
    assert (s3.count["faults"], s3.count["refused"]) == (1, 0)


_FRESH = """
from torch.utils.data import DataLoader
import creel
dataset = creel.FileDataset("s3://bucket/files")
print(sum(map(len, DataLoader(dataset, None, num_workers=2))))
"""


def test_workers_of_a_process_that_read_nothing_ask_once_for_each_object(s3: S3) -> None:
    """It lists the files, before it forks them, by the other client."""
    said, errors = Program(_FRESH).communicate()
    assert (said.strip(), errors) == (str(N * NBYTES), "")
    assert (s3.count["gets"], s3.count["heads"], s3.count["lists"]) == (N, 0, 1)


def test_workers_forked_after_a_read_read_the_same(s3: S3) -> None:
    """obstore's threads do not survive the fork: without another client they would hang."""
    dataset = files()
    first = bytes(dataset[0].numpy())
    got = [bytes(x.numpy()) for x in DataLoader(dataset, None, num_workers=2)]
    assert got[0] == first
    assert got == [(s3.root / f"bucket/files/{i:02}").read_bytes() for i in range(N)]


#: What an address and the options say of the account.
ACCOUNTS: dict[str, tuple[str, dict[str, Any]]] = {
    "keys": ("", {"key": KEY, "secret": SECRET}),
    "session token": ("", {"key": KEY, "secret": SECRET, "token": "t"}),
    "in the address": (f"{KEY}:{SECRET.replace('-', '%2D')}@", {}),
    "anonymous": ("", {"anon": True}),
    "pyarrow's names": ("", {"access_key": KEY, "secret_key": SECRET, "session_token": "t"}),
    "client_kwargs": ("", {"key": KEY, "secret": SECRET, "client_kwargs": {"region_name": "eu-1"}}),
}


@pytest.mark.parametrize("account", ACCOUNTS)
@pytest.mark.parametrize("client", ["obstore", "pyarrow"])
def test_each_way_to_name_an_account_reads(
    s3: S3, monkeypatch: pytest.MonkeyPatch, account: str, client: str
) -> None:
    """And nothing else that the environment says is used: a daemon has that of another job."""
    prefix, given = ACCOUNTS[account]
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "of-another-job")
    given = given | {"endpoint_url": s3.env["AWS_ENDPOINT_URL"]}
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    s3.public = account == "anonymous"
    given |= BY_ARROW if client == "pyarrow" else {}
    data = creel.read(f"s3://{prefix}bucket/files/00", storage_options=given)
    assert data == (s3.root / "bucket/files/00").read_bytes()
    assert (s3.count["heads"], s3.count["refused"]) == (int(client == "pyarrow"), 0)


_KEYS = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
_IN_FILES = dict.fromkeys(_KEYS, "")
#: What the environment says: the variables, and whether obstore can do it. "~" is a home.
ENVIRONMENTS: dict[str, tuple[dict[str, str], bool]] = {
    "keys": (_KEYS, True),
    "session token": (_KEYS | {"AWS_SESSION_TOKEN": "t"}, True),
    "R2's region": (_KEYS | {"AWS_REGION": "auto"}, True),
    "an endpoint of S3 alone": (
        _KEYS | {"AWS_ENDPOINT_URL": "", "AWS_ENDPOINT_URL_S3": "s3"},
        True,
    ),
    "a profile": (_IN_FILES | {"HOME": "~", "AWS_PROFILE": "reader"}, False),
    "the default profile": (_IN_FILES | {"HOME": "~"}, False),
    "another file": (_IN_FILES | {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials"}, False),
}


@pytest.mark.parametrize("way", ENVIRONMENTS)
def test_each_way_to_name_an_account_in_the_environment_reads(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """In this process, and in a daemon, which gets a grant."""
    variables, once = ENVIRONMENTS[way]
    (tmp_path / ".aws").mkdir()
    ours = f"aws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n"
    others = ours.replace(KEY, "of-another-profile") if "AWS_PROFILE" in variables else ours
    (tmp_path / ".aws/credentials").write_text(f"[default]\n{others}\n[reader]\n{ours}")
    for name, value in variables.items():
        server = s3.env["AWS_ENDPOINT_URL"] if value == "s3" else value
        monkeypatch.setenv(name, server.replace("~", str(tmp_path)))
    wanted = (s3.root / "bucket/files/00").read_bytes()
    assert creel.read("s3://bucket/files/00") == wanted
    assert (s3.count["heads"], s3.count["refused"]) == (int(not once), 0)
    manifest = Manifest.of_files(["files/00"], root="s3://bucket").reached(StorageOptions())
    grants = manifest.grants()
    check_grants(grants, 1)
    assert Source(manifest, grants=grants).read(0) == wanted


class Role(BaseHTTPRequestHandler):
    """Gives the keys of a role, to a container or to a machine of EC2."""

    asked: ClassVar[list[str]] = []

    def log_message(self, *_: object) -> None:
        pass

    def do_PUT(self) -> None:
        self.answer(b"token")

    def do_GET(self) -> None:
        if self.path.endswith("credentials/"):
            self.answer(b"reader")
            return
        keys = {"AccessKeyId": KEY, "SecretAccessKey": SECRET, "Token": "t", "Code": "Success"}
        times = {"Expiration": "2099-01-01T00:00:00Z", "LastUpdated": "2026-01-01T00:00:00Z"}
        self.asked.append(self.path)
        given = [self.headers.get(n) for n in ("Authorization", "X-aws-ec2-metadata-token")]
        allowed = given in (["pass", None], [None, "token"])
        self.answer(json.dumps(keys | times | {"Type": "AWS-HMAC"}).encode() if allowed else b"")

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.mark.parametrize("place", ["container", "machine"])
def test_a_role_reads(s3: S3, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    (s3.root / "token").write_text("pass")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_EC2_METADATA_DISABLED"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(s3.root))
    monkeypatch.setattr(Role, "asked", [])
    monkeypatch.setattr(s3_bucket, "_METADATA_S", 60.0)
    with ThreadingHTTPServer(("127.0.0.1", 0), Role) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        if place == "container":
            monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{url}/role")
            monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(s3.root / "token"))
        else:
            monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", url)
        try:
            for _ in range(3):
                data = creel.read("s3://bucket/files/00")
                assert data == (s3.root / "bucket/files/00").read_bytes()
        finally:
            server.shutdown()
            thread.join()
    assert len(Role.asked) == 1, "its keys are kept until they expire"
    assert (s3.count["gets"], s3.count["heads"], s3.count["refused"]) == (3, 0, 0)
