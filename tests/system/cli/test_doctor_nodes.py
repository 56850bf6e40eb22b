"""`creel doctor --nodes` on hosts with a slow network, and one behind a firewall."""

from __future__ import annotations

import json
import sys

import pytest

from testbed import cluster as hosts
from testbed import jobs

pytestmark = [
    pytest.mark.skipif((why := jobs.unavailable()) != "", reason=why),
    pytest.mark.system,
    pytest.mark.timeout(180),
]


def test_a_slow_network_and_a_firewall_are_found() -> None:
    command = [sys.executable, "-m", "creel", "doctor", "--nodes", "n[0-2]", "--json"]
    with hosts.Cluster(hosts=3, bandwidth="200mbit") as cluster:
        cluster.cut("n0", "n2")
        results = cluster.run_all(command, check=False, timeout=120)
    checks = {
        host: {c["found"]: c for c in json.loads(done.stdout)["checks"] if c["name"] == "nodes"}
        for host, done in results.items()
    }
    for host, asked, lost in (("n0", "n1", "n2"), ("n1", "n0", ""), ("n2", "n1", "n0")):
        (rate,) = (c for text, c in checks[host].items() if f"/s from {asked}" in text)
        assert rate["level"] == "warn", "25 MB/s are not the fast network"
        refused = [c for c in checks[host].values() if c["level"] == "bad"]
        assert [c["found"].split(":")[0] for c in refused] == [lost] * bool(lost)
        assert all("firewall" in c["remedy"] for c in refused)
        assert results[host].returncode == (1 if lost else 0), results[host].stderr
