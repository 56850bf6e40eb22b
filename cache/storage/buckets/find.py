"""Which addresses obstore reads: those of a cloud whose options it understands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from creel.cache.storage.buckets import azure, gs, s3
from creel.cache.storage.buckets.bucket import Bucket

_OF_SCHEME: dict[str, Callable[[str, Mapping[str, Any]], Bucket | None]] = {
    "s3": s3.bucket_of,
    "gs": gs.bucket_of,
    "gcs": gs.bucket_of,
    **dict.fromkeys(("az", "abfs", "abfss"), azure.bucket_of),
}


def bucket_of(uri: str, options: Mapping[str, Any]) -> Bucket | None:
    """Return the bucket of an address; None: obstore cannot do all that it or the options ask.

    options: of the client, with pyarrow's names. Every setting is made of them, as obstore would
        take what is missing from the environment, which in a daemon is that of another job.
    """
    scheme = uri.partition("://")[0].lower()
    return _OF_SCHEME[scheme](uri, options) if scheme in _OF_SCHEME else None
