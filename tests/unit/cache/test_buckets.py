"""What reaches obstore of an address, its options and the environment: server and rights."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from creel.cache.storage.buckets import gs, s3
from creel.cache.storage.buckets.find import bucket_of
from creel.cache.storage.stores import access
from creel.cache.storage.stores.access import options_of
from creel.cache.storage.stores.arrow_store import arrow_of

KEY = "a2V5"
AZURITE = (
    f"DefaultEndpointsProtocol=http;AccountName=dev;AccountKey={KEY};"
    "BlobEndpoint=http://127.0.0.1:10000/dev;"
)
SERVICE = {"AZURE_TENANT_ID": "t", "AZURE_CLIENT_ID": "c"}
KEYS = {"key": "k", "secret": "s"}
OWN = {"client_id": "c", "client_secret": "s", "tenant_id": "t"}


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Begin with an environment that says nothing about stores, and no machine of a cloud."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_", "CLOUD", "GCE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(gs, "_is_google", lambda: False)
    monkeypatch.setattr(s3, "_is_ec2", lambda: False)
    for kind in ("service_account", "authorized_user", "external_account"):
        (tmp_path / kind).write_text(f'{{"type": "{kind}"}}')


#: Address, options, environment ("~" is a home); server, and arguments of the client.
UNDERSTOOD: list[tuple[str, dict[str, Any], dict[str, str], str, dict[str, object]]] = [
    ("gs://b", {"anon": True}, {}, "https://storage.googleapis.com", {"skip_signature": True}),
    ("gs://anonymous@b", {}, {}, "https://storage.googleapis.com", {"skip_signature": True}),
    ("gs://b", {"token": "anon", "endpoint_url": "http://h:1"}, {}, "http://h:1", {"bucket": "b"}),
    ("gs://b?endpoint_override=h:1&scheme=http", {"anon": True}, {}, "http://h:1", {}),
    ("gs://b", {"access_token": "t"}, {}, "https://storage.googleapis.com", {"token": "t"}),
    ("gs://b", {}, {"GOOGLE_APPLICATION_CREDENTIALS": "~/service_account"},
     "https://storage.googleapis.com", {"application_credentials": "~/service_account"}),
    ("gs://b", {}, {"GOOGLE_APPLICATION_CREDENTIALS": "~/authorized_user"},
     "https://storage.googleapis.com", {"application_credentials": "~/authorized_user"}),
    ("az://c", {"account_name": "a", "account_key": KEY}, {}, "https://a.blob.core.windows.net",
     {"access_key": KEY, "container_name": "c", "account_name": "a"}),
    ("az://c", {"account_name": "a", "sas_token": "?sv=1&sig=x"}, {},
     "https://a.blob.core.windows.net", {"sas_token": "sv=1&sig=x"}),
    ("az://c", {"account_name": "a", "anon": True}, {}, "https://a.blob.core.windows.net",
     {"skip_signature": True}),
    ("az://c", {"connection_string": AZURITE}, {}, "http://127.0.0.1:10000/dev",
     {"access_key": KEY}),
    ("az://c", {}, {"AZURE_STORAGE_CONNECTION_STRING": AZURITE}, "http://127.0.0.1:10000/dev",
     {"access_key": KEY}),
    ("az://c", {}, {"AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_STORAGE_ACCOUNT_KEY": KEY},
     "https://a.blob.core.windows.net", {"access_key": KEY}),
    ("az://c", {"account_name": "a"}, {"AZURE_STORAGE_SAS_TOKEN": "sig=x"},
     "https://a.blob.core.windows.net", {"sas_token": "sig=x"}),
    ("abfs://c@a.dfs.core.windows.net", {"account_key": KEY}, {"AZURE_STORAGE_ACCOUNT_KEY": "no"},
     "https://a.blob.core.windows.net", {"access_key": KEY, "container_name": "c"}),
    ("abfss://c@a.dfs.core.windows.net", OWN, {}, "https://a.blob.core.windows.net",
     {"credential_type": "client_secret", **OWN}),
    ("abfss://c@a.dfs.core.windows.net", {}, SERVICE | {"AZURE_CLIENT_SECRET": "s"},
     "https://a.blob.core.windows.net", {"credential_type": "client_secret"}),
    ("az://c", {"account_name": "a"}, SERVICE | {"AZURE_FEDERATED_TOKEN_FILE": "/f"},
     "https://a.blob.core.windows.net", {"credential_type": "workload_identity"}),
    ("s3://b", {"key": "k", "secret": "s", "endpoint_url": "http://h:1"}, {}, "http://h:1",
     {"access_key_id": "k", "secret_access_key": "s", "region": "us-east-1"}),
]  # fmt: skip


@pytest.mark.parametrize("uri, options, variables, server, arguments", UNDERSTOOD)
def test_each_way_to_name_rights_reaches_the_client(
    uri: str,
    options: dict[str, Any],
    variables: dict[str, str],
    server: str,
    arguments: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value.replace("~", str(tmp_path)))
    bucket = bucket_of(uri, options_of(uri.partition(":")[0], options))
    assert bucket is not None
    assert bucket.server == server
    provider: Callable[[], dict[str, Any]] = bucket.config.get("credential_provider", dict)
    said = {**bucket.config, **provider()}
    wanted = {
        k: v.replace("~", str(tmp_path)) if isinstance(v, str) else v for k, v in arguments.items()
    }
    assert wanted.items() <= said.items()
    store = pytest.importorskip("obstore").store
    if "application_credentials" not in said:  # a file that has no key
        getattr(store, bucket.kind)(**bucket.config, client_options={"allow_http": True})


@pytest.mark.parametrize(
    "uri, options, variables",
    [
        ("gs://b", {}, {}),
        ("gs://b", {}, {"GOOGLE_APPLICATION_CREDENTIALS": "~/external_account"}),
        ("gs://b", {}, {"GOOGLE_APPLICATION_CREDENTIALS": "~/missing"}),
        ("gs://b", {"anon": True}, {"GOOGLE_SERVICE_ACCOUNT": "/f"}),
        ("gs://b", {"target_service_account": "a"}, {}),
        ("az://c", {"account_name": "a"}, {}),
        ("az://c", {"account_name": "a", "client_id": "c"}, {}),
        ("abfs://a.blob.core.windows.net/c", {"account_key": KEY}, {}),
        ("abfs://c:key@a.dfs.core.windows.net", {}, {}),
        ("abfs://c@a.dfs.core.chinacloudapi.cn", {"account_key": KEY}, {}),
        ("hdfs://h", {}, {}),
        ("s3://b", {"anon": True, "background_writes": False}, {}),
        ("s3://b--x-s3", KEYS, {}),
        ("s3://b", {}, {"AWS_WEB_IDENTITY_TOKEN_FILE": "/f", "AWS_ENDPOINT_URL": "http://h"}),
        ("s3://b", KEYS, {"AWS_USE_FIPS_ENDPOINT": "true"}),
        ("s3://b", KEYS, {"AWS_USE_DUALSTACK_ENDPOINT": "true"}),
        ("s3://b", KEYS | {"endpoint_url": "https://h"}, {"AWS_CA_BUNDLE": "/f"}),
        ("s3://b", {"endpoint_url": "http://h"}, {"AWS_CONFIG_FILE": "~/service_account"}),
    ],
)
def test_what_only_another_client_understands_is_left_to_it(
    uri: str,
    options: dict[str, Any],
    variables: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value.replace("~", str(tmp_path)))
    assert bucket_of(uri, options_of(uri.partition(":")[0], options)) is None


@pytest.mark.parametrize(
    "options", [{"connection_string": AZURITE}, {"account_name": "dev", "anon": True}]
)
def test_azure_is_listed_by_pyarrow_with_the_same_options(options: dict[str, Any]) -> None:
    system, path = arrow_of("az://c/", 5.0, access.options_of("az", options))
    given = system.__reduce__()[1][0]
    assert (path.rstrip("/"), given["account_name"]) == ("c", "dev")
    if "connection_string" in options:
        names = ("account_key", "blob_storage_authority", "blob_storage_scheme")
        assert [given[name] for name in names] == [KEY, "127.0.0.1:10000", "http"]
