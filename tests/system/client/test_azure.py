"""Datasets in Azure's storage, by its emulator (npm install azurite): torch and a daemon."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

import creel
from creel.errors import ConfigError, NotFoundError, SourceError
from creel.loader.client.client import Client
from kit import forget_stores, until

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(120),
    pytest.mark.skipif(shutil.which("azurite-blob") is None, reason="needs azurite-blob"),
]

#: The emulator's account, which is public.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
FILES = {f"files/{'a b/' if i % 2 else ''}{i:02}#%.bin": bytes([i]) * (i + 1) for i in range(20)}
TOKENS = np.arange(64 * 128).tobytes()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run the emulator; yield its connection string."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["azurite-blob", "--silent", "--inMemoryPersistence", "--skipApiVersionCheck"]
    command += ["--blobHost", "127.0.0.1", "--blobPort", str(port)]
    folder = tmp_path_factory.mktemp("azurite")
    url = f"http://127.0.0.1:{port}/{ACCOUNT}"
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL) as process:
        try:
            until(lambda: listens(port), event="the emulator listens")
            write(f"127.0.0.1:{port}", {**FILES, "tokens": TOKENS})
            account = f"AccountName={ACCOUNT};AccountKey={KEY}"
            yield f"DefaultEndpointsProtocol=http;{account};BlobEndpoint={url};"
        finally:
            process.terminate()


def listens(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


def write(authority: str, objects: dict[str, bytes]) -> None:
    from pyarrow import fs

    where = {f"{kind}_storage_authority": authority for kind in ("blob", "dfs")}
    where |= {f"{kind}_storage_scheme": "http" for kind in ("blob", "dfs")}
    system = fs.AzureFileSystem(ACCOUNT, account_key=KEY, **where)
    system.create_dir("box", recursive=False)
    for name, data in objects.items():
        with system.open_output_stream(f"box/{name}") as f:
            f.write(data)


@pytest.fixture(autouse=True)
def given(server: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    forget_stores(monkeypatch)
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    return {"connection_string": server}


def files(root: str, **more: Any) -> Any:
    return creel.FileDataset(f"{root}/files", **more)


def records(root: str, **more: Any) -> Any:
    return creel.RecordDataset(f"{root}/tokens", dtype=np.int64, shape=(128,), **more)


@pytest.mark.parametrize("root", ["az://box", f"abfs://box@{ACCOUNT}.dfs.core.windows.net"])
@pytest.mark.parametrize("make", [files, records])
def test_a_container_is_read_as_a_folder_is(
    given: dict[str, Any], daemon_name: str, make: Callable[..., Any], root: str
) -> None:
    dataset = make(root, storage_options=given)
    rows = [FILES[name] for name in sorted(FILES)]
    size = 128 * 8
    if make is records:
        rows = [TOKENS[at : at + size] for at in range(0, len(TOKENS), size)]
    for loader in (DataLoader, creel.DataLoader):
        got = [x.numpy().tobytes() for x in loader(dataset, batch_size=None, num_workers=1)]
        assert got == rows
    with Client.connect(daemon_name, "cli") as client:
        (source,) = client.ask("stats")["sources"]
        assert source["reads"] > 0
        if pytest.importorskip("obstore"):
            assert source["requests"]["HEAD"] == 0
        client.ask("stop")


def test_the_environment_names_the_account(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", server)
    assert creel.read("az://box/files/00%23%25.bin") == FILES["files/00#%.bin"]
    with pytest.raises(NotFoundError, match="there is no az://box/nothing"):
        creel.FileDataset("az://box/nothing")
    with pytest.raises(SourceError, match="there is no such bucket"):
        creel.read("az://nowhere/a")
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", server.replace(KEY, "aGk="))
    with pytest.raises(SourceError, match="access denied: check the credentials") as refused:
        creel.read("az://box/tokens")
    assert "aGk=" not in str(refused.value)
    with pytest.raises(ConfigError, match="access denied"):
        creel.FileDataset("az://box/files")
