"""Functions of all remote stores: version tags of answers, and many requests at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

#: Versions requested at a time; each request is a round trip of few bytes.
AT_ONCE = 32
#: Bytes per second; a slower answer counts as a time-out.
SLOWEST_BPS = 16 << 10


def of_each(job: Callable[[str], int], uris: Sequence[str]) -> list[int | Exception]:
    """Return the result or exception of `job` for each address; runs many jobs at a time."""

    def one(uri: str) -> int | Exception:
        try:
            return job(uri)
        except Exception as e:  # noqa: BLE001  stores raise what they like
            return e

    if len(uris) <= 1:
        return [one(uri) for uri in uris]
    with ThreadPoolExecutor(min(AT_ONCE, len(uris)), "creel-version") as pool:
        try:
            return list(pool.map(one, uris))
        except RuntimeError:  # no thread available
            return [one(uri) for uri in uris]


def tag_of(headers: Mapping[str, str], size: int | None) -> str:
    """Return a text that identifies a version of an object, or "" if there is none.

    >>> tag_of({"ETag": '"a"', "Last-Modified": "Sun"}, 9), tag_of({"Last-Modified": "Sun"}, 9)
    ('"a"', 'Sun 9')
    """
    tag = headers.get("ETag") or headers.get("etag") or headers.get("generation")
    if tag:
        return tag
    when = headers.get("Last-Modified") or headers.get("updated")
    return f"{when} {size}" if when and size is not None else ""
