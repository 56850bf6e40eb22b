"""Azure's blob storage."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from creel.cache.storage.buckets.bucket import Bucket

#: Where the blobs of an account are, behind its name.
_AUTHORITY = ".blob.core.windows.net"
_HOSTS = (".dfs.core.windows.net", _AUTHORITY)
#: Options of a client that obstore understands (pyarrow's names).
_KNOWN = frozenset(
    {"account_name", "account_key", "sas_token", "anonymous"}
    | {"client_id", "client_secret", "tenant_id"}
    | {"blob_storage_authority", "blob_storage_scheme"}
    | {"dfs_storage_authority", "dfs_storage_scheme"}
)
#: A service's account: its secret, or the file of its token in Kubernetes.
_SERVICE = ("AZURE_TENANT_ID", "AZURE_CLIENT_ID")
_PROOFS = {
    "client_secret": "AZURE_CLIENT_SECRET",
    "workload_identity": "AZURE_FEDERATED_TOKEN_FILE",
}


def bucket_of(uri: str, options: Mapping[str, Any]) -> Bucket | None:
    """See `find.bucket_of`. Of abfs, the addresses with container and account are understood."""
    parts = urlsplit(uri)
    account, container = options.get("account_name"), parts.netloc
    if parts.scheme.lower() != "az":
        container, _, host = parts.netloc.rpartition("@")
        name, dot, domain = host.partition(".")
        if account not in {None, name} or dot + domain not in _HOSTS:
            return None
        account = name
    rights = _rights_of(options)
    if not account or not container or ":" in container or parts.query:
        return None
    if rights is None or options.keys() - _KNOWN:
        return None
    authority = options.get("blob_storage_authority") or _AUTHORITY
    server = f"{account}{authority}" if authority.startswith(".") else f"{authority}/{account}"
    server = f"{options.get('blob_storage_scheme') or 'https'}://{server}"
    config = {
        **rights, "container_name": container, "account_name": account, "endpoint": server,
        "use_emulator": False, "use_fabric_endpoint": False,
    }  # fmt: skip
    return Bucket("AzureStore", server, config)


def _rights_of(options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return who reads, as obstore's arguments; None if only Azure's library finds out."""
    if options.get("anonymous"):
        return {"skip_signature": True}
    key, signature = options.get("account_key"), options.get("sas_token")
    if key or signature:
        kind, value = ("access_key", key) if key else ("sas_token", str(signature).lstrip("?"))
        given = {kind: value, "expires_at": None}
        # As a function, which comes before whatever the environment says.
        return {"skip_signature": False, "credential_provider": lambda: given}
    service = {name: options.get(name) for name in ("tenant_id", "client_id", "client_secret")}
    if all(service.values()):
        return {**service, "credential_type": "client_secret", "skip_signature": False}
    if any(service.values()) or not all(map(os.environ.get, _SERVICE)):
        return None
    proof = next((kind for kind, name in _PROOFS.items() if os.environ.get(name)), None)
    return None if proof is None else {"credential_type": proof, "skip_signature": False}
