"""`creel doctor`'s checks of running jobs, of a dataset's storage, and of other nodes."""

from __future__ import annotations

import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from cli_rig import SESSION

from creel.cli import doctor
from creel.cli.checks import dataset, exposed, nodes, running
from creel.cli.checks.finding import Finding
from creel.config import Config
from creel.loader.data import page_cache
from creel.settings import ClusterSettings, DaemonSettings
from testbed.s3_server import S3

FILES = [{"dataset": "d", "objects": 1000, "nbytes": 100_000_000}]


def _warns(finding: Finding, remedy: str) -> bool:
    return finding.level == "warn" and remedy in finding.remedy


def test_more_workers_than_processors() -> None:
    assert running.workers(4, 4.0).level == "ok"
    assert _warns(running.workers(9, 4.0), "lower num_workers to 4")


@pytest.mark.parametrize(
    "env, ranks, remedy",
    [
        ({}, 4, "OMP_NUM_THREADS=2"),
        ({"OMP_NUM_THREADS": "8"}, 4, "OMP_NUM_THREADS=2"),
        ({"SLURM_NTASKS_PER_NODE": "2"}, 0, "OMP_NUM_THREADS=4"),
        ({"OMP_NUM_THREADS": "1"}, 16, ""),
        ({"OMP_NUM_THREADS": "2"}, 4, ""),
        ({}, 1, ""),
    ],
)
def test_threads_of_ranks_that_share_processors(
    env: dict[str, str], ranks: int, remedy: str
) -> None:
    finding = running.threads(env, 8.0, ranks)
    assert (finding.level != "ok", remedy in finding.remedy) == (bool(remedy), True)


def test_a_budget_below_two_batches() -> None:
    need = 2 * 256 * 100_000  # the session's batches have 256 samples
    assert running.batches([SESSION], FILES, need).level == "ok"
    assert _warns(running.batches([SESSION], FILES, need - 1), "raise it")


def test_a_dataset_that_opens_its_own_files_and_waits_for_them() -> None:
    assert running.opened([SESSION]).level == "ok"
    remedies = {"own_file": "/data/1", "own_remedy": "try it"}
    finding = running.opened([SESSION, SESSION | remedies, SESSION | remedies])
    assert _warns(finding, "try it")
    assert finding.remedy.count("try it") == 1
    assert finding.state.endswith("itself: pid 70 for /data/1, pid 70 for /data/1")


def test_all_that_a_daemon_tells_is_looked_at() -> None:
    session = SESSION | {"workers": 99, "own_file": "/data/1", "own_remedy": "try it"}
    stats = {"sessions": [session], "memory": {"budget_nbytes": 1}}
    levels = {finding.name: finding.level for finding in running.findings(stats, FILES, {}, 2.0)}
    assert levels == {
        "workers": "warn",
        "OMP threads": "ok",
        "batches": "warn",
        "own files": "warn",
    }


JOB = "0::/system.slice/slurmstepd.scope/job_{}/step_0/user/task_0\n"


@pytest.mark.parametrize(
    "ours, its, said",
    [
        (JOB.format(7), JOB.format(7), ""),
        (JOB.format(7), JOB.format(8), "Slurm's job 8"),
        (JOB.format(7), "0::/system.slice/slurmd.service\n", "but to slurmd"),
        ("0::/user.slice\n", "0::/user.slice/creeld.service\n", ""),
    ],
)
def test_a_daemon_in_the_wrong_cgroup(ours: str, its: str, said: str) -> None:
    finding = running.cgroup(ours, its)
    assert (finding.level, said in finding.state) == ("warn" if said else "ok", True)


@pytest.mark.parametrize(
    "address, level",
    [
        ("127.0.0.1:9464", "ok"),
        ("[::1]:9464", "ok"),
        ("localhost:1", "ok"),
        ("0.0.0.0:9464", "warn"),
    ],
)
def test_a_metrics_page_that_others_reach_is_named(address: str, level: str) -> None:
    (page,) = exposed.findings(Config(daemon=DaemonSettings(metrics=address)), {})
    assert (page.level, "no password" in page.remedy) == (level, level == "warn")


@pytest.mark.parametrize("mode, level", [(0o600, "ok"), (0o640, "warn"), (None, "bad")])
def test_a_key_that_others_may_read_is_named(tmp_path: Path, mode: int | None, level: str) -> None:
    key = tmp_path / "key"
    if mode is not None:
        key.touch(mode)
        key.chmod(mode)
    (finding,) = exposed.findings(Config(cluster=ClusterSettings(key_file=str(key))), {})
    assert finding.level == level


