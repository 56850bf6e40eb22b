"""`creel warm`: load data into a daemon's memory before training reads it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import click

from creel.cli.targets import manifest_of_target
from creel.cli.watching.stats import connection
from creel.cli.watching.view import Values, format_count, format_seconds
from creel.config import Config
from creel.errors import CreelError, NoDaemonError
from creel.system.progress import progress_line
from creel.units import format_size

if TYPE_CHECKING:
    from creel.cache.storage.manifest import Manifest
    from creel.loader.client.client import Client

_POLL_S = 0.1
_IDLE_S = 10.0  # without a new object for this long, the source is lost
_SETTLED_S = 1.0  # without a fetch in flight for this long, loading is complete
#: An embedded daemon stays so long without a client, once something was loaded ahead: until
#: training begins.
LINGER_S = 3600.0


def _may_start(config: Config) -> bool:
    return config.loader.embed and not config.loader.disable


@contextmanager
def _daemon(config: Config) -> Iterator[Client]:
    """Yield a connection to the daemon; start one if none runs, and say so.

    Args:
        config: of the new one.

    Raises:
        NoDaemonError: none runs, and none may or can be started.
    """
    with ExitStack() as stack:
        try:
            client = stack.enter_context(connection(config.daemon.name))
        except NoDaemonError as e:
            if not _may_start(config):
                raise
            from creel.loader.client.embed import connect_or_start

            start = connect_or_start(config)  # which logs why there is none
            if start is None:
                raise NoDaemonError(str(e)) from e
            stack.callback(start.close)
            client = stack.enter_context(connection(config.daemon.name))
            hours = f"{max(config.daemon.linger_s, LINGER_S) / 3600:g} h"
            click.echo(f"started a daemon: it ends {hours} after its last client", err=True)
        yield client


def warm(
    config: Config, target: str, *, quiet: bool, time_s: float = math.inf, background: bool = False
) -> Values:
    """Load a target (see `manifest_of_target`), and show the progress.

    A daemon is started if none runs, once it is known that there is something to load.

    Args:
        time_s: load no more after so many seconds, including the search for the files.
        background: return once loading has begun.

    Returns:
        dataset, path, objects, resident, failed, nbytes, seconds, ended: "complete", "time" or
        "background".

    Raises:
        NoDaemonError: none runs, and none may or can be started.
    """
    began = time.monotonic()
    if not _may_start(config):
        with connection(config.daemon.name):
            pass  # before the search, which may take long
    manifest = manifest_of_target(target, config.daemon.name, quiet=quiet)
    with _daemon(config) as client:
        ended, counted = _load(client, manifest, began + time_s, quiet, background=background)
        dataset = counted["dataset"]
        missing = len(manifest) - int(counted["resident_objects"])
        failed = _failed(client, dataset, missing) if ended == "complete" else 0
    return {
        "dataset": dataset,
        "path": counted["path"],
        "objects": len(manifest),
        "resident": counted["resident_objects"],
        "failed": failed,
        "nbytes": counted["resident_nbytes"],
        "seconds": time.monotonic() - began,
        "ended": ended,
    }


def _load(
    client: Client, manifest: Manifest, until: float, quiet: bool, *, background: bool
) -> tuple[str, Values]:
    """Load objects until a moment; return how that ended, and the dataset's row of counters."""
    dataset = client.register(manifest)
    counted = dict(client.ask("warm", dataset=dataset, linger_s=LINGER_S))
    ended = "background"
    if not background:
        loading = _Loading(client, dataset, len(manifest), counted)
        with progress_line(
            "warming",
            lambda: int(loading.counted["resident_objects"]),
            len(manifest),
            shown=not quiet,
        ):
            ended = loading.follow(until)
        counted = loading.counted
    if ended == "time":
        client.ask("warm", dataset=dataset, stop=True)
    return ended, counted


class _Loading:
    """A dataset that is being loaded.

    Attributes:
        counted: its latest row of the datasets.
    """

    def __init__(self, client: Client, dataset: str, objects: int, counted: Values) -> None:
        self.counted = dict(counted)
        self._client, self._dataset, self._objects = client, dataset, objects

    def follow(self, until: float) -> str:
        """Poll until all objects are loaded or no more come ("complete"), or until then ("time").

        Raises:
            CreelError: the dataset was dropped meanwhile.
        """
        seen, since = -1, time.monotonic()
        while True:
            held = self._client.ask("datasets")["datasets"]
            counted = next((d for d in held if d["dataset"] == self._dataset), None)
            if counted is None:
                raise CreelError("the daemon has dropped the dataset while it was loaded")
            self.counted = dict(counted)
            resident, now = int(counted["resident_objects"]), time.monotonic()
            if resident != seen:
                seen, since = resident, now
            idle = now - since
            if (
                resident >= self._objects
                or idle > _IDLE_S
                or (idle > _SETTLED_S and self._settled())
            ):
                return "complete"
            if now >= until:
                return "time"
            time.sleep(min(_POLL_S, max(until - now, 0.0)))

    def _settled(self) -> bool:
        """Whether the daemon has no fetch in flight."""
        return not self._client.ask("stats")["core"]["memory"]["node"]["inflight_objects"]


def _failed(client: Client, dataset: str, missing: int) -> int:
    """Return how many of `missing` objects could not be read; there was no room for the others."""
    sources = client.ask("stats")["sources"]
    errors = sum(int(s["errors"]) for s in sources if s["dataset"] == dataset)
    return min(errors, missing)


def sentence(result: Values) -> str:
    objects = format_count(result["objects"])
    if result["ended"] == "background":
        return f"loading {objects} files: `creel ls` shows how far it is"
    seconds = max(result["seconds"], 1e-3)
    line = (
        f"{format_count(result['resident'])} of {objects} files"
        f" ({format_size(result['nbytes'])}) in memory after {format_seconds(seconds)}"
    )
    if result["failed"]:
        failed = f"  -> {format_count(result['failed'])} failed: `creel stats` says how"
        return line + click.style(failed, dim=True)
    if result["ended"] == "time":
        return line + click.style("  -> the time is over: training reads the rest", dim=True)
    if result["resident"] < result["objects"]:
        return line + click.style("  -> the rest does not fit: raise memory.budget", dim=True)
    return line
