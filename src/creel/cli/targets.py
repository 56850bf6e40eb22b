"""What `creel warm` is given: a folder, a file, shards, an address, or a dataset of a program."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from creel.cache.storage.stores.retry import public
from creel.errors import ConfigError, NotFoundError

if TYPE_CHECKING:
    from creel.cache.storage.manifest import Manifest

_TAR = ".tar"


def manifest_of_target(target: str, daemon: str, *, quiet: bool = False) -> Manifest:
    """Return the manifest that training makes of the same data, so that both share one copy.

    Args:
        target: an image folder, any folder, a file, a tar or tars ("train-{000..127}.tar", or a
            folder of nothing else), an address of one of these, or MODULE:DATASET.
        daemon: name of the daemon, for what the module makes.

    Raises:
        NotFoundError: there is nothing, or no file in it.
        ConfigError: no such module, or a dataset of which nothing is known.
    """
    from creel.loader.data.reading.listing import braces

    module, _, name = target.partition(":")
    is_python = all(part.isidentifier() for part in [*module.split("."), *name.split(".")])
    if is_python and not Path(target).exists():
        return _of_program(module, name, daemon, quiet=quiet)
    if target.endswith(_TAR):
        shards = braces(target)
        manifest = _of_shards(shards)
        return _whole(shards) if manifest is None else manifest
    return _whole([target]) if Path(target).is_file() else folder_manifest(target)


def _of_program(module: str, name: str, daemon: str, *, quiet: bool) -> Manifest:
    try:
        from creel.cli.scripts.dataset_by_name import manifest_of
    except ModuleNotFoundError as e:
        if e.name != "torch":
            raise
        raise ConfigError(f"{module}:{name} needs torch: pip install 'creel-data[torch]'") from None

    def said(text: str) -> None:
        if not quiet and sys.stderr.isatty():
            click.echo(text, err=True)

    os.environ["CREEL_SOCKET"] = daemon  # a loader that the module makes uses no other one ...
    os.environ["CREEL_LOADER__EMBED"] = "false"  # ... and starts none
    return manifest_of(module, name, said)


def folder_manifest(path: str) -> Manifest:
    """Return the manifest of an image folder, of tars, or of all files below another folder.

    Raises:
        NotFoundError: there is no such folder, or no file in it.
    """
    try:
        from creel.loader.data.datasets.images import ImageFolder

        return ImageFolder(path).manifest
    except (ImportError, NotFoundError, ConfigError):  # no torch here, or no image folder there
        return _all_files(path)


def _of_shards(shards: list[str]) -> Manifest | None:
    """Return the manifest of the members of tars; None without torch, or if they are no samples.

    Raises:
        NotFoundError: one is missing.
    """
    try:
        from creel.loader.data.datasets.tars import TarDataset

        return TarDataset(shards).manifest
    except NotFoundError:
        raise
    except (ImportError, ConfigError):
        return None


def _whole(paths: list[str]) -> Manifest:
    """Return the manifest of some files, as a `FileDataset` of them has it; torch is not needed."""
    from creel.cache.storage.lookup import nbytes_of
    from creel.cache.storage.manifest import Manifest
    from creel.cache.storage.stores.access import StorageOptions
    from creel.cache.storage.uris import absolute

    names = [absolute(path) for path in paths]
    for name in names:  # here, where the person reads it
        nbytes_of(name)
    return Manifest.of_files(names).reached(StorageOptions())


def _all_files(path: str) -> Manifest:
    from creel.cache.storage.manifest import Manifest
    from creel.cache.storage.stores.access import StorageOptions
    from creel.cache.storage.uris import absolute, escape
    from creel.loader.data.reading.listing import files_below

    root = absolute(path)
    listing = files_below(root)
    if not len(listing):
        raise NotFoundError(f"there are no files below {public(path)}")
    names = [escape(root, name) for name in listing.names]
    if all(name.endswith(_TAR) for name in names):
        tars = _of_shards([f"{root}/{name}" for name in names])
        if tars is not None:
            return tars
    return Manifest.of_files(names, root=root, lengths=listing.nbytes).reached(StorageOptions())