@pytest.mark.parametrize(
    "cluster, env, name, level",
    [
        ({"hosts": "a,b"}, {}, "encryption", "warn"),
        ({"hosts": "a,b", "encrypt": True}, {}, "encryption", "ok"),
        ({}, {"MASTER_ADDR": "node1"}, "key", "warn"),
        ({}, {"MASTER_ADDR": "127.0.0.1"}, "", ""),
        ({}, {"AWS_ENDPOINT_URL": "http://user:secret@store:9000"}, "endpoint", "warn"),
        ({}, {"AWS_ENDPOINT_URL_S3": "https://store"}, "", ""),
        ({}, {"AWS_ENDPOINT_URL": "http://[::1]:9000"}, "", ""),
    ],
)
def test_what_travels_in_the_clear_is_named(
    cluster: dict[str, Any], env: dict[str, str], name: str, level: str
) -> None:
    findings = list(exposed.findings(Config(cluster=ClusterSettings(**cluster)), env))
    assert [(finding.name, finding.level) for finding in findings] == (
        [(name, level)] if name else []
    )
    assert "secret" not in str(findings)


def test_a_full_dev_shm() -> None:
    assert doctor.shm(8 << 30, 8 << 30).level == "ok"
    assert _warns(doctor.shm(8 << 30, 1 << 20), "remove what ended jobs have left")
    assert _warns(doctor.shm(64 << 20, 64 << 20), "--shm-size")


def test_storage_that_is_slow_at_metadata_or_has_another_time(tmp_path: Path) -> None:
    assert dataset.metadata(0.1, 1e5).level == "ok"
    assert _warns(dataset.metadata(9.0, 1e5), "pack the files into shards")
    (tmp_path / "a").write_bytes(b"x" * 100)
    ahead = time.time() + 3600
    os.utime(tmp_path / "a", (ahead, ahead))
    findings = {
        finding.name: finding for finding in dataset.findings(str(tmp_path), "", time.time())
    }
    assert findings["metadata"].level == "ok"
    assert _warns(findings["clock"], "NTP")
    assert "3,600.0 s in the future" in findings["clock"].state


def test_a_folder_without_files_does_not_work(tmp_path: Path) -> None:
    (finding,) = dataset.findings(str(tmp_path / "gone"), "", 0.0)
    assert (finding.level, finding.remedy) == ("bad", "name another path")


def test_looking_at_files_ends_in_time_however_many_a_folder_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(50):
        (tmp_path / f"{i}").touch()
    (tmp_path / "below").mkdir()
    (tmp_path / "below/a").touch()
    assert len(dataset.sample(str(tmp_path)).paths) == 32 + 1
    assert dataset.sample(str(tmp_path / "7")).paths == [str(tmp_path / "7")]
    listed: list[str] = []
    scandir = os.scandir

    class Endless:
        """A folder whose listing never ends."""

        def __init__(self, path: str) -> None:
            self.all = scandir(path)

        def __enter__(self) -> Iterator[os.DirEntry[str]]:
            (entry, *_) = self.all
            return itertools.repeat(entry)

        def __exit__(self, *_: object) -> None:
            listed.append("closed")

    monkeypatch.setattr(os, "scandir", Endless)
    assert len(dataset.sample(str(tmp_path / "below")).paths) == 32
    assert listed == ["closed"]


def test_a_disk_tier_slower_than_what_it_stands_for(tmp_path: Path) -> None:
    assert dataset.tier(1e9, 3e9).level == "ok"
    assert dataset.tier(1e9, 0.9e9).level == "ok", "one disk, measured twice"
    assert _warns(dataset.tier(3e9, 1e8), "name a faster disk")
    (tmp_path / "a").write_bytes(b"x" * 1000)
    *_, finding = dataset.findings(str(tmp_path / "a"), str(tmp_path), time.time())
    assert "/s, the dataset's storage" in finding.state
    assert [path.name for path in tmp_path.iterdir()] == ["a"], "what it wrote is gone"
    *_, finding = dataset.findings(str(tmp_path / "a"), str(tmp_path / "nowhere"), time.time())
    assert _warns(finding, "check disk.path")


@pytest.mark.parametrize(
    "count, nbytes, remedy",
    [(1, 1e5, ""), (4, 1e5, "-c 1"), (1, 1e9, "-c 8"), (8, 1e9, ""), (None, 1e5, "install lfs")],
)
def test_stripes_on_lustre(count: int | None, nbytes: float, remedy: str) -> None:
    finding = dataset.stripes(count, nbytes)
    assert (finding.level != "ok", remedy in finding.remedy) == (bool(remedy), True)


