"""Functions of all remote stores: version tags of answers, and many requests at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

#: Versions requested at a time; each request is a round trip of few bytes.
AT_ONCE = 32
#: Bytes per second; a slower answer counts as a time-out.
SLOWEST_BPS = 16 << 10


def of_each(
    job: Callable[[T], R], items: Sequence[T], at_once: int = AT_ONCE
) -> list[R | Exception]:
    """Return the result or exception of `job` for each item; runs many jobs at a time."""

    def one(item: T) -> R | Exception:
        try:
            return job(item)
        except Exception as e:  # noqa: BLE001  stores raise what they like
            return e

    if len(items) <= 1:
        return [one(item) for item in items]
    with ThreadPoolExecutor(min(at_once, len(items)), "creel-requests") as pool:
        try:
            return list(pool.map(one, items))
        except RuntimeError:  # no thread available
            return [one(item) for item in items]


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
