"""A dataset without readers stays in memory for a while, then frees everything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from creel.cache.storage.manifest import Manifest
from creel.loader.client.client import Client
from creel.loader.client.session import Session
from daemons import Running, folder, opened, plan, read_steps
from kit import unique_name, until

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]


@contextmanager
def serving(**settings: object) -> Iterator[Running]:
    env = {f"CREEL_DAEMON__{name.upper()}": str(value) for name, value in settings.items()}
    with Running(unique_name(), env=env) as daemon:
        yield daemon


def dataset(path: Path, number: int) -> Manifest:
    """Write a folder of four small files, whose content depends on the number."""
    path = path / f"{number:03}"
    path.mkdir()
    return folder(path, [100 + number] * 4)


def known(client: Client) -> dict[str, dict[str, int]]:
    return {d["root"][-3:]: d for d in client.ask("datasets")["datasets"]}


def read_all(client: Client, manifest: Manifest) -> Session:
    session = opened(client, manifest)
    plan(session, np.arange(4), 2)
    assert read_steps(session, manifest, np.arange(4), 2) == 4
    return session


def held(daemon: Running) -> int:
    """Return the descriptors, mappings (of tables and manifests) and threads of the daemon."""
    process = psutil.Process(daemon.pid)
    return daemon.fds() + len(process.memory_maps(grouped=False)) + process.num_threads()


def test_80_short_lived_jobs_leave_no_more_than_a_few(tmp_path: Path) -> None:
    """Descriptors, mappings, threads and pages stay bounded; the latest datasets stay."""
    with serving(max_idle_datasets=8) as daemon:
        begun = held(daemon)
        for number in range(80):
            with daemon.client() as client:
                read_all(client, dataset(tmp_path, number))
        with daemon.client("cli") as client:
            until(lambda: len(known(client)) == 8, event="all but the last 8 are gone")
            datasets = known(client)
            assert set(datasets) == {f"{n:03}" for n in range(72, 80)}
            assert all(d["resident_objects"] == 4 for d in datasets.values())
            # Counters do not decrease when a dataset is forgotten.
            assert client.ask("stats")["tiers"]["memory"]["misses"] == 320
            used = client.ask("status")["memory"]["used_nbytes"]
            assert used <= 8 * 4 * 512
            # Each had 3 descriptors, 2 mappings and a thread at least, which ends later.
            until(lambda: held(daemon) < begun + 6 * 40, event="what 72 datasets held is gone")


def test_the_next_run_finds_its_data_and_a_later_one_does_not(tmp_path: Path) -> None:
    manifest = dataset(tmp_path, 0)
    with serving() as daemon:
        for _ in range(2):
            with daemon.client() as client:
                read_all(client, manifest)
        with daemon.client("cli") as client:
            assert client.ask("stats")["sources"][0]["reads"] == 4
    with serving(idle_s=0) as daemon:
        with daemon.client() as client:
            read_all(client, manifest)
        with daemon.client("cli") as client:
            until(lambda: not known(client), event="it is forgotten at once")
        with daemon.client() as client:
            read_all(client, manifest)


def test_datasets_that_a_client_means_to_read_stay(tmp_path: Path) -> None:
    """Registered and not yet opened, or open in a client that does nothing."""
    first, second, third = (dataset(tmp_path, n) for n in range(3))
    with serving(idle_s=0, max_idle_datasets=0) as daemon, daemon.client() as client:
        session = opened(client, first)
        key = client.register(second)
        with daemon.client() as other:
            read_all(other, third)
        until(lambda: set(known(client)) == {"000", "001"}, event="only the third went")
        opened(client, key)
        session.close()
        until(lambda: set(known(client)) == {"001"}, event="a closed one goes, its client stays")


def test_a_full_register_makes_room_by_forgetting_idle_ones(tmp_path: Path) -> None:
    with serving(max_datasets=2) as daemon:
        for number in range(4):
            with daemon.client() as client:
                read_all(client, dataset(tmp_path, number))
        with daemon.client("cli") as client:
            assert set(known(client)) == {"002", "003"}


def test_idle_pages_are_the_first_to_go_when_memory_is_wanted(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    old = folder(tmp_path / "a", [1 << 20] * 24)
    new = folder(tmp_path / "b", [1 << 20] * 24)
    everything = np.arange(24)
    with serving() as daemon:  # of 32 MiB
        for manifest in (old, new):
            with daemon.client() as client:
                session = opened(client, manifest)
                plan(session, everything, 2)
                assert read_steps(session, manifest, everything, 2) == 24
        with daemon.client("cli") as client:
            resident = {
                d["root"][-1]: d["resident_objects"] for d in client.ask("datasets")["datasets"]
            }
            assert resident["b"] == 24
            assert resident["a"] <= 8
