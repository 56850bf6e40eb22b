"""RedisStore: reads the chunks of streams in Redis (`creel.streams.redis_stream`)."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence

from creel.cache.memory.buffers import copy_over
from creel.cache.storage import version
from creel.cache.storage.stores.store import Filled, Run, StoredFile, too_short
from creel.errors import SourceError
from creel.streams.redis_stream import RedisStream

#: Chunks are never changed.
_VERSION = version.of_tag("chunk")


class RedisStore:
    """See `Store`. An address is that of a stream and, behind a slash, a chunk's number."""

    def __init__(self) -> None:
        self._streams: dict[str, RedisStream] = {}

    def read(
        self, stored: StoredFile, offset: int, length: int, *, versioned: bool = False
    ) -> tuple[bytes, int]:
        del versioned
        return bytes(self._read(stored.uri, [(offset, length)])[0]), _VERSION

    def fill(self, stored: StoredFile, runs: Sequence[Run]) -> Iterator[Filled]:
        bodies = self._read(stored.uri, [(offset, length) for offset, length, _ in runs])
        for (_, _, buffers), data in zip(runs, bodies, strict=True):
            copy_over(memoryview(data), buffers)
            yield Filled(1, _VERSION)

    def versions(self, uris: Sequence[str]) -> list[int | Exception]:
        return [_VERSION] * len(uris)

    def status(self, uri: str) -> tuple[int | None, int]:
        stream, number = self._chunk(uri)
        entry = stream.stat(number)
        return (None if entry is None else entry[0]), _VERSION

    def list(self, root: str) -> Iterator[tuple[str, int]]:
        raise SourceError(errno.ENOTSUP, "a stream is read by creel.Stream", root)

    def _read(self, uri: str, parts: Sequence[tuple[int, int]]) -> Sequence[bytearray]:
        stream, number = self._chunk(uri)
        buffers = [bytearray(length) for _, length in parts]
        pieces = [
            (number, offset, [memoryview(data)])
            for (offset, _), data in zip(parts, buffers, strict=True)
        ]
        if stream.fill(pieces) is not None:
            raise too_short(uri, sum(map(len, buffers)), 0)
        return buffers

    def _chunk(self, uri: str) -> tuple[RedisStream, int]:
        address, _, number = uri.rpartition("/")
        stream = self._streams.get(address)
        if stream is None:
            stream = self._streams[address] = RedisStream(address)
        return stream, int(number)
