"""What a remote address means, and who may read it, is the training process's to say.

The daemon of these tests has nothing of it in its environment, as a service. Each test's process is
a job: it sets its environment, or gives `storage_options`.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

import creel
from creel.loader.client import connections
from daemons import Running
from kit import forget_stores
from testbed.s3_server import KEY, S3, SECRET

pytestmark = [pytest.mark.system, pytest.mark.timeout(120), pytest.mark.usefixtures("service")]

N = 24


def fill(root: Path, seed: int) -> list[bytes]:
    """Write N files to the bucket of a store; return their bytes."""
    rng = np.random.default_rng(seed)
    (root / "bucket").mkdir(parents=True)
    contents = [rng.bytes(500) for _ in range(N)]
    for i, data in enumerate(contents):
        (root / f"bucket/{i:02}").write_bytes(data)
    return contents


ADDRESSES = [f"s3://bucket/{i:02}" for i in range(N)]


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clear what this process knows of stores."""
    forget_stores(monkeypatch)
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def service(daemon: Running) -> Running:
    """The daemon, which serves before the test sets any environment."""
    return daemon


@pytest.fixture
def red(tmp_path: Path) -> Iterator[S3]:
    fill(tmp_path / "red", 1)
    with S3(tmp_path / "red") as server:
        yield server


@pytest.fixture
def blue(tmp_path: Path) -> Iterator[S3]:
    fill(tmp_path / "blue", 2)
    with S3(tmp_path / "blue") as server:
        yield server


def enter(patch: pytest.MonkeyPatch, store: S3, key: str = KEY) -> None:
    """Set the environment of a job that reads a store."""
    for name, value in {**store.env, "AWS_ACCESS_KEY_ID": key}.items():
        patch.setenv(name, value)


def options(store: S3, key: str = KEY) -> dict[str, Any]:
    """Return the same as `storage_options`."""
    return {"key": key, "secret": SECRET, "endpoint_url": store.env["AWS_ENDPOINT_URL"]}


def epoch(dataset: Dataset[Any], **more: Any) -> list[bytes]:
    """Return the samples of an epoch that creel's loader reads."""
    loader = creel.DataLoader(dataset, batch_size=None, num_workers=1, **more)
    return [bytes(sample.numpy()) for sample in loader]


def held(store: S3) -> list[bytes]:
    return [(store.root / f"bucket/{i:02}").read_bytes() for i in range(N)]


def stats(service: Running) -> dict[str, Any]:
    with service.client("cli") as client:
        return client.ask("stats")


