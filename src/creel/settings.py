"""Settings by section: types, bounds, defaults and one-line descriptions.

Defaults are defined only here. `creel.config` overlays the user's settings; scripts/reference.py
writes docs/configuration.md from them.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta


def _about(about: str, **bounds: Any) -> Meta:
    return Meta(description=about, **bounds)


def _nbytes(about: str, **bounds: Any) -> Meta:
    return Meta(description=about, extra={"unit": "bytes"}, **bounds)


def _seconds(about: str, **bounds: Any) -> Meta:
    return Meta(description=about, extra={"unit": "seconds"}, **bounds)


def _text(about: str, *, like: str, pattern: str) -> Meta:
    """`like`: what error messages say the value should be."""
    return Meta(description=about, extra={"like": like}, pattern=pattern)


#: A size as units.parse_size takes it, in either case; a share; or "auto".
_BUDGET = r"^(auto|\s*(\d+(\.\d+)?|\.\d+)\s*(%|([kKmMgGtTpP][iI]?)?[bB]?)\s*)$"


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the sections below."""


class MemorySettings(_Section, frozen=True):
    """Memory for samples on the node."""

    budget: Annotated[
        str,
        _text(
            '"auto", a size ("64GiB") or a share of the node\'s memory ("50%")',
            like="a budget",
            pattern=_BUDGET,
        ),
    ] = "auto"
    share: Annotated[
        float, _about('what "auto" takes of the memory that is free at the start', gt=0, le=0.95)
    ] = 0.5
    reserve: Annotated[
        str,
        _text(
            "memory that stays free: the cache gives memory back before other processes lack it; "
            '"auto": a sixteenth of the node\'s, 4 GiB at most; 0: never',
            like="a budget",
            pattern=_BUDGET,
        ),
    ] = "auto"


class DiskSettings(_Section, frozen=True):
    """A tier on local disk, for objects that memory has no room for."""

    path: Annotated[
        str, _about("a folder on a local disk; creel makes its own in there; empty: no disk tier")
    ] = ""
    budget: Annotated[
        str,
        _text(
            '"auto": all but `disk.keep_free`; a size ("2TB") or a share of the disk ("50%")',
            like="a budget",
            pattern=_BUDGET,
        ),
    ] = "auto"
    keep_free: Annotated[int, _nbytes("bytes that stay free on the disk for others", ge=0)] = (
        10 << 30
    )


class FetchSettings(_Section, frozen=True):
    """Reads from the source."""

    threads: Annotated[
        int,
        _about(
            "maximum number of threads that read; beyond 32 only while it is faster", ge=1, le=4096
        ),
    ] = 128
    inflight_bytes: Annotated[int, _nbytes("maximum bytes in flight", ge=1 << 20)] = 256 << 20
    deadline_s: Annotated[
        float, _seconds("the read of an object fails after this time, retries included", gt=0)
    ] = 45.0
    attempts: Annotated[
        int, _about("maximum number of attempts to read an object", ge=1, le=100)
    ] = 8
    backoff_s: Annotated[
        float, _seconds("pause before the second attempt; doubles each time, with jitter", ge=0)
    ] = 0.1
    backoff_max_s: Annotated[float, _seconds("maximum pause between two attempts", ge=0)] = 5.0


class WindowSettings(_Section, frozen=True):
    """How far ahead of use objects are fetched for a session."""

    min_steps: Annotated[
        int, _about("minimum number of steps read ahead, whatever their size", ge=1)
    ] = 4
    max_steps: Annotated[int, _about("maximum number of steps read ahead", ge=1)] = 256
    bytes: Annotated[int, _nbytes("maximum bytes read ahead for one session", ge=1)] = 4 << 30


