"""Settings by section: types, bounds, defaults and one line about each.

Defaults are defined only here. `creel.config` overlays what users set; docs/configuration.md is
generated from here.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

_BYTES = {"unit": "bytes"}
_SECONDS = {"unit": "seconds"}


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the sections below."""


class MemorySettings(_Section, frozen=True):
    """Memory for samples on the node."""

    budget: Annotated[
        str,
        Meta(
            extra={"like": "a budget"},
            # What units.parse_size takes, in capitals or not; a share; "auto".
            pattern=r"^(auto|\s*(\d+(\.\d+)?|\.\d+)\s*(%|([kKmMgGtTpP][iI]?)?[bB]?)\s*)$",
            description='"auto", a size ("64GiB") or a share of the node\'s memory ("50%")',
        ),
    ] = "auto"
    share: Annotated[
        float,
        Meta(
            gt=0, le=0.95, description='what "auto" takes of the memory that is free at the start'
        ),
    ] = 0.5
    prefault: Annotated[
        bool,
        Meta(description="touch all pages in the background, so that no step waits for one"),
    ] = True


class FetchSettings(_Section, frozen=True):
    """Reads from the source."""

    threads: Annotated[
        int, Meta(ge=1, le=4096, description="maximum number of threads that read")
    ] = 32
    per_source: Annotated[
        int,
        Meta(
            ge=1,
            le=4096,
            description="maximum number of threads that read from one source (host, bucket, disk)",
        ),
    ] = 32
    inflight_bytes: Annotated[
        int, Meta(ge=1 << 20, extra=_BYTES, description="maximum bytes in flight")
    ] = 256 << 20
    deadline_s: Annotated[
        float,
        Meta(
            gt=0,
            extra=_SECONDS,
            description="the read of an object fails after this time, retries included",
        ),
    ] = 45.0
    attempts: Annotated[
        int, Meta(ge=1, le=100, description="maximum number of attempts to read an object")
    ] = 8
    backoff_s: Annotated[
        float,
        Meta(
            ge=0,
            extra=_SECONDS,
            description="pause before the second attempt; doubles each time, with jitter",
        ),
    ] = 0.1
    backoff_max_s: Annotated[
        float, Meta(ge=0, extra=_SECONDS, description="maximum pause between two attempts")
    ] = 5.0


class WindowSettings(_Section, frozen=True):
    """How far ahead of use a session is fetched."""

    min_steps: Annotated[
        int, Meta(ge=1, description="minimum number of steps read ahead, whatever their size")
    ] = 4
    max_steps: Annotated[int, Meta(ge=1, description="maximum number of steps read ahead")] = 256
    bytes: Annotated[
        int, Meta(ge=1, extra=_BYTES, description="maximum bytes read ahead for one session")
    ] = 4 << 30


class DaemonSettings(_Section, frozen=True):
    """The daemon itself."""

    name: Annotated[
        str,
        Meta(
            extra={"like": "1 to 64 letters, digits, dots, _ and -"},
            pattern=r"^[A-Za-z0-9._-]{1,64}$",
            description="name of the daemon; one user may run several (also CREEL_SOCKET)",
        ),
    ] = "default"
    linger_s: Annotated[
        float,
        Meta(
            ge=0,
            extra=_SECONDS,
            description="an embedded daemon ends this long after its last client",
        ),
    ] = 10.0
    log_level: Annotated[
        str,
        Meta(
            extra={"like": "a level"},
            pattern="^(debug|info|warning|error|critical)$",
            description="debug, info, warning, error or critical (also CREEL_LOG_LEVEL)",
        ),
    ] = "info"
    log_json: Annotated[bool, Meta(description="one JSON object per log line")] = False
    metrics: Annotated[
        str,
        Meta(
            extra={"like": "host:port"},
            pattern=r"^(|.+:\d{1,5})$",
            description='address that Prometheus scrapes, such as "127.0.0.1:9464"; empty: none',
        ),
    ] = ""
    max_connections: Annotated[
        int, Meta(ge=1, description="maximum number of connected clients")
    ] = 1024
    max_sessions: Annotated[int, Meta(ge=1, description="maximum number of open sessions")] = 1024
    max_datasets: Annotated[
        int, Meta(ge=1, description="maximum number of registered datasets")
    ] = 256
    max_idle_datasets: Annotated[
        int, Meta(ge=0, description="maximum number of unused datasets kept in memory")
    ] = 32
    idle_s: Annotated[
        float,
        Meta(
            ge=0,
            extra=_SECONDS,
            description="an unused dataset is kept in memory this long, for the next run",
        ),
    ] = 3600.0


class LoaderSettings(_Section, frozen=True):
    """The loader in a training process."""

    disable: Annotated[
        bool, Meta(description="turn creel off: use torch's own DataLoader (also CREEL_DISABLE)")
    ] = False
    embed: Annotated[bool, Meta(description="start a daemon if none runs (else read directly)")] = (
        True
    )
    wait_s: Annotated[
        float,
        Meta(
            gt=0,
            extra=_SECONDS,
            description="a batch waits this long for the daemon, then is read directly",
        ),
    ] = 60.0
    hung_s: Annotated[
        float,
        Meta(
            gt=0,
            extra=_SECONDS,
            description="after this long, a warning says what a batch is waiting for",
        ),
    ] = 60.0
    recheck: Annotated[
        str,
        Meta(
            extra={"like": "epoch, open or never"},
            pattern="^(epoch|open|never)$",
            description='when to check files for changes: in each "epoch" (remote files only'
            ' at the loader\'s first read), "open": at its first read, or "never"',
        ),
    ] = "epoch"
    direct: Annotated[
        str,
        Meta(
            extra={"like": "auto or never"},
            pattern="^(auto|never)$",
            description='"auto": with num_workers=0 a training process reads directly what is'
            " not in memory yet, if the source is as fast as the page cache;"
            ' "never": it waits for the daemon',
        ),
    ] = "auto"
    foresee: Annotated[
        bool,
        Meta(description="run a copy of a custom sampler ahead, to read ahead in its order"),
    ] = False
    slots: Annotated[
        int,
        Meta(ge=1, le=1024, description="maximum number of reusable batch buffers per worker"),
    ] = 8
    max_leased: Annotated[
        int,
        Meta(
            ge=1,
            description="maximum number of batches held in these buffers; others are copied",
        ),
    ] = 64


Section: TypeAlias = (
    MemorySettings | FetchSettings | WindowSettings | DaemonSettings | LoaderSettings
)