def test_stripes_are_those_that_lfs_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No Lustre is at hand: a program with lfs's name answers, on what is said to be a mount."""
    (tmp_path / "a").write_bytes(b"x")
    lfs = tmp_path / "lfs"
    lfs.write_text('#!/bin/sh\n[ "$1 $2" = "getstripe --stripe-count" ] && echo 4\n')
    lfs.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    kinds = {f"{tmp_path.resolve() / 'a'}/": "lustre"}
    monkeypatch.setattr(page_cache, "kind_of", lambda path: kinds.get(path, ""))
    findings = {
        finding.name: finding for finding in dataset.findings(str(tmp_path / "a"), "", time.time())
    }
    assert findings["Lustre"].state.startswith("4 stripes")


def test_a_bucket_is_listed_or_it_is_said_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket/a").write_bytes(b"x")
    s3 = S3(tmp_path)
    try:
        for name, value in s3.env.items():
            monkeypatch.setenv(name, value)
        (finding,) = dataset.findings("s3://bucket/", "", 0.0)
        assert (finding.level, finding.state) == ("ok", "1 files")
        s3.keys.clear()
        (finding,) = dataset.findings("s3://bucket/", "", 0.0)
        assert finding.level == "bad"
        assert "AWS_ACCESS_KEY_ID" in finding.remedy
    finally:
        s3.close()


def test_a_server_that_cannot_be_reached_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if requests to it would be repeated for longer than the doctor waits."""
    monkeypatch.setattr(dataset, "_ANSWER_S", 0.2)
    (finding,) = dataset.findings("http://127.0.0.1:1/data", "", 0.0)
    assert (finding.level, "proxies" in finding.remedy) == ("bad", True)


def test_a_listing_that_does_not_end_in_time_is_no_answer() -> None:
    assert _warns(dataset.remote("", None), "does the server answer?")


@pytest.mark.parametrize(
    "reason, remedy",
    [
        ("the bucket is in another region: PermanentRedirect", "region=..."),
        ("RequestTimeTooSkewed: the difference between the times is too large", "NTP"),
        ("resolving region for bucket 'b': NETWORK_CONNECTION: curlCode 6", "proxies"),
        ("s3://region-1/denied: Connection refused", "proxies"),
        ("s3://us-region/there-is-no-skew/: ACCESS_DENIED for key 'region'", "AWS_ACCESS_KEY_ID"),
        ("s3://b: access denied: check the credentials", "AWS_SECRET_ACCESS_KEY"),
        ("http needs aiohttp: pip install 'creel-data[http]'", "creel-data[all]"),
        ("No module named 'torch'", "creel-data[all]"),
    ],
)
def test_each_refusal_of_a_store_has_its_remedy(reason: str, remedy: str) -> None:
    finding = dataset.remote(reason, None)
    assert (finding.level, remedy in finding.remedy) == ("bad", True)


def test_a_node_without_torch_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that the server does not answer."""
    monkeypatch.setitem(sys.modules, "creel.loader.data.reading.listing", None)
    (finding,) = dataset.findings("s3://bucket/", "", 0.0)
    assert (finding.level, "import" in finding.state) == ("bad", True)


def test_another_node_is_measured_or_it_is_said_why_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        serving = threading.Thread(target=nodes._serve, args=(server, 1))
        serving.start()
        answer = nodes.ask("127.0.0.1", port)
        serving.join(30)
    assert answer.reason == ""
    assert answer.Bps > 1e6
    assert abs(answer.ahead_s) < 1
    lost = nodes.ask("127.0.0.1", port, wait_s=0.2)
    assert "not reached at port" in lost.reason


def test_a_node_that_answers_others_first_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_MEASURED_S", 0.1)
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        address = server.getsockname()
        for _ in range(4):  # each of them says nothing for as long as it may
            stack.enter_context(socket.create_connection(address))
        serving = threading.Thread(target=nodes._serve, args=(server, 5))
        serving.start()
        answer = nodes.ask(*address)
        serving.join(30)
    assert answer.reason == ""
    assert abs(answer.ahead_s) < 0.35, "it waited for 0.4 s, and both have one clock"


def test_the_network_between_nodes_is_judged() -> None:
    (way,) = nodes.judge(nodes.NodeAnswer("n1", Bps=5e9))
    assert way.level == "ok"
    slow, clock = nodes.judge(nodes.NodeAnswer("n1", Bps=1e7, ahead_s=-30))
    assert _warns(slow, "the fast network")
    assert clock.state == "the clock of n1 is 30.0 s behind"
    (blocked,) = nodes.judge(nodes.NodeAnswer("n1", "not reached at port 9"))
    assert (blocked.level, "firewall" in blocked.remedy) == ("bad", True)
