"""A real HTTP server on loopback that is as slow as asked, and counts exactly.

    python http_server.py ROOT [--bandwidth 50e6] [--latency 0.01] [--errors 100] [--port 0]

HTTP/1.1 with keep-alive, single byte ranges, HEAD and folder listings (as fsspec's "http" needs).
One token bucket limits the bytes of all connections together. Every request first waits `latency`
seconds (as at a far store; requests wait in parallel). Every `errors`-th GET of a file answers 503.
`GET /stats` returns the counters as JSON, `POST /stats` resets them afterwards.

It prints `listening on http://127.0.0.1:PORT` when it listens, and ends when its standard input is
closed, so that it does not outlive its parent. `Server` is the same as a context manager.
"""

from __future__ import annotations

import argparse
import asyncio
import html
import json
import os
import subprocess
import sys
import urllib.parse
import urllib.request
from collections import Counter
from email.utils import formatdate
from pathlib import Path
from typing import NamedTuple

_CHUNK = 64 * 1024  # bytes sent at a time by the bucket: 1.3 ms at 50 MB/s
_MAX_HEAD = 64 * 1024


class Server:
    """The server as a process of its own.

    >>> with Server("/etc") as server:
    ...     _ = urllib.request.urlopen(server.url + "/hostname").read()
    ...     server.stats()["gets"]
    1
    """

    def __init__(
        self,
        root: str | Path,
        *,
        bandwidth_Bps: float = 0,  # noqa: N803 - a unit
        latency_s: float = 0,
        errors: int = 0,
    ) -> None:
        """Serve `root`; 0 means no limit, no latency, no errors."""
        options = [
            f"--bandwidth={bandwidth_Bps:.0f}",
            f"--latency={latency_s}",
            f"--errors={errors}",
        ]
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(root), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith("listening on "):
            self.close()
            raise RuntimeError(f"the server did not start: {line!r}")
        self.url = line.removeprefix("listening on ").strip()

    def stats(self, *, reset: bool = False) -> dict[str, int]:
        """Return the counters since the start or the last reset; `reset`: then reset them."""
        request = urllib.request.Request(f"{self.url}/stats", method="POST" if reset else "GET")
        with urllib.request.urlopen(request, timeout=10) as answer:
            counts: dict[str, int] = json.load(answer)
        return counts

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # Closing its standard input is not enough, as forked processes may hold it open.
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Bucket:
    """A token bucket: `rate` bytes per second, `burst` at once after a pause."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._free_at = 0.0  # when all bytes promised so far will have left

    async def take(self, nbytes: int) -> None:
        if self._rate <= 0:
            return
        now = asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now - self._burst / self._rate) + nbytes / self._rate
        if self._free_at > now:
            await asyncio.sleep(self._free_at - now)


class Request(NamedTuple):
    """The parts of a request that the server uses. `first`, `last`: inclusive range; -1: open."""

    method: str
    path: str
    first: int
    last: int
    keep: bool
    ranged: bool


class Reply(NamedTuple):
    """Status line and headers, and the body: bytes, or (path, offset, length) of a file."""

    status: str
    headers: dict[str, str]
    body: bytes = b""
    file: tuple[Path, int, int] | None = None


class Files:
    """Answers requests and counts them."""

    def __init__(self, root: Path, *, bandwidth: float, latency: float, errors: int) -> None:
        self.root = root.resolve(strict=True)
        self.bucket = Bucket(bandwidth, burst=2 * _CHUNK)
        self.latency = latency
        self.errors = errors
        self.count: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()

    def stats(self) -> dict[str, int]:
        """Return all counters; `files` is the number of different files read."""
        names = ("connections", "requests", "gets", "heads", "listings", "errors", "bytes")
        return {name: self.count[name] for name in names} | {"files": len(self.reads)}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until the client closes it."""
        self.count["connections"] += 1
        try:
            while (request := await read_request(reader)) is not None:
                await self._answer(request, writer)
                if not request.keep:
                    break
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            self.count["broken"] += 1
        finally:
            writer.close()

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> None:
        if request.path == "/stats":
            reply = Reply(
                "200 OK", {"Content-Type": "application/json"}, self._tell(request.method)
            )
        else:
            self.count["requests"] += 1
            await asyncio.sleep(self.latency)
            reply = self._find(request)
        nbytes = reply.file[2] if reply.file else len(reply.body)
        headers = {"Content-Length": str(nbytes), "Server": "creel-testbed"} | reply.headers
        lines = [f"HTTP/1.1 {reply.status}", *(f"{k}: {v}" for k, v in headers.items()), "", ""]
        writer.write("\r\n".join(lines).encode())
        if request.method != "HEAD":
            await self._send(reply, writer)
        await writer.drain()

    def _tell(self, method: str) -> bytes:
        body = json.dumps(self.stats()).encode()
        if method == "POST":
            self.count.clear()
            self.reads.clear()
        return body

    def _find(self, request: Request) -> Reply:
        path = self.root / request.path.lstrip("/")
        if not path.resolve().is_relative_to(self.root) or not path.exists():
            return Reply("404 Not Found", {})
        if path.is_dir():
            self.count["listings"] += 1
            return Reply("200 OK", {"Content-Type": "text/html; charset=utf-8"}, listing(path))
        self.count["heads" if request.method == "HEAD" else "gets"] += 1
        if request.method == "GET" and self.errors and self.count["gets"] % self.errors == 0:
            self.count["errors"] += 1
            return Reply("503 Service Unavailable", {"Retry-After": "0"})
        return self._file(path, request)

    def _file(self, path: Path, request: Request) -> Reply:
        stat = path.stat()
        headers = {
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
            "ETag": f'"{stat.st_mtime_ns:x}-{stat.st_size:x}"',
            "Last-Modified": formatdate(stat.st_mtime, usegmt=True),
        }
        if not request.ranged:
            return Reply("200 OK", headers, file=(path, 0, stat.st_size))
        if request.first < 0:  # the last `last` bytes
            first, last = max(stat.st_size - request.last, 0), stat.st_size - 1
        else:
            last = stat.st_size - 1 if request.last < 0 else min(request.last, stat.st_size - 1)
            first = request.first
        if first > last:
            return Reply("416 Range Not Satisfiable", {"Content-Range": f"bytes */{stat.st_size}"})
        headers["Content-Range"] = f"bytes {first}-{last}/{stat.st_size}"
        return Reply("206 Partial Content", headers, file=(path, first, last - first + 1))

    async def _send(self, reply: Reply, writer: asyncio.StreamWriter) -> None:
        if reply.file is None:
            writer.write(reply.body)
            return
        path, offset, left = reply.file
        self.reads[str(path)] += 1
        fd = os.open(path, os.O_RDONLY)
        try:
            while left > 0:
                piece = os.pread(fd, min(left, _CHUNK), offset)
                if not piece:
                    raise ConnectionError(f"{path} became shorter")
                await self.bucket.take(len(piece))
                writer.write(piece)
                await writer.drain()
                self.count["bytes"] += len(piece)
                offset, left = offset + len(piece), left - len(piece)
        finally:
            os.close(fd)