class DaemonSettings(_Section, frozen=True):
    """The daemon itself."""

    name: Annotated[
        str,
        _text(
            "name of the daemon; one user may run several (also CREEL_SOCKET)",
            like="1 to 64 letters, digits, dots, _ and -",
            pattern="^[A-Za-z0-9._-]{1,64}$",
        ),
    ] = "default"
    linger_s: Annotated[
        float, _seconds("an embedded daemon ends this long after its last client", ge=0)
    ] = 10.0
    log_level: Annotated[
        str,
        _text(
            "debug, info, warning, error or critical (also CREEL_LOG_LEVEL)",
            like="a level",
            pattern="^(debug|info|warning|error|critical)$",
        ),
    ] = "info"
    log_json: Annotated[bool, _about("one JSON object per log line")] = False
    metrics: Annotated[
        str,
        _text(
            'address that Prometheus scrapes, such as "127.0.0.1:9464"; empty: none',
            like="host:port",
            pattern="^(|.+:\\d{1,5})$",
        ),
    ] = ""
    max_connections: Annotated[int, _about("maximum number of connected clients", ge=1)] = 1024
    max_sessions: Annotated[int, _about("maximum number of open sessions", ge=1)] = 1024
    max_datasets: Annotated[int, _about("maximum number of registered datasets", ge=1)] = 256
    max_idle_datasets: Annotated[
        int, _about("maximum number of unused datasets kept in memory", ge=0)
    ] = 32
    idle_s: Annotated[
        float, _seconds("an unused dataset is kept in memory this long, for the next run", ge=0)
    ] = 3600.0


class ClusterSettings(_Section, frozen=True):
    """The nodes of a job, which serve each other."""

    hosts: Annotated[
        str,
        _about(
            'the nodes of a job without torch.distributed: "slurm", "pbs", "auto" (either), the'
            ' path of a file, or a list ("n[0-3],m1"); empty: only jobs of torch.distributed'
        ),
    ] = ""
    port: Annotated[
        int, _about("port at which daemons of listed nodes serve each other", ge=1, le=65535)
    ] = 29420
    key_file: Annotated[
        str,
        _about(
            "file with the key of listed nodes, which nobody else may read (also CREEL_CLUSTER_KEY)"
        ),
    ] = ""
    encrypt: Annotated[
        bool,
        _about(
            "encrypt what nodes send each other (AES-256-GCM, needs creel-data[encryption]); the"
            " same on all nodes of a job"
        ),
    ] = False


class LoaderSettings(_Section, frozen=True):
    """The loader in a training process."""

    disable: Annotated[
        bool, _about("turn creel off: use torch's own DataLoader (also CREEL_DISABLE)")
    ] = False
    cluster: Annotated[
        bool,
        _about(
            "the nodes of a torch.distributed job read from each other's memory what one of them"
            " holds; for networks that you trust"
        ),
    ] = True
    embed: Annotated[bool, _about("start a daemon if none runs (else read directly)")] = True
    wait_s: Annotated[
        float, _seconds("a batch waits this long for the daemon, then is read directly", gt=0)
    ] = 60.0
    hung_s: Annotated[
        float, _seconds("after this long, a warning says what a batch is waiting for", gt=0)
    ] = 60.0
    recheck: Annotated[
        str,
        _text(
            'when to check files for changes: in each "epoch" (remote files only at the '
            'loader\'s first read), "open": at its first read, or "never"',
            like="epoch, open or never",
            pattern="^(epoch|open|never)$",
        ),
    ] = "epoch"
    direct: Annotated[
        str,
        _text(
            '"auto": files in the page cache are read by whoever needs them, and with '
            "num_workers=0 a training process reads directly what is not in memory yet, if "
            'that is as fast; "never": the daemon reads all',
            like="auto or never",
            pattern="^(auto|never)$",
        ),
    ] = "auto"
    foresee: Annotated[
        bool, _about("run a copy of a custom sampler ahead, to read ahead in its order")
    ] = False
    slots: Annotated[
        int, _about("maximum number of reusable batch buffers per worker", ge=1, le=1024)
    ] = 8
    max_leased: Annotated[
        int, _about("maximum number of batches held in these buffers; others are copied", ge=1)
    ] = 64
