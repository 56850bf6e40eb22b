"""A small Google Cloud Storage server on loopback, in a process of its own.

    python gcs_server.py ROOT [all|media]    prints its port; never answers these requests

It has the parts of the JSON API that reading needs: an object's metadata, its bytes (with ranges),
listings in pages, errors as JSON; and GET and HEAD of the XML API, which obstore sends. Keys are
the files below a folder, buckets its subfolders. It is not in the tests' process, as Arrow's client
waits for some answers while it holds the interpreter's lock.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

_PAGE = 50


@contextmanager
def gcs(root: Path, silent: str = "") -> Iterator[dict[str, str]]:
    """Run a server inside the `with`; yield the variables for a client's environment.

    silent: requests that it accepts and never answers: "all", or "media", the bytes of objects.
    """
    command = [sys.executable, __file__, str(root), silent]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            yield {"CLOUD_STORAGE_EMULATOR_ENDPOINT": f"http://127.0.0.1:{port}"}
        finally:
            process.kill()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    root: Path
    silent: str

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class's name
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        if not parts.path.startswith("/storage/v1/"):
            self._xml(unquote(parts.path).lstrip("/"))
            return
        asked = {k: v[0] for k, v in parse_qs(parts.query).items()}
        if self.silent == "all" or self.silent == asked.get("alt"):
            threading.Event().wait()  # forever
        match = re.fullmatch(r"/storage/v1/b/([^/]+)/o(?:/(.*))?", parts.path)
        if match is None or not (self.root / unquote(match[1])).is_dir():
            self._json({"error": {"code": 404, "message": "no such bucket"}}, 404)
            return
        folder = self.root / unquote(match[1])
        if match[2] is None:
            self._list(folder, asked)
            return
        path = folder / unquote(match[2])
        if not path.is_file():
            self._json({"error": {"code": 404, "message": f"no {path.name}"}}, 404)
        elif asked.get("alt") == "media":
            self._bytes(path, {})
        else:
            self._json(_about(folder, path))

    def _xml(self, name: str) -> None:
        if self.silent:
            threading.Event().wait()
        path = self.root / name
        if path.is_file():
            about = {"ETag": f'"{path.stat().st_ino}"', "x-goog-generation": str(_written(path))}
            self._bytes(
                path, {**about, "Last-Modified": formatdate(path.stat().st_mtime, usegmt=True)}
            )
        else:
            bucket = (self.root / name.partition("/")[0]).is_dir()
            code = "NoSuchKey" if bucket else "NoSuchBucket"
            self._answer(f"<Error><Code>{code}</Code></Error>".encode(), 404, {})

    def _list(self, folder: Path, asked: dict[str, str]) -> None:
        prefix, after = asked.get("prefix", ""), asked.get("pageToken", "")
        keys = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
        keys = [key for key in keys if key.startswith(prefix) and key > after]
        if asked.get("delimiter"):  # those in folders are listed as "prefixes", which Arrow ignores
            keys = [key for key in keys if "/" not in key.removeprefix(prefix)]
        body: dict[str, object] = {
            "kind": "storage#objects",
            "items": [_about(folder, folder / key) for key in keys[:_PAGE]],
        }
        if len(keys) > _PAGE:
            body["nextPageToken"] = keys[_PAGE - 1]
        self._json(body)

    def _bytes(self, path: Path, about: dict[str, str]) -> None:
        data = path.read_bytes()
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if span is None:
            self._answer(data, 200, about)
            return
        first, last = int(span[1]), min(int(span[2] or len(data)), len(data) - 1)
        headers = {"Content-Range": f"bytes {first}-{last}/{len(data)}"}
        self._answer(data[first : last + 1], 206, {**about, **headers})

    def _json(self, body: dict[str, object], status: int = 200) -> None:
        self._answer(json.dumps(body).encode(), status, {"Content-Type": "application/json"})

    def _answer(self, body: bytes, status: int, head: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**head, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body if self.command == "GET" else b"")


def _written(path: Path) -> int:
    return path.stat().st_mtime_ns


def _about(folder: Path, path: Path) -> dict[str, object]:
    written = _written(path)
    when = f"{datetime.fromtimestamp(written // 10**9, timezone.utc):%Y-%m-%dT%H:%M:%S}"
    when += f".{written % 10**9:09}Z"
    return {
        "kind": "storage#object",
        "name": str(path.relative_to(folder)),
        "bucket": folder.name,
        "size": str(path.stat().st_size),
        "generation": str(written),
        "timeCreated": when,
        "updated": when,
    }


def main() -> None:
    _Handler.root, _Handler.silent = Path(sys.argv[1]), "".join(sys.argv[2:])
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    main()