def listing(folder: Path) -> bytes:
    """Return a folder as a page of links; folders end with a slash."""
    names = sorted(f"{p.name}/" if p.is_dir() else p.name for p in folder.iterdir())
    links = (f'<a href="{urllib.parse.quote(n)}">{html.escape(n)}</a><br>' for n in names)
    return ("<!doctype html>\n" + "\n".join(links)).encode()


async def read_request(reader: asyncio.StreamReader) -> Request | None:
    """Return the next request of a connection, None at its end."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as e:
        if e.partial:
            raise
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, version = first.split(" ", 2)
    headers = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
    await reader.readexactly(int(headers.get("content-length", 0)))
    keep = headers.get("connection", "").lower() != "close" and version == "HTTP/1.1"
    path = urllib.parse.unquote(urllib.parse.urlsplit(target).path)
    start, dash, end = headers.get("range", "").removeprefix("bytes=").partition("-")
    return Request(method, path, int(start or -1), int(end or -1), keep, bool(dash))


async def run(files: Files, host: str, port: int) -> None:
    """Serve until standard input ends."""
    server = await asyncio.start_server(files.serve, host, port, limit=_MAX_HEAD)
    host, port = server.sockets[0].getsockname()
    sys.stdout.write(f"listening on http://{host}:{port}\n")
    sys.stdout.flush()
    async with server:
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        os._exit(0)  # without waiting for open connections


def main() -> None:
    """Parse the arguments and serve."""
    parser = argparse.ArgumentParser(description="A slow, counting HTTP server on loopback.")
    parser.add_argument("root", type=Path)
    parser.add_argument("--bandwidth", type=float, default=0, help="bytes per second, 0: no limit")
    parser.add_argument("--latency", type=float, default=0, help="seconds before each answer")
    parser.add_argument("--errors", type=int, default=0, help="every n-th GET answers 503")
    parser.add_argument("--host", default="127.0.0.1", help="where to listen")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    args = parser.parse_args()
    files = Files(args.root, bandwidth=args.bandwidth, latency=args.latency, errors=args.errors)
    asyncio.run(run(files, args.host, args.port))


if __name__ == "__main__":
    main()
