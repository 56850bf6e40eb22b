"""Google Cloud Storage, by its XML API."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from creel.cache.storage.buckets.bucket import Bucket
from creel.system.python_open import text_of

#: Options of a client that obstore understands (pyarrow's names), or does not need.
_KNOWN = frozenset(
    {"anonymous", "access_token", "credential_token_expiration", "endpoint_override", "scheme"}
    | {"project_id"}
)
#: What only obstore reads: the client that lists and the one that reads would differ.
_OF_OBSTORE = (
    "SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_BEARER_TOKEN", "GOOGLE_BASE_URL",
    "GOOGLE_SKIP_SIGNATURE",
)  # fmt: skip
#: Google's own variable of another server, a test's.
_EMULATOR = "CLOUD_STORAGE_EMULATOR_ENDPOINT"
#: Kinds of key files that obstore understands.
_KEY_FILES = {"service_account", "authorized_user"}


def bucket_of(uri: str, options: Mapping[str, Any]) -> Bucket | None:
    """See `find.bucket_of`. An address may begin with `anonymous@`, as pyarrow has it."""
    parts = urlsplit(uri)
    named: dict[str, Any] = {**options, **dict(parse_qsl(parts.query))}
    user, _, bucket = parts.netloc.rpartition("@")
    if user:
        named["anonymous"] = True
    account = None if user not in {"", "anonymous"} else _account_of(named)
    if (
        account is None
        or named.keys() - _KNOWN
        or any(name.startswith(_OF_OBSTORE) for name in os.environ)
    ):
        return None
    server = str(named.get("endpoint_override") or os.environ.get(_EMULATOR) or "")
    server = server.rstrip("/") or "https://storage.googleapis.com"
    if "://" not in server:
        server = f"{named.get('scheme') or 'https'}://{server}"
    # The entity tag of this API is not that of the other one, but both tell the generation.
    return Bucket("GCSStore", server, {**account, "bucket": bucket, "base_url": server}, "version")


def _account_of(options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return who reads, as obstore's arguments; None if only Google's library finds out."""
    if options.get("anonymous"):
        return {"skip_signature": True}
    if token := options.get("access_token"):
        given = {"token": token, "expires_at": None}
        return {"credential_provider": lambda: given}
    path = _key_file()
    if path is None:
        return {} if _is_google() else None
    with suppress(OSError, ValueError):
        if json.loads(text_of(path)).get("type") in _KEY_FILES:
            return {"application_credentials": path}
    return None


def _key_file() -> str | None:
    """Return the file of the default credentials; None: there is none, a machine has an account."""
    if path := os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
        return path
    folder = os.environ.get("CLOUDSDK_CONFIG") or os.path.expanduser("~/.config/gcloud")  # noqa: PTH111
    path = f"{folder}/application_default_credentials.json"
    return path if os.path.exists(path) else None  # noqa: PTH110


def _is_google() -> bool:
    """Return whether this is a machine of Google's, whose server of metadata has an account."""
    if os.environ.get("GCE_METADATA_HOST"):
        return True
    with suppress(OSError):
        return "Google" in text_of("/sys/class/dmi/id/product_name")
    return False
