"""Lists of nodes as schedulers write them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from creel.errors import ConfigError
from creel.loader.client.cluster.hostlist import expanded, hosts_of


@pytest.mark.parametrize(
    "text, hosts",
    [
        ("n0", ["n0"]),
        ("n[0-2]", ["n0", "n1", "n2"]),
        ("n[0,2-3],m1", ["n0", "n2", "n3", "m1"]),
        ("n[008-010]", ["n008", "n009", "n010"]),
        ("n[9-10]", ["n9", "n10"]),
        ("r[1-2]-n[1-2].x", ["r1-n1.x", "r1-n2.x", "r2-n1.x", "r2-n2.x"]),
        ("10.0.0.[1-2]", ["10.0.0.1", "10.0.0.2"]),
        (" a , b ", ["a", "b"]),
    ],
)
def test_a_list_of_slurms_stands_for_names(text: str, hosts: list[str]) -> None:
    assert expanded(text) == hosts
    assert hosts_of(text, {}) == hosts
    assert hosts_of("slurm", {"SLURM_JOB_NODELIST": text}) == hosts


@pytest.mark.parametrize("text", ["n[0-", "n[]", "n[3-1]", "n[a]", "n]0[", "n[0-99999999]", "a b"])
def test_no_list_is_no_guess(text: str) -> None:
    with pytest.raises(ConfigError):
        expanded(text)


@given(st.text("n0123-,[] ", max_size=30))
def test_any_text_is_names_or_an_error(text: str) -> None:
    try:
        hosts = expanded(text)
    except ConfigError:
        return
    assert not any(set(host) & set("[], ") for host in hosts)


def test_a_file_names_each_node_once(tmp_path: Path) -> None:
    file = tmp_path / "nodes"
    file.write_text("# mine\nn0 slots=4\nn0\n\nn1  # the second\n")
    assert hosts_of(str(file), {}) == ["n0", "n1"]
    assert hosts_of("pbs", {"PBS_NODEFILE": str(file)}) == ["n0", "n1"]
    assert hosts_of("auto", {"PBS_NODEFILE": str(file)}) == ["n0", "n1"]


@pytest.mark.parametrize("setting", ["slurm", "pbs", "/no/such/file", ","])
def test_a_list_that_names_nobody_is_an_error(setting: str) -> None:
    with pytest.raises(ConfigError):
        hosts_of(setting, {})


def test_auto_without_a_scheduler_is_no_cluster() -> None:
    assert hosts_of("auto", {}) == []
