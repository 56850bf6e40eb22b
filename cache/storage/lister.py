"""Listings by obstore, in a process of its own: page by page, and no thread of it in the caller's.

A training process lists before it forks workers, which obstore's threads would not survive
(`stores/obstore_store.py`). pyarrow's client, which can be used there, gives all of a folder in
one piece: of a million keys nobody would know for minutes how far it is.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import chain
from typing import IO, Any, cast
from urllib.parse import urlsplit

from creel.cache.storage.buckets.bucket import Bucket
from creel.cache.storage.buckets.find import bucket_of
from creel.cache.storage.stores.obstore_store import PAGE, ObstoreStore, Page
from creel.cache.storage.stores.requests import Requests, in_threads
from creel.cache.storage.stores.retry import public, retried, source_error
from creel.errors import SourceError
from creel.messages import survives
from creel.settings import FetchSettings
from creel.system.python_module import command_of

_log = logging.getLogger("creel.source")

#: Folders that are listed at a time; more of them in one may cost more requests than their keys.
_FOLDERS_AT_ONCE, _MAX_FOLDERS = 16, 1000
#: Of errors after which another client is to list: no way to say a key, and no such process here.
UNABLE = frozenset({errno.EILSEQ, errno.ENOSYS, errno.EAGAIN, errno.ENOMEM})
_SIZE_NBYTES = 4
_MODULE = "creel.cache.storage.lister"  # under `python -m`, `__name__` is "__main__"


def listed(
    root: str, options: Mapping[str, Any], settings: FetchSettings
) -> Iterator[tuple[str, int]] | None:
    """Yield the name below `root` and the size of each object; None: another client is to list.

    Google's is listed by pyarrow's client, as no server of tests has the listings of its XML API.

    Raises:
        SourceError: the storage fails, also after retries.
    """
    given = dict(options)
    if not (command_of(_MODULE) and survives(given) and find_spec("obstore")):
        return None
    google = root.lower().startswith(("gs:", "gcs:"))
    return None if google or bucket_of(root, given) is None else _listed(root, given, settings)


def _listed(
    root: str, options: dict[str, Any], settings: FetchSettings
) -> Iterator[tuple[str, int]]:
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(  # noqa: S603  our own interpreter and module
        command_of(_MODULE), stdin=pipe, stdout=pipe, stderr=nowhere
    ) as process:
        ask, answers = cast("IO[bytes]", process.stdin), cast("IO[bytes]", process.stdout)
        try:
            fetch = {name: getattr(settings, name) for name in settings.__struct_fields__}
            ask.write(json.dumps([root, options, fetch]).encode())
            ask.close()
            yield from _received(root, answers)
        finally:
            process.kill()


def _received(root: str, pipe: IO[bytes]) -> Iterator[tuple[str, int]]:
    while size := pipe.read(_SIZE_NBYTES):
        kind, answer = json.loads(pipe.read(int.from_bytes(size, "little")))
        if kind == "keys":
            yield from ((name, nbytes) for name, nbytes in answer)
            continue
        if kind == "failed":
            number, reason = answer
            raise SourceError(number, reason, public(root))
        _log.info("%s: listed by %d requests", public(root), answer)
        return
    raise SourceError(errno.ENOSYS, "the process that lists it has ended", public(root))


# --- in that process ------------------------------------------------------------------------------


def list_below(
    store: ObstoreStore, root: str, ask: Callable[..., Any], emit: Callable[[Page], object]
) -> None:
    """Hand the pages of a listing to `emit`, perhaps in several threads.

    `ask`: `retried`, for this root.

    The first page shows whether there are folders: these are listed at once, as an answer has 1,000
    keys at most.
    """
    pages = _pages(store, root, "", ask)
    first = next(pages, [])
    if not first and urlsplit(root).path.strip("/"):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), root)
    folders: Sequence[str] = ()
    if len(first) == PAGE and any("/" in name for name, _ in first):
        files, folders = ask(lambda: store.folder(root))
        if len(folders) <= _MAX_FOLDERS:
            first, pages = files, iter(())
        else:
            folders = ()

    def emit_all(pages: Iterable[Page]) -> None:
        for page in pages:
            emit(store.files_of(root, page))

    emit_all(chain([first], pages))
    of = partial(_pages, store, root, ask=ask)
    in_threads(lambda folder: emit_all(of(folder)), folders, _FOLDERS_AT_ONCE)


def _pages(store: ObstoreStore, root: str, folder: str, ask: Callable[..., Any]) -> Iterator[Page]:
    """Yield pages; one that fails is asked for again, from the last name on."""
    after, pages = "", store.pages(root, folder)

    def following() -> Page:
        nonlocal pages
        try:
            return next(pages, [])
        except Exception:
            pages = store.pages(root, folder, after)
            raise

    while page := ask(following, reached=bool(after)):
        after = page[-1][0] or after
        yield page


def main() -> None:
    """Answer the question on standard input."""
    root, options, fetch = json.load(sys.stdin.buffer)
    lock, requests, settings = threading.Lock(), Requests(), FetchSettings(**fetch)

    def say(kind: str, answer: object) -> None:
        data = json.dumps([kind, answer]).encode()
        with lock:
            sys.stdout.buffer.write(len(data).to_bytes(_SIZE_NBYTES, "little") + data)
            sys.stdout.buffer.flush()

    try:
        store = ObstoreStore(_bucket(root, options), settings.deadline_s, requests)
        ask = partial(retried, settings, uri=root, options=lambda: options)
        list_below(store, root, ask, partial(say, "keys"))
    except Exception as e:  # noqa: BLE001  stores raise what they like
        error = source_error(e, root, options)
        say("failed", [error.errno or 0, error.strerror or ""])
    else:
        say("end", requests.snapshot()["LIST"])


def _bucket(root: str, options: Mapping[str, Any]) -> Bucket:
    bucket = bucket_of(root, options)
    if bucket is None:
        raise SourceError(0, "the server of the bucket is not known", public(root))
    return bucket


if __name__ == "__main__":
    main()
