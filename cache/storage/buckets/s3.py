"""S3: Amazon's, and that of servers of one's own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from creel.cache.storage.buckets.bucket import Bucket
from creel.system.python_open import text_of

#: Options of a client that this store understands (pyarrow's names).
_KNOWN = frozenset(
    {"access_key", "secret_key", "session_token", "anonymous", "region", "endpoint_override"}
    | {"scheme"}
)
#: Variables by which the AWS SDK in pyarrow chooses other servers of Amazon.
_OTHER_SERVERS = ("AWS_USE_FIPS_ENDPOINT", "AWS_USE_DUALSTACK_ENDPOINT")
_CONTAINER = ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI")
#: A machine's own server answers in milliseconds, or, behind a container's network, never.
_METADATA_S = 2.0


def bucket_of(uri: str, options: Mapping[str, Any]) -> Bucket | None:
    """See `find.bucket_of`."""
    parts = urlsplit(uri)
    named: dict[str, Any] = {**options, **dict(parse_qsl(parts.query))}
    if parts.username is not None:
        named = {k: v for k, v in named.items() if k not in {"session_token", "anonymous"}}
        named["access_key"], named["secret_key"] = map(
            unquote, (parts.username, parts.password or "")
        )
    named = {name: value for name, value in named.items() if value is not None}
    bucket = parts.netloc.rpartition("@")[2]
    account = _account_of(named)
    if account is None or named.keys() - _KNOWN or bucket.endswith("--x-s3"):
        return None
    endpoint, region = _server_of(named, bucket)
    if endpoint is None or (endpoint.startswith("https:") and _has_other_certificates()):
        return None
    config = {
        **account, "bucket": bucket, "region": region, "endpoint": endpoint,
        "aws_endpoint_url_s3": endpoint, "virtual_hosted_style_request": False,
        "request_payer": False, "s3_express": False,
    }  # fmt: skip
    return Bucket("S3Store", endpoint, config)


def _account_of(options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return who reads, as obstore's arguments; None if only the SDK in pyarrow finds out."""
    if options.get("anonymous"):
        return {"skip_signature": True}
    key, secret = options.get("access_key"), options.get("secret_key")
    if key and secret:
        keys = {"access_key_id": key, "secret_access_key": secret, "expires_at": None}
        keys["token"] = options.get("session_token")
        # As a function, which comes before whatever the environment says.
        return {"skip_signature": False, "credential_provider": lambda: keys}
    if key or secret or _has_aws_files() or os.environ.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        return None
    if any(map(os.environ.get, _CONTAINER)):
        return {"skip_signature": False}
    server = _metadata_server()
    return None if server is None else {"skip_signature": False, "metadata_endpoint": server}


def _metadata_server() -> str | None:
    """Return the server that gives the keys of an EC2 machine's role; None if there is no role."""
    from http.client import HTTPException

    off = os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true"
    named = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "").rstrip("/")
    if off or not (named or _is_ec2()):
        return None
    server = named or "http://169.254.169.254"
    put = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    try:
        token = _answer_of(f"{server}/latest/api/token", put, "PUT")
        headers = {"X-aws-ec2-metadata-token": token}
        role = _answer_of(f"{server}/latest/meta-data/iam/security-credentials/", headers, "GET")
    except (OSError, HTTPException, ValueError):
        return None
    return server if role else None


def _is_ec2() -> bool:
    with suppress(OSError):
        return "Amazon EC2" in text_of("/sys/class/dmi/id/sys_vendor")
    return False


def _answer_of(url: str, headers: Mapping[str, str], method: str) -> str:
    from http.client import HTTPConnection  # with ssl, which few daemons need

    parts = urlsplit(url)
    server = HTTPConnection(parts.netloc, timeout=_METADATA_S)
    try:
        server.request(method, parts.path, headers=dict(headers))
        answer = server.getresponse()
        text = answer.read().decode()
        return text if answer.status == 200 else ""
    finally:
        server.close()


def _has_aws_files() -> bool:
    """Return whether there is a file of profiles, which may name keys, a region, an endpoint."""
    names = ("AWS_SHARED_CREDENTIALS_FILE", "credentials"), ("AWS_CONFIG_FILE", "config")
    paths = (os.environ.get(variable) or f"~/.aws/{name}" for variable, name in names)
    # Path.expanduser raises where nobody knows a home.
    return any(Path(os.path.expanduser(path)).exists() for path in paths)  # noqa: PTH111


def _has_other_certificates() -> bool:
    """Return whether AWS's variable names certificates that obstore does not know of."""
    bundle = os.environ.get("AWS_CA_BUNDLE")
    return bool(bundle) and bundle != os.environ.get("SSL_CERT_FILE")


def _server_of(options: Mapping[str, Any], bucket: str) -> tuple[str | None, str]:
    """Return address and region of the server; None: the SDK in pyarrow may choose another one."""
    region, server = options.get("region"), options.get("endpoint_override")
    if server:
        server = str(server).rstrip("/")
        whole = server if "://" in server else f"{options.get('scheme') or 'https'}://{server}"
        return whole, region or "us-east-1"
    if _has_aws_files() or any(map(os.environ.get, _OTHER_SERVERS)):
        return None, ""
    region = region or _region_of(bucket)
    if region is None or region.startswith("cn-"):  # with a domain of its own
        return None, ""
    return f"https://s3.{region}.amazonaws.com", region


def _region_of(bucket: str) -> str | None:
    """Ask AWS for the region of a bucket, as pyarrow does."""
    from pyarrow import fs

    try:
        return str(fs.resolve_s3_region(bucket))
    except OSError:
        return None
