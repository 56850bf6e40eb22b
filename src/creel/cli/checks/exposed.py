"""What settings and environment show to others: docs/security.md says what is promised."""

from __future__ import annotations

import ipaddress
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from creel.cli.checks.finding import Finding, judged
from creel.config import Config

#: Variables that name the server of an object store.
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


def findings(config: Config, env: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a finding for each of them that is set."""
    if config.daemon.metrics:
        yield _page(config.daemon.metrics)
    cluster = config.cluster
    if cluster.key_file:
        yield _key(Path(cluster.key_file).expanduser())
    elif config.loader.cluster and not _is_here(env.get("MASTER_ADDR", "localhost")):
        remedy = "who reaches MASTER_PORT can take it from there: set cluster.key_file, or trust it"
        yield Finding("key", "warn", "the key of this job travels through torch's store", remedy)
    if cluster.hosts:
        remedy = "who sees their network sees your data: cluster.encrypt = true, or trust it"
        state = f"cluster.encrypt = {str(cluster.encrypt).lower()}, between listed nodes"
        yield judged("encryption", state, "" if cluster.encrypt else remedy)
    for name in _ENDPOINTS:
        yield from _endpoint(name, env.get(name, ""))


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _endpoint(name: str, url: str) -> Iterator[Finding]:
    """Look whether data of a store travels in the clear."""
    parts = urlsplit(url)
    if parts.scheme == "http" and not _is_here(parts.hostname or ""):
        remedy = "others on the way see what is read, and may change it: use https, or trust it"
        yield Finding("endpoint", "warn", f"{name} = http://{parts.hostname}", remedy)


def _page(address: str) -> Finding:
    """Look whether others reach the page, which has no password."""
    here = _is_here(address.rpartition(":")[0].strip("[]"))
    remedy = "it has no password: bind it to 127.0.0.1, or to a network that you trust"
    return judged("metrics", f"daemon.metrics = {address}", "" if here else remedy)


def _key(path: Path) -> Finding:
    """Look whether others may read the key."""
    try:
        open_to_others = stat.S_IMODE(path.stat().st_mode) & 0o077
    except OSError as e:
        return Finding("key", "bad", f"{path}: {e.strerror}", "cluster.key_file names a file")
    remedy = f"others may read it, and then your nodes' memory: chmod 600 {path}"
    return judged("key", f"cluster.key_file = {path}", remedy if open_to_others else "")
