"""Clusters from a list: which node is which, and whose key counts."""

from __future__ import annotations

import socket
from pathlib import Path
from unittest import mock

import pytest

from creel.errors import ConfigError
from creel.loader.client.cluster import join
from creel.loader.client.cluster.listed import (
    own_place,
    ranks_in_blocks,
    request_of,
    secret_of,
)
from creel.settings import ClusterSettings

SECRET = b"0123456789abcdef"


def test_every_node_of_the_list_says_the_same_but_for_its_place() -> None:
    first, two = (request_of(["a", "b"], me, [0, 1], 7, SECRET) for me in range(2))
    assert (first.cluster, first.key, first.members) == (two.cluster, two.key, two.members)
    assert (first.me, two.me) == (0, 1)
    assert len(first.key) == 32


@pytest.mark.parametrize(
    "hosts, ranks, port, secret",
    [
        (["a", "c"], [0, 1], 7, SECRET),
        (["a", "b"], [0, 0, 1, 1], 7, SECRET),
        (["a", "b"], [0, 1], 8, SECRET),
        (["a", "b"], [0, 1], 7, SECRET[::-1]),
    ],
)
def test_another_job_has_another_key(
    hosts: list[str], ranks: list[int], port: int, secret: bytes
) -> None:
    ours = request_of(["a", "b"], 0, [0, 1], 7, SECRET)
    theirs = request_of(hosts, 0, ranks, port, secret)
    assert ours.cluster != theirs.cluster
    assert ours.key != theirs.key


def test_an_earlier_job_of_the_same_nodes_has_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = set()
    for job in "17", "18":
        monkeypatch.setenv("SLURM_JOB_ID", job)
        keys.add(request_of(["a", "b"], 0, [0, 1], 7, SECRET).key)
    assert len(keys) == 2


@pytest.mark.parametrize("hosts", ["a..b,c", "a" * 80 + ",c"])
def test_a_list_of_names_that_cannot_be_is_told_in_a_sentence(
    hosts: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CREEL_CLUSTER_KEY", SECRET.decode() * 2)
    join._attempt(mock.Mock(), ClusterSettings(hosts=hosts), None, 0, 2)
    assert "this node shares no cache with the job's other nodes" in caplog.text


def test_a_node_finds_itself_by_name_or_address() -> None:
    name = socket.gethostname()
    assert own_place(["a.invalid", name], {}) == 1
    assert own_place(["x7", "x8"], {"SLURMD_NODENAME": "x8"}) == 1
    assert own_place([name.split(".")[0] + ".elsewhere.invalid", "b.invalid"], {}) == 0
    assert own_place(["203.0.113.1", "127.0.0.1"], {}) == 1
    for strange in ["203.0.113.1", "203.0.113.2"], ["127.0.0.1", "127.0.0.2"]:
        with pytest.raises(ConfigError):
            own_place(strange, {})


@pytest.mark.parametrize("nodes, world", [(2, 3), (4, 2), (3, 0)])
def test_nodes_with_different_numbers_of_ranks_are_refused(nodes: int, world: int) -> None:
    with pytest.raises(ConfigError):
        ranks_in_blocks(nodes, world)


def test_the_environment_or_a_file_of_ones_own_has_the_key(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.touch(0o600)
    file.write_bytes(SECRET + b"\n")
    settings = ClusterSettings(hosts="a,b", key_file=str(file))
    assert secret_of(settings, {}) == SECRET
    assert secret_of(settings, {"CREEL_CLUSTER_KEY": "f" * 16}) == b"f" * 16


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o602])
def test_a_key_that_others_may_read_or_write_is_none(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "key"
    file.write_bytes(SECRET)
    file.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        secret_of(ClusterSettings(key_file=str(file)), {})


@pytest.mark.parametrize("secret", [b"", b"short", b"  \n"])
def test_a_short_key_is_none(tmp_path: Path, secret: bytes) -> None:
    file = tmp_path / "key"
    file.touch(0o600)
    file.write_bytes(secret)
    for settings in ClusterSettings(key_file=str(file)), ClusterSettings(key_file="/no/such/file"):
        with pytest.raises(ConfigError):
            secret_of(settings, {})
    with pytest.raises(ConfigError, match="needs a key"):
        secret_of(ClusterSettings(), {})
