"""RedisStream: keeps a log in Redis 7 or Valkey, where producers and readers share no folder.

    KEY           a Redis stream: entry 1-n says of chunk n its `nbytes`, and `at`, when it was
                  written, in seconds
    KEY:n         the bytes of chunk n, a string
    KEY:n:kept    a hash of records of a deleted chunk that stay, by their first byte; KEY:parts has
                  the numbers of such chunks
    KEY:notes     a hash of the notes; KEY:readers and KEY:memories, of those in such a folder

`XADD KEY 1-*` gives the next number and never one twice.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from creel.errors import ConfigError, SourceError

if TYPE_CHECKING:
    from creel.streams.files import Piece

#: Appends once, though the client sends it again after it has lost the answer: ARGV[2] says by
#: whom, ARGV[3] which chunk of theirs it is.
_APPEND = """
local last = redis.call('HGET', KEYS[2], ARGV[2])
local chunk, n = string.match(last or '', '^(%S+) (%d+)$')
if chunk == ARGV[3] then return tonumber(n) end
local about = {'nbytes', #ARGV[1], 'at', redis.call('TIME')[1]}
n = string.match(redis.call('XADD', KEYS[1], '1-*', unpack(about)), '%-(%d+)$')
redis.call('SET', KEYS[1] .. ':' .. n, ARGV[1])
redis.call('HSET', KEYS[2], ARGV[2], ARGV[3] .. ' ' .. n)
return tonumber(n)
"""
#: Deletes a chunk, but for records that it puts into a hash, by their first byte.
_DELETE = """
local kept = {}
for i = 2, #ARGV, 2 do
  kept[ARGV[i]] = true
  local record = redis.call('GETRANGE', KEYS[2], ARGV[i], ARGV[i] + ARGV[i + 1] - 1)
  if record ~= '' then redis.call('HSET', KEYS[3], ARGV[i], record) end
end
redis.call('XDEL', KEYS[1], ARGV[1])
redis.call('UNLINK', KEYS[2])
for _, first in ipairs(redis.call('HKEYS', KEYS[3])) do
  if not kept[first] then redis.call('HDEL', KEYS[3], first) end
end
redis.call(next(kept) and 'SADD' or 'SREM', KEYS[4], string.sub(ARGV[1], 3))
"""
#: Seconds without an answer.
_DEADLINE_S = 30.0


def is_redis(address: str) -> bool:
    return address.startswith(("redis://", "rediss://"))


class RedisStream:
    """See `Medium`. Pickles without its connection."""

    recycles = False

    def __init__(self, address: str) -> None:
        """`address`: redis://[user:password@]host[:port]/key, rediss:// with TLS.

        Raises:
            ConfigError: it names no key, or the package redis is missing.
        """
        parts = urlsplit(address)
        self._key = parts.path.strip("/")
        self.path = f"{parts.scheme}://{parts.netloc}/{self._key}"
        if not self._key or not parts.netloc or "/" in self._key:
            raise ConfigError(f"{shown(address)} is not redis://host:port/key")
        self._client: Any = None
        self._me, self._appended = f"writer.{uuid.uuid4().hex}", 0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_client": None, "_me": f"writer.{uuid.uuid4().hex}"}

    def address(self, number: int) -> str:
        return f"{self.path}/{number:09}"

    # --- chunks ---------------------------------------------------------------------------------

    def append(self, data: Sequence[memoryview], number: int, spare: int | None = None) -> int:
        del number, spare  # the server counts
        self._appended += 1
        return int(
            self._do(
                "eval",
                _APPEND,
                2,
                self._key,
                f"{self._key}:notes",
                b"".join(data),
                self._me,
                self._appended,
            )
        )

    def stat(self, number: int) -> tuple[int, float] | None:
        for _, about in self._do("xrange", self._key, f"1-{number}", f"1-{number}"):
            return int(about[b"nbytes"]), float(about[b"at"])
        return None

    def numbers(self) -> list[int]:
        there = [int(entry.partition(b"-")[2]) for entry, _ in self._do("xrange", self._key)]
        return sorted([*map(int, self._do("smembers", f"{self._key}:parts")), *there])

    def fill(self, pieces: Sequence[Piece]) -> int | None:
        sizes = [sum(map(len, buffers)) for _, _, buffers in pieces]
        with self._failing():
            asked = self._server().pipeline(transaction=False)
            for (number, offset, _), nbytes in zip(pieces, sizes, strict=True):
                asked.getrange(f"{self._key}:{number}", offset, offset + nbytes - 1)
            parts = asked.execute()
        for (number, offset, buffers), nbytes, part in zip(pieces, sizes, parts, strict=True):
            view = memoryview(part or self._kept(number, offset, nbytes))
            if len(view) != nbytes:
                return number
            for out in buffers:
                out[:], view = view[: len(out)], view[len(out) :]
        return None

    def _kept(self, number: int, offset: int, nbytes: int) -> bytes:
        """Return some of the records that `delete` left of a chunk; fewer if they are not there."""
        data = b""
        while len(data) < nbytes:
            record = self._do("hget", f"{self._key}:{number}:kept", offset + len(data))
            if record is None:
                break
            data += record
        return data

    def delete(self, number: int, but: Sequence[tuple[int, int]] = ()) -> None:
        kept = [str(n) for part in but for n in part]
        self._do(
            "eval",
            _DELETE,
            4,
            self._key,
            f"{self._key}:{number}",
            f"{self._key}:{number}:kept",
            f"{self._key}:parts",
            f"1-{number}",
            *kept,
        )

    # --- notes ----------------------------------------------------------------------------------

    def tidy(self) -> None:
        pass  # commands are done as a whole, or not at all

    def note(self, name: str) -> bytes | None:
        text: bytes | None = self._do("hget", *self._field(name))
        return text

    def notes(self, folder: str) -> dict[str, bytes]:
        by_name = self._do("hgetall", f"{self._key}:{folder}")
        return {name.decode(): data for name, data in by_name.items()}

    def write(self, name: str, data: bytes, *, new: bool = False) -> bool:
        wrote = self._do("hsetnx" if new else "hset", *self._field(name), data)
        return bool(wrote) or not new

    def _field(self, name: str) -> tuple[str, str]:
        """Return the hash of a note, and its name there."""
        folder, _, field = name.rpartition("/")
        return f"{self._key}:{folder or 'notes'}", field

    # --- the server -----------------------------------------------------------------------------

    def _do(self, command: str, *args: Any) -> Any:
        with self._failing():
            return getattr(self._server(), command)(*args)

    def _server(self) -> Any:
        if self._client is None:
            import redis

            server = self.path.rpartition("/")[0]
            self._client = redis.Redis.from_url(server, socket_timeout=_DEADLINE_S)
        return self._client

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Raise SourceError for an error of the client or the server."""
        try:
            import redis
        except ImportError as e:
            text = (
                f"{self.path.partition(':')[0]}:// needs {e.name}: pip install 'creel-data[redis]'"
            )
            raise ConfigError(text) from None
        try:
            yield
        except redis.RedisError as e:
            raise SourceError(0, str(e), shown(self.path)) from None


def shown(address: str) -> str:
    """Return an address without a password.

    >>> shown("redis://me:secret@host:6379/sim")
    'redis://host:6379/sim'
    """
    scheme, separator, location = address.partition("://")
    return f"{scheme}://{location.rpartition('@')[2]}" if separator else address
