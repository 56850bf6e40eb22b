"""A server that accepts and never answers: the client gets an error in time."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import creel
from creel.cache.storage import lookup
from creel.errors import CreelError, SourceError
from creel.loader.client.client import Client
from creel.loader.making.batch_times import StallWarning
from creel.settings import FetchSettings
from kit import forget_stores

pytest.importorskip("aiohttp")
pytestmark = [pytest.mark.faults, pytest.mark.system, pytest.mark.timeout(120)]


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of such a server."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every request of this process 0.3 s."""
    forget_stores(monkeypatch, FetchSettings(deadline_s=0.3, attempts=5, backoff_s=0.01))


QUESTIONS: dict[str, Callable[[str], object]] = {
    "read": lambda url: creel.read(f"{url}/x"),
    "open": lambda url: creel.open(f"{url}/x"),
    "size": lambda url: lookup.nbytes_of(f"{url}/x"),
    "listing": lookup.list_remote,
    "index": creel.ImageFolder,
    "folder": creel.FileDataset,
    "sizes": lambda url: creel.FileDataset([f"{url}/x", f"{url}/y"], nbytes=True),
    "sample": lambda url: creel.FileDataset([f"{url}/x"])[0],
}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("question", QUESTIONS)
def test_every_request_has_the_deadline(silent: str, question: str) -> None:
    with pytest.raises(CreelError) as raised:
        QUESTIONS[question](silent)
    assert silent.rpartition("/")[2] in str(raised.value)  # the host, by its port
    assert "there is no" not in str(raised.value)


def test_one_hung_object_delays_no_other_batch(
    silent: str, daemon_name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One worker makes all batches except those of the one that waits for its object."""
    forget_stores(monkeypatch)
    uris = [str(tmp_path / str(i)) for i in range(64)]
    for i, uri in enumerate(uris):
        Path(uri).write_bytes(bytes([i]))
    uris[1] = f"{silent}/never"
    dataset = creel.FileDataset(uris, nbytes=[1] * 64)
    settings = {"daemon.name": daemon_name, "fetch.deadline_s": 60, "loader.hung_s": 60}
    loader = creel.DataLoader(
        dataset, 4, num_workers=2, in_order=False, collate_fn=_bytes_of, creel=settings
    )
    batches = iter(loader)
    got = [next(batches) for _ in range(14)]
    queued = 2  # as in torch: another batch was given to that worker before it hung
    assert sorted(got) == [[*range(4 * i, 4 * i + 4)] for i in range(1, 16) if i != queued]
    with Client.connect(daemon_name, "cli") as client:
        row = client.ask("stats")["sessions"][0]
        assert row["failed"] == 0, "before anything was given up"
        client.ask("stop")
    del batches


def _bytes_of(samples: list[torch.Tensor]) -> list[int]:
    return [int(sample[0]) for sample in samples]


_S3 = """
import socket, sys
from creel.cache.storage.stores.access import options_of
from creel.cache.storage.stores.remote import open_store
from creel.cache.storage.stores.retry import transient
from creel.cache.storage.stores.store import StoredFile
try:
    store = open_store("s3://bucket/x", 0.3, options_of("s3", None))
    store.read(StoredFile("s3://bucket/x"), 0, -1)
except OSError as e:
    print(transient(e))
"""


def test_a_silent_s3_is_given_up(silent: str) -> None:
    """In a process of its own, as the client and its threads live as long as the process."""
    env = os.environ | {
        "AWS_ENDPOINT_URL": silent,
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    command = [sys.executable, "-c", _S3]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=110)
    assert done.stdout == "True\n"


@pytest.mark.parametrize("workers", [0, 1])
def test_a_wait_is_named_and_ends_in_an_error(
    silent: str, daemon_name: str, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    forget_stores(monkeypatch)
    settings = {
        "daemon.name": daemon_name,
        "fetch.deadline_s": 0.8,
        "loader.hung_s": 0.2,
    }
    dataset = creel.FileDataset([f"{silent}/{i}" for i in range(4)], nbytes=[5] * 4)
    loader = creel.DataLoader(dataset, batch_size=2, num_workers=workers, creel=settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(SourceError, match=silent):
            list(loader)
    stalls = [str(w.message) for w in caught if issubclass(w.category, StallWarning)]
    assert len(stalls) == 1
    assert f"waiting for the daemon to read {silent}/" in stalls[0] or (
        workers and "waiting for the daemon" in stalls[0]
    )
    with Client.connect(daemon_name, "cli") as client:
        client.ask("stop")
