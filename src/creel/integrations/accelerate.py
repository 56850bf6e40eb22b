"""creel's loader under Hugging Face accelerate, without a change to accelerate.

`Accelerator.prepare` makes a loader of torch's class out of any loader. What it returns holds that
loader in the attribute `base_dataloader`, and does all that accelerate adds around it: so creel's
goes in that place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.utils.data
from torch.utils.data import IterableDataset

import creel
from creel.loader.line.options.loader_args import DEFAULTS, LoaderArgs, args_of

if TYPE_CHECKING:
    from accelerate import Accelerator

#: Arguments of torch's loader that it keeps as attributes; `in_order` came with torch 2.6.
_NAMES = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)


def prepare(accelerator: Accelerator, *objects: Any, **options: Any) -> Any:
    """`accelerator.prepare(*objects)`, after which creel's loaders are still creel's.

    Batches are those that accelerate gives with torch's loader, and each loader keeps the arguments
    of creel's that it was made with. Loaders of torch's class stay torch's.

    Args:
        accelerator: the job's.
        objects: as for `accelerator.prepare`: models, optimizers, loaders, in any order.
        options: as for `accelerator.prepare` (`device_placement`).

    Returns:
        What `accelerator.prepare` returns: one object for one, else a tuple in the same order.
    """
    prepared = accelerator.prepare(*objects, **options)
    each = prepared if len(objects) > 1 else (prepared,)
    for given, ready in zip(objects, each, strict=True):
        if isinstance(given, creel.DataLoader):
            served(ready, args_of(given))
    return prepared


def skip_first_batches(loader: Any, num_batches: int = 0) -> Any:
    """`accelerate.skip_first_batches` of a loader that `prepare` returned: it stays creel's, too.

    Args:
        loader: what `prepare` returned.
        num_batches: how many batches of its next epoch are left out.
    """
    import accelerate

    remaining = accelerate.skip_first_batches(loader, num_batches)
    base = getattr(loader, "base_dataloader", loader)
    return served(remaining, args_of(base)) if isinstance(base, creel.DataLoader) else remaining


def served(prepared: Any, args: LoaderArgs = DEFAULTS) -> Any:
    """Put a loader of creel's in the place of torch's inside a prepared one; return the latter.

    One that holds another class's loader already, like torchdata's, is returned as it is.
    """
    base = getattr(prepared, "base_dataloader", None)
    if type(base) is torch.utils.data.DataLoader:
        prepared.base_dataloader = _like(base, args)
        prepared.dl_state_dict = prepared.base_dataloader.state_dict()
    return prepared


def _like(loader: torch.utils.data.DataLoader[Any], args: LoaderArgs) -> creel.DataLoader[Any]:
    """Return a loader of creel's that gives the batches of one of torch's."""
    order: dict[str, Any]
    if isinstance(loader.dataset, IterableDataset):
        order = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    elif loader.batch_sampler is not None:
        order = {"batch_sampler": loader.batch_sampler}
    else:
        order = {"batch_size": None, "sampler": loader.sampler}
    kept = {name: getattr(loader, name) for name in _NAMES if hasattr(loader, name)}
    return creel.DataLoader(loader.dataset, **order, **kept, **args._asdict())