def test_two_jobs_with_other_endpoints_read_their_own_stores(
    red: S3, blue: S3, service: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    for store in (red, blue, red):
        enter(monkeypatch, store)
        for _ in range(2):
            assert epoch(creel.FileDataset(ADDRESSES)) == held(store)
    assert (red.count["gets"], blue.count["gets"]) == (N, N), "each object is read once"
    assert sum(source["reads"] for source in stats(service)["sources"]) == 2 * N


def test_two_stores_in_one_loader(red: S3, blue: S3) -> None:
    both: ConcatDataset[Any] = ConcatDataset(
        [creel.FileDataset(ADDRESSES, storage_options=options(store)) for store in (red, blue)]
    )
    for _ in range(2):
        assert epoch(both) == held(red) + held(blue)
    assert (red.count["gets"], blue.count["gets"]) == (N, N)


def test_two_jobs_with_keys_of_their_own_are_cached_both(
    red: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    red.keys = {"AKIAONE", "AKIATWO"}
    monkeypatch.setattr("creel.cache.storage.stores.access._first_key", {})
    for key in ("AKIAONE", "AKIATWO"):
        given = options(red, key)
        for _ in range(3):
            assert epoch(creel.FileDataset(ADDRESSES, storage_options=given)) == held(red)
    assert red.count["gets"] == 2 * N, "what one may read says nothing of the other"
    assert red.count["refused"] == 0


def test_a_key_that_is_refused_gets_nothing_that_another_has_read(red: S3) -> None:
    assert epoch(creel.FileDataset(ADDRESSES, storage_options=options(red))) == held(red)
    stranger = creel.FileDataset(ADDRESSES, storage_options=options(red, "AKIASTRANGER"))
    with pytest.raises(OSError, match="AKIASTRANGER") as failed:
        epoch(stranger)
    assert SECRET not in str(failed.value)
    assert red.count["gets"] == N


@pytest.mark.parametrize("by", ["environment", "options"])
def test_renewed_keys_are_taken_when_an_epoch_begins(
    red: S3, service: Running, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    enter(monkeypatch, red)
    given = options(red) if by == "options" else None
    dataset = creel.FileDataset(ADDRESSES, storage_options=given)
    assert epoch(Subset(dataset, range(N // 2))) == held(red)[: N // 2]
    red.keys = {"AKIANEXT"}
    if by == "environment":
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIANEXT")
    else:
        dataset.storage_options = options(red, "AKIANEXT")
    for _ in range(2):
        assert epoch(dataset) == held(red)
    assert (red.count["gets"], red.count["refused"]) == (N, 0)
    assert len(stats(service)["sources"]) == 1, "it is the same dataset"
    assert all(row["direct"] == 0 for row in stats(service)["sessions"])


def test_a_loader_takes_renewed_keys_at_its_next_epoch(
    red: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter(monkeypatch, red)
    dataset = creel.FileDataset(ADDRESSES)
    sampler = torch.utils.data.SubsetRandomSampler(range(N // 2))
    loader = creel.DataLoader(dataset, None, sampler=sampler, num_workers=0)
    assert len(list(loader)) == N // 2
    red.keys = {"AKIANEXT"}
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIANEXT")
    sampler.indices = range(N)
    got = sorted(bytes(sample.numpy()) for sample in loader)
    assert got == sorted(held(red))
    assert red.count["refused"] == 0


def test_options_that_only_a_library_understands_must_be_the_same_in_the_daemon(
    red: S3,
    service: Running,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A profile names the keys. The daemon has none: the process reads by itself, and says so."""
    (tmp_path / "keys").write_text(
        f"[mine]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "keys"))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    monkeypatch.setenv("AWS_ENDPOINT_URL", red.env["AWS_ENDPOINT_URL"])
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for _ in range(3):
        assert epoch(creel.FileDataset(ADDRESSES)) == held(red)
    assert red.count["gets"] == 3 * N
    said = [r.getMessage() for r in caplog.records if "directly" in r.getMessage()]
    assert len(said) == 1
    assert "AWS_PROFILE" in said[0]
    assert "daemon.name" in said[0]
    with Running(f"{service.name}-own") as own:  # a daemon with the same environment reads
        settings = {"daemon.name": own.name}
        red.count.clear()
        for _ in range(2):
            assert epoch(creel.FileDataset(ADDRESSES), creel=settings) == held(red)
        assert red.count["gets"] == N
        connections.disconnect(own.name)


def test_no_secret_is_shown(red: S3, service: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    dataset = creel.FileDataset(ADDRESSES, storage_options=options(red))
    epoch(dataset)
    red.keys = set()
    refused = creel.FileDataset(ADDRESSES, storage_options=options(red, "AKIAGONE"))
    with pytest.raises(OSError, match="AKIAGONE"):
        epoch(refused)
    grants = refused.manifest.grants()
    shown = f"{stats(service)} {dataset.manifest} {refused.manifest.key} {grants} {caplog.text}"
    assert SECRET not in shown + service.log()
    said = re.findall("access denied.*AKIAGONE", service.log())
    assert len(said) == 1, "a refusal that repeats is said once"


class _Declared(Dataset[torch.Tensor]):
    """A dataset that declares what it reads, with options of its own."""

    creel_uris = ADDRESSES

    def __init__(self, given: dict[str, Any], other: dict[str, Any]) -> None:
        self.creel_storage_options = given
        self.other = other

    def __len__(self) -> int:
        return N

    def objects(self, index: int) -> int:
        return index

    def __getitem__(self, index: int) -> torch.Tensor:
        own = creel.read(ADDRESSES[index], storage_options=self.creel_storage_options)
        with creel.open(ADDRESSES[index], storage_options=self.other) as file:
            return torch.frombuffer(bytearray(own + file.read()), dtype=torch.uint8)


def test_reads_with_other_options_are_not_served_from_the_cache(red: S3, blue: S3) -> None:
    dataset = _Declared(options(red), options(blue))
    wanted = [a + b for a, b in zip(held(red), held(blue), strict=True)]
    for _ in range(2):
        assert epoch(dataset) == wanted
    assert (red.count["gets"], blue.count["gets"]) == (N, 2 * N)


class Mine(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A file system that only this process has."""

    protocol = "mine"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.rpartition("://")[2].strip("/")


@pytest.mark.parametrize("protocol", ["memory", "mine"])
def test_protocols_of_one_process_are_read_by_it(
    service: Running, caplog: pytest.LogCaptureFixture, protocol: str
) -> None:
    fsspec.register_implementation("mine", Mine, clobber=True)
    system = fsspec.filesystem(protocol)
    contents = [bytes([i]) * 9 for i in range(N)]
    for i, data in enumerate(contents):
        system.pipe_file(f"/d/{i:02}", data)
    dataset = creel.FileDataset([f"{protocol}://d/{i:02}" for i in range(N)])
    for _ in range(2):
        assert epoch(dataset) == contents
    said = [r.getMessage() for r in caplog.records if f"{protocol}://" in r.getMessage()]
    assert len(said) == 1
    assert not stats(service)["sources"]


def test_headers_given_or_configured_reach_the_daemon(
    monkeypatch: pytest.MonkeyPatch, guarded: Any
) -> None:
    url, asked = guarded
    addresses = [f"{url}/{i:02}" for i in range(N)]
    wanted = [b"%02d" % i for i in range(N)]
    given = {"client_kwargs": {"headers": {"X-Pass": "open"}}}
    for _ in range(2):
        assert epoch(creel.FileDataset(addresses, storage_options=given)) == wanted
    assert asked["GET"] == N
    monkeypatch.setitem(fsspec.config.conf, "http", given)
    for _ in range(2):
        assert epoch(creel.FileDataset(addresses)) == wanted
    assert asked["refused"] == 0


@pytest.mark.parametrize("make", [creel.RecordDataset, creel.TarDataset, creel.ImageFolder])
def test_every_kind_of_dataset_is_made_with_its_options(
    red: S3, service: Running, make: Any, tmp_path: Path
) -> None:
    import io
    import tarfile

    from PIL import Image

    bucket = red.root / "bucket"
    for path in bucket.iterdir():
        path.unlink()
    dataset: Any
    if make is creel.RecordDataset:
        np.save(bucket / "a.npy", np.arange(40).reshape(8, 5))
        dataset = make("s3://bucket/a.npy", storage_options=options(red))
    elif make is creel.TarDataset:
        with tarfile.open(bucket / "a.tar", "w") as tar:
            for i in range(8):
                info = tarfile.TarInfo(f"{i}.bin")
                info.size = 5
                tar.addfile(info, io.BytesIO(bytes([i]) * 5))
        index = tmp_path / "index.arrow"
        dataset = make("s3://bucket/a.tar", storage_options=options(red), index=index)
    else:
        (bucket / "one").mkdir()
        for i in range(8):
            Image.new("RGB", (4, 4), (i, 0, 0)).save(bucket / f"one/{i}.png")
        dataset = make("s3://bucket", storage_options=options(red), transform=np.array)
    want = [repr(sample) for sample in DataLoader(dataset, batch_size=None)]
    assert len(want) == 8
    for _ in range(2):
        assert [repr(x) for x in creel.DataLoader(dataset, None, num_workers=1)] == want
    assert stats(service)["sources"][0]["reads"] > 0


def test_an_unknown_option_is_named(red: S3) -> None:
    with pytest.raises(creel.errors.ConfigError, match="no option 'colour'"):
        creel.FileDataset("s3://bucket", storage_options={**options(red), "colour": "red"})
    with pytest.raises(creel.errors.ConfigError, match="storage_options is a dict"):
        creel.FileDataset(ADDRESSES, storage_options=["key"])  # type: ignore[arg-type]


@pytest.fixture
def guarded() -> Iterator[tuple[str, Any]]:
    """A web server that answers only who sends a header: its URL, and what it was asked."""
    import threading
    from collections import Counter
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    asked: Counter[str] = Counter()

    class Guarded(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            allowed = self.headers.get("X-Pass") == "open"
            asked["refused" if not allowed else self.command] += 1
            body = self.path[1:].encode() if allowed else b""
            self.send_response(200 if allowed else 403)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", '"one"')
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Guarded) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
        server.shutdown()
        thread.join()


class _Reading(Dataset[torch.Tensor]):
    """A dataset of one's own that reads remote addresses, with options or without."""

    def __init__(self, given: dict[str, Any] | None) -> None:
        self.given = given

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> torch.Tensor:
        data = creel.read(ADDRESSES[index], storage_options=self.given)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@pytest.mark.parametrize("loader", [DataLoader, creel.DataLoader])
def test_a_wrapped_dataset_is_cached_with_its_options(red: S3, loader: type) -> None:
    wrapped = creel.wrap(_Reading(options(red)), storage_options=options(red))
    for _ in range(3):
        got = [bytes(x.numpy()) for x in loader(wrapped, batch_size=None, num_workers=0)]
        assert got == held(red)
    assert red.count["gets"] <= 2 * N, "once recorded, once for the cache"


def test_a_wrapped_dataset_that_reads_with_other_options_is_read_directly(red: S3) -> None:
    """What was recorded would be fetched with the options of `wrap`."""
    wrapped = creel.wrap(_Reading(options(red)))
    for _ in range(3):
        assert epoch(wrapped) == held(red)
    assert red.count["gets"] == 3 * N
    assert red.count["refused"] == 0
    with pytest.raises(creel.errors.ConfigError, match="give storage_options to that"):
        creel.wrap(wrapped, storage_options=options(red))
