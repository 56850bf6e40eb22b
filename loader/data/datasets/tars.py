"""TarDataset: WebDataset shards as a map-style dataset, without unpacking."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from creel.cache.storage.lookup import status_of
from creel.cache.storage.manifest import ANY, Manifest
from creel.cache.storage.stores.access import Access, Options, StorageOptions
from creel.cache.storage.uris import absolute, scheme_of, several, strings
from creel.errors import ConfigError, SourceError
from creel.loader.data.datasets.base import (
    CreelDataset,
    Sample,
    check_callable,
    each,
    position,
    positions,
)
from creel.loader.data.datasets.tarindex import members
from creel.loader.data.decoded.limit import Decoded
from creel.loader.data.reading.kept_listing import cache_folder
from creel.loader.data.reading.listing import braces
from creel.policies.arrays import Ids, Ints

#: "dir/0001.seg.png" is the key "dir/0001" and the extension "seg.png", as in WebDataset.
_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)", re.DOTALL)
_SCHEMA = pa.schema(
    [
        ("shard", pa.int32()),
        ("key", pa.large_string()),
        ("extension", pa.large_string()),
        ("offset", pa.int64()),
        ("length", pa.int64()),
        ("first", pa.bool_()),
    ]
)
_STAMP = b"creel.shards"
_State: TypeAlias = tuple[int, ...] | int


class _ShardIndex(NamedTuple):
    """Columns with one row per member, except `key` and `start`."""

    shard: NDArray[np.int32]
    key: pa.Array  # one per sample
    extension: NDArray[np.unsignedinteger]  # number in `extensions`
    extensions: list[str]
    offset: Ints
    length: Ints
    start: Ints  # (samples + 1,) first member of each sample


class TarDataset(CreelDataset):
    """A sample is a dict: "__key__", and for each extension its bytes or decoded value.

    Consecutive members whose names agree up to the first dot form one sample, as in WebDataset.

    Args:
        shards: paths or URIs of uncompressed tars; names may have braces ("train-{000..127}.tar").
        decode: functions by extension, from bytes to a value; other extensions stay bytes.
        transform: from the dict to a sample.
        extensions: the only ones to read, None for all.
        index: where to keep the list of members, which takes one pass over the headers to make: a
            path, "beside" (next to the first shard), "user" (in the user's cache folder), or None
            for nowhere. It is rebuilt when a shard's size or local modification time has changed.
        storage_options: of the client that reads remote shards, in fsspec's convention (`key`,
            `secret`, `endpoint_url`, ...); what they leave open, the environment decides.
        keep_decoded: memory of the node for what these functions returned (docs/decode-once.md): a
            size ("64GiB" or bytes), "auto", or `creel.Decoded`. Each member is then decoded
            once in a job on a node. They must draw no random numbers.
        shared_as: a name under which other processes share what is kept; see `creel.kept`.

    Samples of a shard that was replaced or written after indexing raise SourceError, because its
    members may have moved. (Only local shards, and ones in S3 and gs, tell that.)

    Raises:
        ConfigError: a shard that is compressed, damaged or empty; no samples; `keep_decoded`
            without `decode`.
        NotFoundError: a missing shard.
    """

    def __init__(
        self,
        shards: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        decode: Mapping[str, Callable[[bytes], Sample]] | None = None,
        transform: Callable[[dict[str, Sample]], Sample] | None = None,
        extensions: Sequence[str] | None = None,
        index: str | os.PathLike[str] | None = None,
        storage_options: Options = None,
        keep_decoded: str | int | Decoded | None = None,
        shared_as: str | None = None,
    ) -> None:
        self.storage_options = storage_options
        self.shards = [absolute(name) for s in several(shards) for name in braces(os.fspath(s))]
        if not self.shards:
            raise ConfigError("a TarDataset needs at least one shard")
        if decode is not None and not isinstance(decode, Mapping):
            raise ConfigError(f"decode is a function for each extension, not {decode!r}")
        self.decode = dict(decode or {})
        check_callable(transform=transform, **{f"decode of {e}": f for e, f in self.decode.items()})
        if isinstance(extensions, str):
            raise ConfigError(f"extensions is a list, as in extensions=[{extensions!r}]")
        self._keep_decoded(keep_decoded, shared_as)
        self.transform = transform
        path = None if index is None else _index_path(index, self.shards)
        local = [None if scheme_of(shard) else _state(shard) for shard in self.shards]
        status = each(lambda shard: status_of(shard, storage_options), self.shards)
        self._some_remote = any(map(scheme_of, self.shards))
        #: What tells that a shard was replaced since: the state of a local one, else a version.
        self._indexed = [state or pin for state, (_, pin) in zip(local, status, strict=True)]
        sizes = [size for size, _ in status]
        table = _table(self.shards, sizes, self._indexed, path, storage_options)
        self._index = _index(table, extensions)
        if not len(self):
            selection = "" if extensions is None else f" with {' or '.join(extensions)}"
            raise ConfigError(f"no samples{selection} in {self.shards[0]} and the other shards")

    def __len__(self) -> int:
        return len(self._index.start) - 1

    @property
    def object_count(self) -> int:
        return len(self._index.offset)

    @property
    def decoders(self) -> Mapping[str, Callable[[bytes], Sample]]:
        return self.decode

    @property
    def remote(self) -> bool:
        return self._some_remote

    @property
    def indexed(self) -> str:
        return xxhash.xxh3_128_hexdigest(repr(self._indexed).encode())

    @property
    def keys(self) -> Sequence[str]:
        """Key of every sample, a list made at each access."""
        keys: list[str] = self._index.key.to_pylist()
        return keys

    def __getitem__(self, index: int) -> Sample:
        i = position(index, len(self))
        table = self._index
        sample: dict[str, Sample] = {"__key__": table.key[i].as_py()}
        for member in range(int(table.start[i]), int(table.start[i + 1])):
            extension = table.extensions[table.extension[member]]
            decode = self.decode.get(extension)
            sample[extension] = self.decoded(member, decode) if decode else self.read(member)
        self._check_shard(int(table.shard[int(table.start[i])]))
        return sample if self.transform is None else self.transform(sample)

    def objects(self, indices: Ints) -> tuple[Ids, Ints]:
        """Return the members of each sample in the order of the tar; see `CreelDataset.objects`."""
        wanted = positions(indices, len(self))
        begin = self._index.start[wanted]
        counts = self._index.start[wanted + 1] - begin
        before = np.cumsum(counts) - counts
        ids = np.arange(counts.sum()) + np.repeat(begin - before, counts)
        return ids.astype(np.int32), counts

    def read(self, object_id: int) -> bytes:
        if self._index.length[object_id] == 0:
            return b""
        return super().read(object_id)

    def _check_shard(self, number: int) -> None:
        """Raise SourceError if a shard has changed since it was indexed; call after reading it."""
        shard, indexed = self.shards[number], self._indexed[number]
        if not scheme_of(shard) and _state(shard) != indexed:
            reason = "has changed since it was indexed: make the TarDataset anew"
            raise SourceError(errno.ESTALE, reason, shard)

    def _build_manifest(self) -> Manifest:
        table = self._index
        uris = pa.DictionaryArray.from_arrays(table.shard, pa.array(self.shards, pa.large_string()))
        ones = np.ones(len(table.offset), np.int64)
        manifest = Manifest.of_runs(uris.cast(pa.large_string()), table.offset, table.length, ones)
        first = np.flatnonzero(np.diff(table.shard, prepend=-1)).tolist()
        indexed = [self._indexed[shard] for shard in table.shard[first].tolist()]
        pins = [state if isinstance(state, int) else ANY for state in indexed]
        return manifest.pinned(zip(first, pins, strict=True))


def _state(path: str) -> tuple[int, ...] | None:
    """A value that changes when a local file may have changed; None if stat fails."""
    try:
        status = os.stat(path)  # noqa: PTH116  fast: called per sample
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev


# --- the index --------------------------------------------------------------------------------


def _table(
    shards: list[str], sizes: list[int], states: list[_State], path: Path | None, options: Options
) -> pa.Table:
    """The members of all shards: loaded from `path`, or made and then saved there."""
    stamp = b"" if path is None else _stamp(shards, sizes, states, options)
    if path is not None and (saved := _load(path, stamp)) is not None:
        return saved
    numbered = list(zip(range(len(shards)), shards, sizes, strict=True))
    tables = each(lambda shard: _members_of(*shard, options), numbered)
    table = pa.concat_tables(tables).combine_chunks()
    if path is not None:
        _save(path, table.replace_schema_metadata({_STAMP: stamp}))
    return table


def _members_of(number: int, path: str, size: int, options: Options) -> pa.Table:
    """The members of one shard that belong to samples, in order."""
    keys: list[str] = []
    extensions: list[str] = []
    ranges: list[tuple[int, int]] = []
    first: list[bool] = []
    seen: set[str] = set()
    for name, offset, nbytes in members(path, size, options):
        match = _NAME.fullmatch(name)
        if match is None or name.rpartition("/")[2].startswith("__"):
            continue  # names without extension and "__meta__" files belong to no sample
        key, extension = match[1], match[2].lower()
        new = not keys or key != keys[-1]
        if new:
            seen.clear()
        if extension in seen:
            raise ConfigError(f"{path} has {name!r} twice in one sample")
        seen.add(extension)
        keys.append(key)
        extensions.append(extension)
        ranges.append((offset, nbytes))
        first.append(new)
    where = np.array(ranges, np.int64).reshape(-1, 2)
    columns = [
        np.full(len(keys), number, np.int32), strings(keys), strings(extensions),
        where[:, 0].copy(), where[:, 1].copy(), np.array(first, np.bool_),
    ]  # fmt: skip
    return pa.table([pa.array(c) for c in columns], schema=_SCHEMA)


def _index(table: pa.Table, extensions: Sequence[str] | None) -> _ShardIndex:
    """Columns as numpy, with one key per sample and only the requested extensions."""
    first = table.column("first").to_numpy()
    sample = np.cumsum(first) - 1
    coded = table.column("extension").combine_chunks().dictionary_encode()
    names: list[str] = coded.dictionary.to_pylist()
    code = coded.indices.to_numpy().astype(np.min_scalar_type(len(names)))
    keep = np.ones(len(table), np.bool_)
    if extensions is not None:
        keep = np.isin(code, [i for i, name in enumerate(names) if name in extensions])
    kept, members_of = np.unique(sample[keep], return_counts=True)
    keys = table.column("key").combine_chunks().filter(pa.array(first)).take(pa.array(kept))
    return _ShardIndex(
        shard=table.column("shard").to_numpy()[keep],
        key=keys,
        extension=code[keep],
        extensions=names,
        offset=table.column("offset").to_numpy()[keep],
        length=table.column("length").to_numpy()[keep],
        start=np.concatenate([[0], np.cumsum(members_of)]).astype(np.int64),
    )


# --- the kept index ---------------------------------------------------------------------------


def _index_path(index: str | os.PathLike[str], shards: list[str]) -> Path:
    if not isinstance(index, (str, os.PathLike)):
        raise ConfigError(f"index is 'beside', 'user' or a path, not {index!r}")
    name = f"creel-{xxhash.xxh3_64_hexdigest('|'.join(shards).encode())}.index.arrow"
    if index == "beside":
        if scheme_of(shards[0]):
            raise ConfigError(f"index='beside' writes next to {shards[0]}: use 'user' or a path")
        return Path(shards[0]).parent / name
    if index == "user":
        return cache_folder() / name
    return Path(index).expanduser()


def _stamp(shards: list[str], sizes: list[int], states: list[_State], options: Options) -> bytes:
    """A digest of the shards' names and access, their sizes and modification times or versions."""
    digest = xxhash.xxh3_128()
    schemes = {scheme for scheme in map(scheme_of, shards) if scheme}
    digest.update(Access.of(schemes, StorageOptions(options)).identity.encode() if schemes else b"")
    for shard, size, state in zip(shards, sizes, states, strict=True):
        changed = state[1] if isinstance(state, tuple) else state
        digest.update(f"{shard}\0{size}\0{changed}\n".encode())
    return digest.hexdigest().encode()


def _load(path: Path, stamp: bytes) -> pa.Table | None:
    """A saved index; None if it is missing, damaged, or of other shards."""
    try:
        with pa.OSFile(str(path)) as f, pa.ipc.open_file(f) as reader:
            if (reader.schema.metadata or {}).get(_STAMP) != stamp:
                return None
            table = reader.read_all().combine_chunks()
    except (OSError, pa.ArrowException):
        return None
    return table if table.schema.equals(_SCHEMA) else None


def _save(path: Path, table: pa.Table) -> None:
    """Write to a temporary file, then rename, so that no reader sees half an index."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with pa.ipc.new_file(str(draft), table.schema) as writer:
            writer.write_table(table)
        draft.replace(path)
    except OSError as e:
        draft.unlink(missing_ok=True)
        raise ConfigError(f"the index cannot be kept at {path}: {e.strerror}") from e
