"""Which variables decide what a remote address means, and what of it is handed to the daemon."""

from __future__ import annotations

import os
from typing import Any

import fsspec
import numpy as np
import pytest

from creel.cache.storage.manifest import Manifest
from creel.cache.storage.stores import access
from creel.cache.storage.stores.access import (
    Access,
    StorageOptions,
    check_grants,
    grant_of,
    options_of,
    shown,
)
from creel.errors import ConfigError, MalformedError, UnavailableError

KEYS = {"AWS_ACCESS_KEY_ID": "AKIA1", "AWS_SECRET_ACCESS_KEY": "hush"}


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin with an environment that says nothing about stores."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_", "HF_", "SSL_", "FSSPEC_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(access, "_first_key", {})


def sets(patch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        patch.setenv(name, value)


@pytest.mark.parametrize(
    "scheme, name",
    [
        ("s3", "AWS_ENDPOINT_URL"),
        ("s3", "AWS_ENDPOINT_URL_S3"),
        ("s3", "AWS_REGION"),
        ("s3", "AWS_PROFILE"),
        ("s3", "AWS_SHARED_CREDENTIALS_FILE"),
        ("s3", "AWS_ROLE_ARN"),
        ("s3", "HOME"),
        ("s3", "SSL_CERT_FILE"),
        ("gs", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("gs", "STORAGE_EMULATOR_HOST"),
        ("gs", "CLOUDSDK_CONFIG"),
        ("abfs", "AZURE_CLIENT_ID"),
        ("hdfs", "HADOOP_CONF_DIR"),
        ("https", "SSL_CERT_DIR"),
        ("hf", "HF_ENDPOINT"),
        ("hf", "HF_TOKEN"),
        ("hf", "https_proxy"),
        ("oss", "OSS_ACCESS_KEY_ID"),
        ("simplecache::s3", "AWS_ACCESS_KEY_ID"),
    ],
)
def test_each_variable_that_decides_makes_another_access(
    monkeypatch: pytest.MonkeyPatch, scheme: str, name: str
) -> None:
    """Either its value is handed over, or a daemon with another one refuses."""
    monkeypatch.delenv(name, raising=False)
    without, before = Access.of([scheme]), grant_of(scheme, None)
    sets(monkeypatch, **{name: "/elsewhere"})
    assert Access.of([scheme]).identity != without.identity
    now = grant_of(scheme, None)
    if now.options == before.options:
        with pytest.raises(UnavailableError, match=name):
            check_grants([{scheme: before}], 1)
    check_grants([{scheme: now}], 1)


@pytest.mark.parametrize("name", ["AWS_PROFILE", "GOOGLE_APPLICATION_CREDENTIALS", "PATH", "RANK"])
def test_options_that_do_not_matter_make_no_difference(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    sets(monkeypatch, **KEYS, AWS_ENDPOINT_URL="http://h:9", AWS_REGION="x")
    before = grant_of("s3", None)
    sets(monkeypatch, **{name: "/elsewhere"})
    assert grant_of("s3", None) == before


def test_a_daemon_without_any_variable_reads_with_what_it_is_handed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sets(monkeypatch, **KEYS, AWS_ENDPOINT_URL="http://h:9", AWS_REGION="x")
    grant = grant_of("s3", None)
    for name in (*KEYS, "AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.delenv(name)
    check_grants([{"s3": grant}], 1)
    assert grant.options == {
        "access_key": "AKIA1",
        "secret_key": "hush",
        "endpoint_override": "http://h:9",
        "region": "x",
    }


def test_a_daemon_with_keys_of_its_own_serves_no_client_without_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grant = grant_of("s3", None)
    sets(monkeypatch, **KEYS)
    with pytest.raises(UnavailableError, match="AWS_ACCESS_KEY_ID"):
        check_grants([{"s3": grant}], 1)


def test_given_options_come_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    sets(monkeypatch, **KEYS, AWS_ENDPOINT_URL="http://env", AWS_REGION="env")
    given = {"key": "AKIA2", "secret": "s", "client_kwargs": {"endpoint_url": "http://given"}}
    assert options_of("s3", given) == {
        "access_key": "AKIA2",
        "secret_key": "s",
        "endpoint_override": "http://given",
        "region": "env",
    }
    assert options_of("s3", {"anon": True}).keys() == {"anonymous", "endpoint_override", "region"}
    assert options_of("gs", {"token": "anon"}) == {"anonymous": True}
    with pytest.raises(ConfigError, match="storage_options is a dict"):
        options_of("s3", ["key"])  # type: ignore[arg-type]


def test_the_environments_key_may_change_without_another_identity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was renewed. Keys that are given are somebody's."""
    sets(monkeypatch, **KEYS)
    first = Access.of(["s3"]).identity
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA2")
    assert Access.of(["s3"]).identity == first
    given = [
        Access.of(["s3"], StorageOptions({"key": key, "secret": "s"})).identity
        for key in ("AKIA2", "AKIA3")
    ]
    assert len({first, *given}) == 3


def test_fsspecs_configuration_belongs_to_the_identity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two jobs with other headers may be told other bytes by one server."""
    identities = []
    for name in ("red", "blue"):
        configured = {"client_kwargs": {"headers": {"X-Pass": name}}}
        monkeypatch.setitem(fsspec.config.conf, "http", configured)
        identities.append(Access.of(["http"]).identity)
        assert grant_of("http", None).options == configured
    assert identities[0] != identities[1]


def test_no_secret_is_in_an_identity_or_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    sets(monkeypatch, **KEYS)
    access = Access.of(["s3"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    assert Access.of(["s3"]).identity == access.identity
    texts = [repr(access), repr(access.grants()), shown(access.options("s3"))]
    assert all("another" not in text for text in texts)


@pytest.mark.parametrize(
    "scheme, given",
    [("memory", None), ("http", {"client_kwargs": {"auth": object()}}), ("x", {"f": len})],
)
def test_objects_whose_options_cannot_be_sent_are_read_by_the_process(
    scheme: str, given: dict[str, Any] | None
) -> None:
    with pytest.raises(UnavailableError, match=f"{scheme}://"):
        grant_of(scheme, given)


def test_a_manifest_keeps_the_access_of_its_parts() -> None:
    red, blue = StorageOptions({"endpoint_url": "red"}), StorageOptions({"endpoint_url": "blue"})
    parts = [
        Manifest.of_files(["s3://b/1", "s3://b/2"]).reached(red),
        Manifest.of_files(["/local"]).reached(blue),
        Manifest.of_files(["3", "4"], root="s3://b").reached(blue),
        Manifest.of_files(["s3://b/5"]).reached(StorageOptions({"endpoint_url": "blue"})),
    ]
    whole = Manifest.concat(parts)
    assert [row for row, _ in whole.access] == [0, 3]
    assert [access.identity for _, access in whole.access] == [
        parts[0].access[0][1].identity,
        parts[2].access[0][1].identity,
    ]
    again = Manifest.from_arrow(whole.to_arrow())
    assert (again.key, again.access) == (whole.key, whole.access)
    assert parts[1].access == ()
    other = Manifest.of_files(["s3://b/1", "s3://b/2"]).reached(blue)
    assert other.key != parts[0].key
    with pytest.raises(MalformedError, match="2 grants for 1"):
        check_grants([{}, {}], 1)


@pytest.mark.parametrize("text", [b"x y", b"0", b"0 a 0 b", b"1 a 0 b", b"2 a", b"-1 a", b"0 \xff"])
def test_the_access_of_a_hostile_manifest_is_checked(text: bytes) -> None:
    manifest = Manifest.of_files(["s3://b/1", "s3://b/2"])
    table = manifest.table.replace_schema_metadata({b"creel.access": text})
    import io

    import pyarrow as pa

    file = io.BytesIO()
    with pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(MalformedError, match="access"):
        Manifest.from_arrow(file.getvalue())
    assert np.array_equal(manifest.counts, [1, 1])
