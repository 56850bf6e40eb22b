"""A small S3 server on loopback that counts exactly, checks access keys, and fails on request.

What reading needs of S3: GET with ranges, HEAD, ListObjectsV2 in pages, and its errors as XML. It
asks for the right access key and checks no signature. Keys are the files below a folder, buckets
its subfolders. (moto, a full imitation, copies the whole object for each range and cannot fail.)
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import cast
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

import xxhash

KEY, SECRET = "AKIACREELTESTBED", "hush-hush-not-to-be-told"
CUT, SHORT = 0, -1  # faults without a status
#: Two writes of a file may have one time; tests replace smaller ones than this.
_REPLACED_NBYTES = 4 << 20


class S3:
    """The server, in threads of this process.

    `fail(times, status)` makes the next so many GETs of objects fail: with that status or, if it is
    CUT, by closing the connection in the middle of the body, SHORT by a body that lacks the last
    byte, and headers that agree with it. `code` is S3's word for the error.
    """

    def __init__(self, root: Path, latency_s: float = 0.0) -> None:
        """`latency_s`: each request waits so long first, and beside any others."""
        self.root = root
        self.latency_s = latency_s
        self.count: Counter[str] = Counter()
        #: The access keys that may read; more of them, or others, from now on.
        self.keys = {KEY}
        #: Whether reads without an account are answered.
        self.public = False
        #: Status and S3's word for the error with which all requests are answered.
        self.refusal: tuple[int, str] | None = None
        #: Whether If-Match is heeded, as not all servers do.
        self.heeds_if_match = True
        #: Most keys in one page of a listing; of the first listings, each fourth fails so often.
        self.page, self.fail_lists = 100, 0
        #: Called at each fault.
        self.on_fault: Callable[[], object] = lambda: None
        self._fails: list[tuple[int, str]] = []
        self._lock = threading.Lock()
        self._tags: dict[object, str] = {}
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.s3 = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def env(self) -> dict[str, str]:
        """Return the variables for a client's environment."""
        return {
            "AWS_ENDPOINT_URL": f"http://{self._host}",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    @property
    def query(self) -> str:
        """Return the part of an address that names this server, for clients of several."""
        return f"endpoint_override={self._host}&scheme=http"

    @property
    def port(self) -> int:
        return self._server.server_port

    @property
    def _host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def fail(self, times: int, status: int, code: str = "") -> None:
        with self._lock:
            self._fails += [(status, code)] * times

    def tag(self, path: Path) -> str:
        """Return the MD5 sum of an object's bytes, which is made once.

        A small object's is made again if its bytes are others; tests replace those.
        """
        status = path.stat()
        key: object = status.st_ino, status.st_size, status.st_mtime_ns
        if status.st_size <= _REPLACED_NBYTES:
            key = xxhash.xxh3_64_intdigest(path.read_bytes())
        if key not in self._tags:
            self._tags[key] = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
        return self._tags[key]

    def next_fault(self) -> tuple[int | None, str]:
        with self._lock:
            fault = self._fails.pop() if self._fails else (None, "")
        if fault[0] is not None:
            self.count["faults"] += 1
            self.on_fault()
        return fault

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> S3:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _cut(key: str, prefix: str, delimiter: str) -> str:
    """Return a key, or the folder below the prefix in which it lies."""
    inner, end, _ = key.removeprefix(prefix).partition(delimiter or "\0")
    return prefix + inner + end if delimiter else key


def _row(folder: Path, key: str, delimiter: str) -> str:
    if delimiter and key.endswith(delimiter):
        return f"<CommonPrefixes><Prefix>{escape(key)}</Prefix></CommonPrefixes>"
    return (
        f"<Contents><Key>{escape(key)}</Key><Size>{(folder / key).stat().st_size}</Size>"
        "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
    )


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    s3: S3


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    @property
    def s3(self) -> S3:
        return cast(_Server, self.server).s3

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class's name
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        time.sleep(self.s3.latency_s)
        parts = urlsplit(self.path)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        folder = self.s3.root / bucket
        given = re.search("Credential=([^/]*)/", self.headers.get("Authorization", ""))
        if not (self.s3.public if given is None else given[1] in self.s3.keys):
            self.s3.count["refused"] += 1
            self._error(403, "InvalidAccessKeyId")
        elif self.s3.refusal:
            self.s3.count["refused"] += 1
            self._error(*self.s3.refusal)
        elif not folder.is_dir():
            self._error(404, "NoSuchBucket")
        elif not key:
            self.s3.count["lists"] += 1
            number = self.s3.count["lists"]
            if number % 4 == 0 and number <= 4 * self.s3.fail_lists:
                self._error(503, "SlowDown")
            else:
                self._list(folder, {k: v[0] for k, v in parse_qs(parts.query).items()})
        elif not (folder / key).is_file():
            self._error(404, "NoSuchKey")
        else:
            self._object(folder / key)

    def _object(self, path: Path) -> None:
        status, tag = path.stat(), f'"{self.s3.tag(path)}"'
        size, modified = status.st_size, formatdate(status.st_mtime, usegmt=True)
        head = {"Last-Modified": modified, "ETag": tag}
        first, last = 0, size - 1
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if span:
            first, last = int(span[1]), min(int(span[2] or size), size - 1)
            head["Content-Range"] = f"bytes {first}-{last}/{size}"
        with path.open("rb") as f:  # before a fault, at which a test may replace it
            f.seek(first)
            data = f.read(last + 1 - first)
        self.s3.count["heads" if self.command == "HEAD" else "gets"] += 1
        fault, code = self.s3.next_fault() if self.command == "GET" else (None, "")
        if fault is not None and fault > 0:
            self._error(fault, code or ("SlowDown" if fault == 503 else "InternalError"))
        elif self.s3.heeds_if_match and self.headers.get("If-Match", tag) != tag:
            self._error(412, "PreconditionFailed")
        else:
            data = data[:-1] if fault == SHORT else data
            self._answer(206 if span else 200, data, head, cut=fault == CUT)

    def _list(self, folder: Path, asked: dict[str, str]) -> None:
        prefix, after = (
            asked.get("prefix", ""),
            asked.get("continuation-token", asked.get("start-after", "")),
        )
        limit = min(int(asked.get("max-keys", self.s3.page)), self.s3.page)
        files = (str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
        delimiter = asked.get("delimiter", "")
        keys = {_cut(key, prefix, delimiter) for key in files if key.startswith(prefix)}
        later = sorted(key for key in keys if key > after)
        rows = "".join(_row(folder, key, delimiter) for key in later[:limit])
        more = len(later) > limit
        last = escape(later[limit - 1]) if more else ""
        token = f"<NextContinuationToken>{last}</NextContinuationToken>" if more else ""
        body = (
            f"<ListBucketResult><Name>{folder.name}</Name><Prefix>{escape(prefix)}</Prefix>"
            f"<KeyCount>{len(later[:limit])}</KeyCount><IsTruncated>{str(more).lower()}"
            f"</IsTruncated>{token}{rows}</ListBucketResult>"
        )
        self._answer(200, body.encode(), {"Content-Type": "application/xml"})

    def _error(self, status: int, code: str) -> None:
        body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
        self._answer(status, body, {"Content-Type": "application/xml"})

    def _answer(self, status: int, body: bytes, head: dict[str, str], *, cut: bool = False) -> None:
        self.send_response(status)
        for name, value in {**head, "Content-Length": str(len(body))}.items():
            self.send_header(name, quote(value, safe=" !-~") if not value.isascii() else value)
        self.end_headers()
        if self.command == "HEAD":
            return
        body = body[: len(body) // 2] if cut else body
        self.s3.count["bytes"] += len(body)
        self.close_connection = cut or self.close_connection
        try:
            self.wfile.write(body)
        except ConnectionError:  # a daemon that reads ahead may end at any time
            self.close_connection = True
