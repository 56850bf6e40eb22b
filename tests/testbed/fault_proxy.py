"""A proxy in front of an object store that breaks answers at random, and says how.

    with FaultyProxy(s3.port, rng, share=0.3) as proxy: ...

It speaks as much of HTTP/1.1 as reading objects needs: requests without a body, answers with a
Content-Length. Each answer to a GET breaks with probability `share`, in one of `FAULTS`.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections import Counter

import numpy as np

#: Instead of an answer, or in it.
FAULTS = (
    "reset before",  # the connection, before the answer's first byte
    "reset within",  # in the middle of the body
    "cut",  # the body ends early, with the connection
    "short",  # the body lacks bytes, and its headers agree with it
    "flipped",  # a bit of the body is another one
    "delay",  # the body stops for a moment
    "503",
    "500",
    "empty",  # the connection ends without an answer
)
STALL = "stall"  # the body stops, and the connection stays
_STATUS = {"503": b"503 Slow Down", "500": b"500 Internal Server Error"}
_CODE = {"503": b"SlowDown", "500": b"InternalError"}


class FaultyProxy:
    """The proxy, in a thread of this process, while the `with` lasts.

    Args:
        port: of the store, on loopback.
        rng: draws the faults.
        share: of the answers that break.
        faults: those that are drawn.
        most: so many answers break, then no more.
    """

    def __init__(
        self,
        port: int,
        rng: np.random.Generator,
        share: float,
        faults: tuple[str, ...] = FAULTS,
        most: int = 1 << 62,
    ) -> None:
        self._share = share
        self._most = most
        self.count: Counter[str] = Counter()
        self._upstream = port
        self._rng = rng
        self._faults = faults
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> FaultyProxy:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._end = asyncio.Event()
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self._port = server.sockets[0].getsockname()[1]
        self._started.set()
        await self._end.wait()
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on the requests of one connection, until it ends or is broken."""
        up, down = await asyncio.open_connection("127.0.0.1", self._upstream)
        try:
            while True:
                request = await reader.readuntil(b"\r\n\r\n")
                down.write(request)
                if not await self._answer(up, writer, has_body=request[:4] != b"HEAD"):
                    return
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass  # the client has gone, or the proxy ends
        finally:
            down.close()
            writer.close()

    async def _answer(
        self, up: asyncio.StreamReader, writer: asyncio.StreamWriter, *, has_body: bool
    ) -> bool:
        """Pass on an answer, or break it; return whether the connection goes on."""
        head = await up.readuntil(b"\r\n\r\n")
        begin = head.lower().index(b"content-length:") + len(b"content-length:")
        digits = head[begin : head.index(b"\r\n", begin)]
        body = await up.readexactly(int(digits) if has_body else 0)
        good = head.split(b" ", 2)[1] in {b"200", b"206"} and self.count.total() < self._most
        if not (body and good and self._rng.random() < self._share):
            writer.write(head + body)
            await writer.drain()
            return True
        fault = str(self._rng.choice(self._faults))
        self.count[fault] += 1
        at = int(self._rng.integers(len(body)))
        if fault in _STATUS:
            text = b"<Error><Code>%s</Code></Error>" % _CODE[fault]
            status = _STATUS[fault], len(text), text
            writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % status)
            return True
        if fault in {"empty", "reset before"}:
            _end(writer, reset=fault != "empty")
            return False
        if fault == "short":
            head = head[:begin] + b" %d" % at + head[begin + len(digits) :]
        elif fault == "flipped":
            body = body[:at] + bytes([body[at] ^ 1 << int(self._rng.integers(8))]) + body[at + 1 :]
        elif fault == "delay":
            writer.write(head + body[:at])
            await asyncio.sleep(0.001)
            head, body, at = b"", body[at:], len(body)
        whole = fault in {"flipped", "delay"}
        writer.write(head + (body if whole else body[:at]))
        await writer.drain()
        if fault == STALL:
            await asyncio.sleep(3600)
        if fault in {"cut", "reset within"}:
            _end(writer, reset=fault != "cut")
            return False
        return True


def _end(writer: asyncio.StreamWriter, *, reset: bool) -> None:
    """End a connection, by a reset if asked for."""
    if reset:
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.close()
