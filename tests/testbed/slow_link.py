"""A link to an object store that is as long and as narrow as asked, and counts its requests.

    with SlowLink(7480, latency_s=0.02, rate_Bps=125e6) as link: ... link.url, link.counts()

A proxy for TCP in a process of its own. What a client sends arrives `latency_s` later, which makes
it a round trip, as answers come at once. A connection takes as long to open, and all answers share
the rate.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections import Counter
from multiprocessing.connection import Connection

from testbed.http_server import Bucket

_CHUNK = 256 << 10


class SlowLink:
    """The link, while the `with` lasts."""

    def __init__(self, port: int, *, latency_s: float, rate_Bps: float = 0) -> None:  # noqa: N803
        """`port`: of the store, on loopback. `rate_Bps`: bytes a second, 0: no limit."""
        self._pipe, other = multiprocessing.Pipe()
        spawn = multiprocessing.get_context("spawn")
        arguments = port, latency_s, rate_Bps, other
        self._process = spawn.Process(target=_run, args=arguments, daemon=True)

    def __enter__(self) -> SlowLink:
        self._process.start()
        self.url = f"http://127.0.0.1:{self._pipe.recv()}"
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.send(False)
        self._process.join()

    def counts(self) -> Counter[str]:
        """Return the requests since the last call, by method."""
        self._pipe.send(True)
        counts: Counter[str] = self._pipe.recv()
        return counts


def _run(port: int, latency_s: float, rate: float, pipe: Connection) -> None:
    asyncio.run(_Link(port, latency_s, rate).serve(pipe))


class _Link:
    def __init__(self, port: int, latency_s: float, rate: float) -> None:
        self._port = port
        self._latency_s = latency_s
        self._bucket = Bucket(rate, burst=2 * _CHUNK)
        self._count: Counter[str] = Counter()

    async def serve(self, pipe: Connection) -> None:
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        loop = asyncio.get_running_loop()
        while await loop.run_in_executor(None, pipe.recv):
            pipe.send(self._count)
            self._count = Counter()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up, down = await asyncio.open_connection("127.0.0.1", self._port)
        await asyncio.sleep(self._latency_s)
        back = asyncio.ensure_future(self._answers(up, writer))
        loop = asyncio.get_running_loop()
        try:
            while data := await reader.read(_CHUNK):
                method = data[:8].partition(b" ")[0]
                if method in {b"GET", b"HEAD", b"PUT"}:
                    self._count[method.decode()] += 1
                loop.call_later(self._latency_s, down.write, data)
            await asyncio.sleep(self._latency_s)
        except (ConnectionError, asyncio.CancelledError):
            back.cancel()  # the client has gone, or the link ends
        down.close()
        await asyncio.wait([back])

    async def _answers(self, up: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await up.read(_CHUNK):
                await self._bucket.take(len(data))
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        writer.close()
