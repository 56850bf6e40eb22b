"""What settings show to others: the page for Prometheus, the key of listed nodes."""

from __future__ import annotations

import ipaddress
import stat
from collections.abc import Iterator
from pathlib import Path

from creel.cli.checks.finding import Finding, judged
from creel.config import Config


def looks(config: Config) -> Iterator[Finding]:
    """Yield a finding for each of the two that is set."""
    if config.daemon.metrics:
        yield _page(config.daemon.metrics)
    if config.cluster.key_file:
        yield _key(Path(config.cluster.key_file).expanduser())


def _page(address: str) -> Finding:
    """Look whether others reach the page, which has no password."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        here = ipaddress.ip_address(host).is_loopback
    except ValueError:
        here = host == "localhost"
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
