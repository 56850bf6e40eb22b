"""A Redis server of Debian, for tests; addresses of streams in it behave like paths."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kit import unique_name, until

LACKING = (
    "apt install redis-server"
    if shutil.which("redis-server") is None
    else ""
    if importlib.util.find_spec("redis")
    else "pip install redis"
)


class Address(str):
    """redis://host:port/key; `address / "more"` is another key."""

    __slots__ = ()

    def __truediv__(self, name: str) -> Address:
        return Address(f"{self}-{name}")

    def mkdir(self) -> None:
        """Do nothing: a key needs no folder."""


@contextmanager
def redis_server(folder: Path) -> Iterator[Address]:
    """Run a server on a free port; give an address below which no stream is."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--save", ""]
    log = folder / "redis.log"
    with log.open("wb") as out:
        server = subprocess.Popen([*command, "--dir", folder], stdout=out, stderr=out)
    try:
        until(lambda: b"Ready to accept" in log.read_bytes(), event="the server is ready")
        yield Address(f"redis://127.0.0.1:{port}/{unique_name()}")
    finally:
        server.kill()
        server.wait()
