"""A dataset of a person's program, by MODULE:NAME, as `creel warm` takes it."""

from __future__ import annotations

import sys
from importlib import import_module

from torch.utils.data import DataLoader

from creel.cache.storage.manifest import Manifest
from creel.errors import ConfigError, CreelError
from creel.loader.binding.bind import bind


def manifest_of(module: str, name: str) -> Manifest:
    """Return the manifest of a dataset, as a loader over it makes it.

    Args:
        module: imported from the present folder, or from where Python finds it.
        name: a dataset there, a DataLoader, or a function that returns one of these.

    Raises:
        ConfigError: there is no such dataset, or creel does not know its objects.
        CreelError: the person's code failed.
    """
    found = _imported(module, name)
    dataset = found.dataset if isinstance(found, DataLoader) else found
    binding = bind(dataset)
    if binding is None:
        raise ConfigError(
            f"{module}:{name} is of type {type(dataset).__name__}, whose files are not known before"
            " it reads them: creel.wrap(dataset) caches them from the second epoch on"
        )
    return binding.manifest


def _imported(module: str, name: str) -> object:
    sys.path.insert(0, "")  # as `python -m` does
    try:
        found: object = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        is_data = isinstance(found, DataLoader) or hasattr(found, "__getitem__")
        return found() if callable(found) and not is_data else found
    except (ImportError, AttributeError) as e:
        raise ConfigError(f"{module}:{name}: {e}") from e
    except CreelError:
        raise
    except Exception as e:
        raise CreelError(f"{module}:{name} raised {type(e).__name__}: {e}") from e
    finally:
        sys.path.remove("")
