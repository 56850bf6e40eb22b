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
        bool, Meta(description="touch the pages in the background, so that no step pays for it")
    ] = True


class FetchSettings(_Section, frozen=True):
    """Reads from the source."""

    threads: Annotated[int, Meta(ge=1, le=4096, description="readers of this daemon, at most")] = 32
    per_source: Annotated[
        int,
        Meta(ge=1, le=4096, description="readers at once of any one source (host, bucket, disk)"),
    ] = 32
    inflight_bytes: Annotated[
        int, Meta(ge=1 << 20, extra=_BYTES, description="bytes under way at once, at most")
    ] = 256 << 20
    deadline_s: Annotated[
        float, Meta(gt=0, extra=_SECONDS, description="an object is given up after this long")
    ] = 45.0
    attempts: Annotated[int, Meta(ge=1, le=100, description="tries of one object, at most")] = 8
    backoff_s: Annotated[
        float,
        Meta(ge=0, extra=_SECONDS, description="pause before the second try; doubles, with jitter"),
    ] = 0.1
    backoff_max_s: Annotated[
        float, Meta(ge=0, extra=_SECONDS, description="longest pause between two tries")
    ] = 5.0


class WindowSettings(_Section, frozen=True):
    """How far ahead of use a session is fetched."""

    min_steps: Annotated[int, Meta(ge=1, description="steps kept ready whatever they weigh")] = 4
    max_steps: Annotated[int, Meta(ge=1, description="steps ahead, at most")] = 256
    bytes: Annotated[
        int, Meta(ge=1, extra=_BYTES, description="bytes ahead of one session, at most")
    ] = 4 << 30


class DaemonSettings(_Section, frozen=True):
    """The daemon itself."""

    name: Annotated[
        str,
        Meta(
            extra={"like": "at most 64 letters, digits, dots, _ and -"},
            pattern=r"^[A-Za-z0-9._-]{1,64}$",
            description="which daemon of this user; part of its address (also CREEL_SOCKET)",
        ),
    ] = "default"
    linger_s: Annotated[
        float,
        Meta(
            ge=0,
            extra=_SECONDS,
            description="an embedded daemon stays this long after its last client",
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
            description='where Prometheus may scrape, "127.0.0.1:9464"; empty: nowhere',
        ),
    ] = ""
    max_connections: Annotated[int, Meta(ge=1, description="clients at once, at most")] = 1024
    max_sessions: Annotated[int, Meta(ge=1, description="streams of batches at once, at most")] = (
        1024
    )
    max_datasets: Annotated[int, Meta(ge=1, description="datasets known at once, at most")] = 256
    max_idle_datasets: Annotated[
        int, Meta(ge=0, description="datasets kept warm that nobody reads, at most")
    ] = 32
    idle_s: Annotated[
        float,
        Meta(
            ge=0,
            extra=_SECONDS,
            description="a dataset that nobody reads is kept warm this long, for the next run",
        ),
    ] = 3600.0


class LoaderSettings(_Section, frozen=True):
    """The loader in a training process."""

    disable: Annotated[
        bool, Meta(description="be torch's DataLoader and nothing else (also CREEL_DISABLE)")
    ] = False
    embed: Annotated[
        bool, Meta(description="start a daemon when none listens (else read directly)")
    ] = True
    wait_s: Annotated[
        float,
        Meta(
            gt=0,
            extra=_SECONDS,
            description="a batch waits this long for the daemon, then reads the source itself",
        ),
    ] = 60.0
    hung_s: Annotated[
        float,
        Meta(
            gt=0,
            extra=_SECONDS,
            description="what a batch waits for is named in a warning after this long",
        ),
    ] = 60.0
    recheck: Annotated[
        str,
        Meta(
            extra={"like": "epoch, open or never"},
            pattern="^(epoch|open|never)$",
            description='when to look whether files have changed: local ones in each "epoch" (and'
            ' remote ones when a loader first reads), all when it first reads ("open"), or "never"',
        ),
    ] = "epoch"
    direct: Annotated[
        str,
        Meta(
            extra={"like": "auto or never"},
            pattern="^(auto|never)$",
            description='"auto": with num_workers=0 a training process reads by itself what is'
            " not in memory yet, where that is as quick as from the page cache;"
            ' "never": it waits for the daemon',
        ),
    ] = "auto"
    foresee: Annotated[
        bool,
        Meta(description="run a copy of a sampler of your own ahead, to read ahead in its order"),
    ] = False
    slots: Annotated[
        int,
        Meta(ge=1, le=1024, description="batch buffers of one worker that are used again, at most"),
    ] = 8
    max_leased: Annotated[
        int,
        Meta(ge=1, description="batches the trainer may hold in buffers; further ones are copied"),
    ] = 64


Section: TypeAlias = (
    MemorySettings | FetchSettings | WindowSettings | DaemonSettings | LoaderSettings
)
