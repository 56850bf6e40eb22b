"""What `creel trace` keeps beside its timeline, so that `creel plot` can draw the run anywhere."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from creel.cache.memory.batch_log import BatchRow
from creel.cli.watching.view import Values
from creel.errors import ConfigError

#: Viewers of timelines leave out keys that they do not know.
KEY = "creel"
_SCHEMA = 1


class TracedStream(NamedTuple):
    """A session of `creel stats`, its last batches (see `BatchRow`), and its histogram of reuse."""

    session: Values
    rows: Sequence[Sequence[int]]
    reuse: Values


class Recording(NamedTuple):
    """The last batches of all ranks of a node, which has so many cores."""

    cores: float
    stats: Values
    streams: Sequence[TracedStream]


def as_json(recording: Recording) -> dict[str, Any]:
    """Return a recording as `read` takes it."""
    streams = [
        {"session": stream.session["session"], "batches": stream.rows, "reuse": stream.reuse}
        for stream in recording.streams
    ]
    content = {"cores": recording.cores, "stats": recording.stats, "streams": streams}
    return {"schema": _SCHEMA, **content}


def read(path: str) -> Recording:
    """Return what a file of `creel trace` has.

    Raises:
        ConfigError: there is no such file, or it is none of `creel trace`.
    """
    try:
        with Path(path).open(encoding="utf-8") as file:
            content = json.load(file)
    except OSError as e:
        raise ConfigError(f"{path} cannot be read: {e.strerror}") from e
    except (json.JSONDecodeError, UnicodeDecodeError):
        content = None
    kept = content.get(KEY) if isinstance(content, Mapping) else None
    if not isinstance(kept, Mapping) or kept.get("schema") != _SCHEMA:
        raise ConfigError(f"{path} is no recorded run: `creel trace FILE` writes one")
    try:
        sessions = {session["session"]: session for session in kept["stats"]["sessions"]}
        streams = [
            TracedStream(sessions[stream["session"]], _checked(stream["batches"]), stream["reuse"])
            for stream in kept["streams"]
        ]
        return Recording(float(kept["cores"]), kept["stats"], streams)
    except (KeyError, TypeError, ValueError) as e:
        raise ConfigError(f"{path} is damaged: write it anew by `creel trace`") from e


def _checked(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(BatchRow(*map(int, row))) for row in rows]
