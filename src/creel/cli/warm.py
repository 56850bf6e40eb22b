"""`creel warm`: load data into a daemon's memory before training reads it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from creel.cache.storage.stores.retry import public
from creel.cli.watching.view import Values, format_count, format_seconds
from creel.errors import ConfigError, CreelError, NotFoundError
from creel.units import format_size

if TYPE_CHECKING:
    from creel.cache.storage.manifest import Manifest
    from creel.loader.client.client import Client

_POLL_S = 0.1
_IDLE_S = 10.0  # without a new object for this long, the source is lost
_SETTLED_S = 1.0  # without a fetch in flight for this long, loading is complete


def warm(client: Client, target: str, *, name: str, quiet: bool) -> Values:
    """Load a folder, a file or the dataset MODULE:DATASET, and show the progress.

    Args:
        name: of the daemon.

    Returns:
        dataset, objects, resident, failed, nbytes, seconds.
    """
    shown = not quiet and sys.stderr.isatty()
    if shown:  # listing the files may take minutes
        click.echo(f"looking through {public(target)}", err=True)
    manifest = _manifest(target, name)
    dataset = client.register(manifest)
    start = time.monotonic()
    client.ask("warm", dataset=dataset)
    with _bar(len(manifest), shown=shown) as advance:
        counted = _follow(client, dataset, len(manifest), advance)
    return {
        "dataset": dataset,
        "objects": len(manifest),
        "resident": counted["resident_objects"],
        "failed": _failed(client, dataset, len(manifest) - counted["resident_objects"]),
        "nbytes": counted["resident_nbytes"],
        "seconds": time.monotonic() - start,
    }


def _manifest(target: str, daemon: str) -> Manifest:
    module, _, name = target.partition(":")
    is_python = all(part.isidentifier() for part in [*module.split("."), *name.split(".")])
    if is_python and not Path(target).exists():
        try:
            from creel.loader.named import manifest_of
        except ModuleNotFoundError as e:
            if e.name != "torch":
                raise
            raise ConfigError(f"{target} needs torch: pip install 'creel-data[torch]'") from None
        os.environ["CREEL_SOCKET"] = daemon  # a loader that the module makes starts no other one
        return manifest_of(module, name)
    if Path(target).is_file():
        from creel.loader.datasets.files import FileDataset

        return FileDataset([target]).manifest
    return folder_manifest(target)


def folder_manifest(path: str) -> Manifest:
    """Return the manifest of an image folder, or of all files below another folder.

    An image folder's manifest is the one that `creel.ImageFolder` makes, so that both share one
    copy.

    Raises:
        NotFoundError: there is no such folder, or no file in it.
    """
    try:
        from creel.loader.datasets.images import ImageFolder

        return ImageFolder(path).manifest
    except (ImportError, NotFoundError, ConfigError):  # no torch here, or no image folder there
        return _all_files(path)


def _all_files(path: str) -> Manifest:
    from creel.cache.storage.manifest import Manifest
    from creel.cache.storage.stores.access import StorageOptions
    from creel.loader.reading.listing import files_below
    from creel.loader.reading.storage import absolute, escape

    root = absolute(path)
    found = files_below(root)
    if not len(found):
        raise NotFoundError(f"there are no files below {public(path)}")
    names = [escape(root, name) for name in found.names]
    return Manifest.of_files(names, root=root, lengths=found.nbytes).reached(StorageOptions())


def _follow(client: Client, dataset: str, objects: int, advance: Callable[[int], None]) -> Values:
    """Poll until all objects are loaded or no more come.

    Raises:
        CreelError: the dataset was dropped meanwhile.
    """
    seen, since = -1, time.monotonic()
    while True:
        held = client.ask("datasets")["datasets"]
        counted = next((d for d in held if d["dataset"] == dataset), None)
        if counted is None:
            raise CreelError("the daemon has dropped the dataset while it was loaded")
        resident = int(counted["resident_objects"])
        advance(resident)
        if resident != seen:
            seen, since = resident, time.monotonic()
        idle = time.monotonic() - since
        if resident >= objects or idle > _IDLE_S or (idle > _SETTLED_S and _settled(client)):
            return dict(counted)
        time.sleep(_POLL_S)


def _failed(client: Client, dataset: str, missing: int) -> int:
    """Return how many of `missing` objects could not be read; there was no room for the others."""
    sources = client.ask("stats")["sources"]
    errors = sum(int(s["errors"]) for s in sources if s["dataset"] == dataset)
    return min(errors, missing)


def _settled(client: Client) -> bool:
    """Whether the daemon has no fetch in flight."""
    return not client.ask("stats")["core"]["memory"]["node"]["inflight_objects"]


@contextmanager
def _bar(total: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on standard error; yield a function to call with the files done."""
    if not shown:
        yield lambda _: None
        return
    with click.progressbar(length=total, label="warming", show_pos=True, file=sys.stderr) as bar:
        yield lambda done: bar.update(done - bar.pos)


def sentence(result: Values) -> str:
    seconds = max(result["seconds"], 1e-3)
    line = (
        f"{format_count(result['resident'])} of {format_count(result['objects'])} files"
        f" ({format_size(result['nbytes'])}) in memory after {format_seconds(seconds)}"
    )
    if result["failed"]:
        failed = f"  -> {format_count(result['failed'])} failed: `creel stats` says how"
        return line + click.style(failed, dim=True)
    if result["resident"] < result["objects"]:
        return line + click.style("  -> the rest does not fit: raise memory.budget", dim=True)
    return line
