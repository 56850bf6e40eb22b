"""A dataset of a person's program, by MODULE:NAME, as `creel warm` takes it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from creel.cache.storage.manifest import Manifest
from creel.config import Config
from creel.errors import ConfigError, CreelError
from creel.loader.data.binding.bind import Binding, bind
from creel.loader.data.binding.tree import wrapped_in
from creel.loader.data.tracing.wrap import wrap
from creel.loader.dataloader import DataLoader as CreelLoader
from creel.system.limits import cores
from creel.system.progress import progress_line

_BATCH = 32


def manifest_of(module: str, name: str, said: Callable[[str], None]) -> Manifest:
    """Return the manifest of a dataset, as a loader over it makes it.

    The samples of a dataset that opens its files itself are read once, by this node's cores: only
    so is it known which files these are.

    Args:
        module: imported from the present folder, or from where Python finds it.
        name: a dataset there, a DataLoader, or a function that returns one of these.
        said: called with a line on what takes long.

    Raises:
        ConfigError: there is no such dataset, or its samples open no file that creel could cache.
        CreelError: the person's code failed.
    """
    target = _imported(module, name)
    dataset: Any = target.dataset if isinstance(target, DataLoader) else target
    binding = bind(dataset)
    if binding is None:
        said(f"{module}:{name} opens files itself: reading its samples, to know which")
        binding = _read_once(f"{module}:{name}", dataset)
    if binding is None:
        raise ConfigError(
            f"{module}:{name} is of type {type(dataset).__name__}, whose samples open no file that"
            " creel.wrap(dataset) could cache"
        )
    return binding.manifest


def _read_once(name: str, dataset: Any) -> Binding | None:
    """Return the binding of a dataset that opens its files itself; None if it opens none.

    Raises:
        ConfigError: it has no samples by number, or creel is switched off.
        CreelError: one could not be read.
    """
    if Config.load()[0].loader.disable:
        raise ConfigError("creel is switched off (loader.disable): no dataset's reads are recorded")
    if isinstance(dataset, IterableDataset) or not hasattr(type(dataset), "__len__"):
        raise ConfigError(
            f"{name} is of type {type(dataset).__name__}: its samples cannot be read by number"
        )
    wrapped, done = dataset if wrapped_in(dataset) else wrap(dataset), 0
    workers = max(round(cores()), 1)
    loader: DataLoader[Any] = CreelLoader(
        wrapped,
        _BATCH,
        num_workers=workers,
        collate_fn=_nothing,
        creel={"loader.direct": "never"},  # else files in the page cache would not be recorded
    )
    try:
        batches = iter(loader)
        with progress_line("batches of samples read", lambda: done, len(loader)):
            for _ in batches:
                done += 1
    except Exception as e:
        raise CreelError(f"{name}: {type(e).__name__}: {e}") from e
    return bind(wrapped)


def _nothing(_: object) -> None:
    """Collate samples whose files alone count."""


def _imported(module: str, name: str) -> object:
    sys.path.insert(0, "")  # as `python -m` does
    try:
        target: object = import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
        is_data = isinstance(target, DataLoader) or hasattr(target, "__getitem__")
        return target() if callable(target) and not is_data else target
    except (ImportError, AttributeError) as e:
        raise ConfigError(f"{module}:{name}: {e}") from e
    except CreelError:
        raise
    except Exception as e:
        raise CreelError(f"{module}:{name} raised {type(e).__name__}: {e}") from e
    finally:
        sys.path.remove("")
