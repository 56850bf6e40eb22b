"""`creel.DataLoader`: torch's DataLoader with bit-identical batches, and faster."""

from __future__ import annotations

import errno
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from inspect import signature
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import torch.utils.data
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, MapDataPipe

from creel.cache.memory.memfd import memfd
from creel.config import switched_off
from creel.errors import ConfigError
from creel.loader.client.cluster.ranks import rank_and_world, ranks_here
from creel.loader.client.log_lines import with_rank
from creel.loader.data.reading.bad_samples import OnError
from creel.loader.data.rehearsed import Rehearsed, length_of
from creel.loader.data.user_code.protected import attribute
from creel.loader.data.user_code.values import check_choice, shown, whole, wrong
from creel.loader.extras.rehearsal.memory import Rehearsal
from creel.loader.extras.streams.batches import rehearsed_stream
from creel.loader.extras.streams.stream import Stream, stream_batches
from creel.loader.line.observers.last_indices import Returned, recorded, recording_iterator
from creel.loader.line.observers.meter import Meter
from creel.loader.line.options.assignable import AssignableProperty
from creel.loader.line.options.loader_args import (
    NAMES,
    LoaderArgs,
    args_of,
    keep,
    take_name,
    without_taken,
)
from creel.loader.line.order.epoch_order import OrderCombinator, Progress, may_repeat, not_begun
from creel.loader.line.order.rehearsed_order import RehearsedBatches, rehearsed_batches
from creel.loader.notebook import cell
from creel.loader.torch_private import MISSING
from creel.policies.concurrency import workers_auto
from creel.system.limits import cores

if MISSING is None:  # else none of these is used, and importing them may fail
    from creel.loader.line.batches.epoch_run import EpochRun
    from creel.loader.line.batches.iterator import InlineIter, WorkerIter
    from creel.loader.line.batches.state import LoaderState, config_of
    from creel.loader.making.groups.exchange import distributed_sampler
    from creel.loader.making.groups.replicate import check as check_replicate
    from creel.loader.making.groups.replicate import place_of
    from creel.loader.making.seeding.torch_iterators import (
        initialised_view,
        seeded_iterator,
        seeded_view,
    )
    from creel.loader.torch_private import DatasetKind

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.data import Dataset, Sampler

    from creel.loader.torch_private import BaseDataLoaderIter

T_co = TypeVar("T_co", covariant=True)

#: Evaluated at import, because `creel verify` replaces torch's class with ours.
_OF_TORCH = dict(signature(torch.utils.data.DataLoader.__init__).parameters)
_TORCH_HAS_IN_ORDER = "in_order" in _OF_TORCH  # torch >= 2.6


class DataLoader(torch.utils.data.DataLoader[T_co]):
    """A drop-in for `torch.utils.data.DataLoader`.

    Same arguments, same batches in the same order with the same random augmentation, same errors.

    Args:
        creel: None: use the node's daemon, or start one for this user; False: use none; a str: the
            name of the daemon (`daemon.name`); a dict: settings of docs/configuration.md by their
            dotted keys. Any value pickles.
        remap: "global-batch": the ranks of a `DistributedSampler` exchange samples within each
            global batch, so that each node reads mostly the same samples in all epochs. Global
            batches stay torch's; which rank reads which of their samples differs
            (docs/remap.md). All ranks must give it; the first epoch waits for all of them. Not
            for an iterable dataset.
        replicate: the ranks of this rank's tensor, pipeline or context parallel group, which read
            the same batches: the number of consecutive ranks in a group, its process group, or a
            DeviceMesh, as `mesh["tp"]`. The first of them on each node makes the batches, with its
            `num_workers`; the others get the same ones without a copy (docs/groups.md). All of
            them must give it, and iterate alike; the first epoch waits for all of them.
        on_error: what happens when `dataset[i]` raises: "raise": as in torch; "skip": the batch
            leaves out that sample; "substitute": another sample takes its place, the same on all
            ranks and in all epochs. The log names each bad sample once, and this loader does not
            read it again.
        max_bad_samples: how many bad samples this loader accepts on this rank; one more raises
            TooManyBadSamplesError.
        rehearsal: a memory of earlier data, as it is when the loader is made: behind the new
            samples of each batch come `rehearsal.per_batch` of its rows (docs/continual.md).
            `len(loader)` counts batches of new data. Not with `remap`, an iterable dataset or
            `batch_size=None`. For a Stream: one with `every` and `budget`, and without rows.
        seeding: "sample": before each sample, the generators of `random`, NumPy and torch are
            seeded from this epoch's base seed and the sample's number, so that random augmentation
            is the same for any `num_workers`, and after a resume (docs/augmentation.md). Before a
            collate_fn of your own, and a dataset's own `__getitems__`, they are seeded by the
            batch's number. None: as in torch, once in each worker. Not for an iterable dataset.
        workers: "own": batch i goes to worker i mod num_workers, as in torch. "shared": to the
            worker that is idle first, with `seeding="sample"`, so the batches are the same for any
            `num_workers`. Other workers make the batches of one that died; the third death at one
            batch raises torch's RuntimeError. `num_workers="auto"` then is twice this rank's share
            of the node's cores (docs/shared-workers.md).
        creel_args: for frameworks that make a loader again from its attributes, by name. A loader
            has this one if attributes of a subclass have names of arguments above: they are the
            subclass's, and these arguments are what was passed.

    Raises:
        ConfigError: (a ValueError) a wrong setting, or options that exclude each other.

    With `CREEL_DISABLE=1` in the environment, or `loader.disable`, it behaves exactly as torch's
    class.
    """

    # What was passed, where no code of the person's uses the name: see `loader_args`.
    creel: bool | str | dict[str, Any] | None = None
    remap: Literal["global-batch"] | None = None
    replicate: int | ProcessGroup | DeviceMesh | None = None
    on_error: OnError = "raise"
    max_bad_samples: int = 100
    rehearsal: Rehearsal | None = None
    seeding: Literal["sample"] | None = None
    workers: Literal["own", "shared"] = "own"
    _creel_state: LoaderState  # once it has begun

    def __init__(
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int | Literal["auto"] = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        creel: bool | str | dict[str, Any] | None = None,
        remap: Literal["global-batch"] | None = None,
        replicate: int | ProcessGroup | DeviceMesh | None = None,
        on_error: OnError = "raise",
        max_bad_samples: int = 100,
        rehearsal: Rehearsal | None = None,
        seeding: Literal["sample"] | None = None,
        workers: Literal["own", "shared"] = "own",
        creel_args: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        args = LoaderArgs(
            creel, remap, replicate, on_error, max_bad_samples, rehearsal, seeding, workers
        )
        args = checked(without_taken(args, creel_args), dataset)
        keep(self, args, DataLoader)
        if isinstance(num_workers, str):
            num_workers = _workers_auto(args, num_workers)
        if isinstance(dataset, Stream) and sampler is None and batch_sampler is None:
            if args.replicate is not None:
                raise ConfigError(
                    "replicate= and a stream: give batch_sampler=stream.batches(batch_size, rank=,"
                    " world=), equal on the ranks of a group"
                )
            batch_sampler = stream_batches(
                dataset, batch_size, shuffle=shuffle, drop_last=drop_last
            )
            batch_size, shuffle, drop_last = 1, None, False  # as torch wants them with it
        dataset, batch_sampler = _with_rows(dataset, batch_sampler, args.rehearsal)
        self._creel_newer = _newer(kwargs)  # arguments of a newer torch
        if _TORCH_HAS_IN_ORDER:
            kwargs["in_order"] = in_order
        else:
            self.in_order = in_order
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            **kwargs,
        )
        if args.rehearsal is not None and not isinstance(dataset, Stream):
            _rehearse(self, args.rehearsal, args.replicate)
        _check_seeding(self)
        if not _may_take(self):
            return
        # A framework may still replace a sampler that torch has chosen by its DistributedSampler.
        chosen = batch_size is None or sampler is not None or batch_sampler is not None
        if args.remap is not None and chosen:
            distributed_sampler(self._index_sampler)
        _state_of(self).start_daemon_early(self)

    def __setattr__(self, name: str, value: object) -> None:
        if name in NAMES:
            take_name(self, name)
        super().__setattr__(name, value)

    # --- torch's hooks ------------------------------------------------------------------------

    @property
    def _index_sampler(self) -> Any:
        """What torch's iterators, and ours, iterate: if not `batch_sampler`, then around it."""
        changed: OrderCombinator | None = self.__dict__.get("_creel_batches")
        return recorded(self, super()._index_sampler if changed is None else changed)

    def _get_iterator(self) -> BaseDataLoaderIter:
        if not _may_take(self):
            begun: LoaderState | None = self.__dict__.get("_creel_state")
            if begun is not None and begun.groups.needed:
                raise ConfigError(
                    "other ranks share batches or samples with this loader: enable creel again"
                )
            if MISSING is not None or isinstance(self.dataset, IterableDataset):
                return super()._get_iterator()
            returned = Returned.of(self)
            if args_of(self).seeding is None:
                view = initialised_view(self)
                return recording_iterator(view, super(DataLoader, view)._get_iterator, returned)
            view = seeded_view(self, repeats=may_repeat(self._index_sampler))
            return recording_iterator(view, partial(seeded_iterator, view), returned)
        loader_state = _state_of(self)
        loader_state.other_ranks(self)  # waits for the other ranks
        if self.num_workers == 0:
            return InlineIter(self, loader_state)
        self.check_worker_number_rationality()
        run = EpochRun(loader_state, self)
        try:
            return WorkerIter(self, loader_state, run)
        except BaseException:
            run.leave()
            raise

    # --- beyond torch: what is in a batch, resuming and counters --------------------------------

    @AssignableProperty
    def indices(self) -> NDArray[np.int64]:
        """(n,) numbers of the samples in the batch that was returned last, in its order.

        Row k of a rehearsal memory has the number `len(dataset) + k`. Empty before the first batch.

        Raises:
            ConfigError: the samples have no numbers: those of an iterable dataset, or other keys.
        """
        return _numbers_of(self)

    @AssignableProperty
    def replayed(self) -> NDArray[np.int64]:
        """(r,) rows of `rehearsal.dataset` in the last batch, at its end; empty without any."""
        rehearsed = rehearsed_batches(self)
        if rehearsed is None:
            return np.empty(0, np.int64)
        indices = _numbers_of(self)
        return indices[indices >= rehearsed.first_row] - rehearsed.first_row

    def state_dict(self, *, delivered: int | None = None) -> Progress:
        """Return the position in training, to resume from in another process; O(1).

        Args:
            delivered: batches of this epoch that were really used, for a caller that runs ahead;
                None: all up to the last one that was returned. A batch that raised counts as read
                if a later one was returned, else it is tried again.

        A state taken before the first epoch, or at the end of one, begins the next epoch. The order
        of torch's samplers is resumed bit for bit, with any `num_workers`. A custom sampler is
        restored by `load_state_dict()` with its `state_dict()` from the start of the epoch, else by
        `set_epoch()` with its `epoch`; with neither, its own state is not resumed. If it is around
        one of torch's (its attribute `sampler`), that draws the same again. Also not resumed: other
        draws from the global generators, the dataset's state, and random augmentation in workers,
        whose generators restart unless `seeding="sample"`. With `in_order=False` batches count as
        if they came in order.

        If torch itself makes the batches (an iterable dataset, CREEL_DISABLE=1, not Linux), the
        position is unknown: the call warns, and the state restarts the epoch.

        Raises:
            ConfigError: `delivered` is negative.
        """
        used = None if delivered is None else whole(delivered)
        if delivered is not None and (used is None or used < 0):
            text = f"delivered is {shown(delivered)}"
            raise ConfigError(f"{text}: give a number of batches that were used, 0 or more")
        if not _may_take(self):
            warnings.warn(with_rank(f"{_TORCHS}: this state_dict restarts the epoch"), stacklevel=2)
            return not_begun()
        position = _state_of(self).position
        if position.resume is not None:
            return position.resume
        return not_begun() if position.run is None else position.run.progress(used)

    def load_state_dict(self, state: Progress, *, leave_out: Iterable[int] = ()) -> None:
        """Resume the next `iter()` from a `state_dict`; later ones are whole epochs again.

        With `DistributedSampler`, the state may come from any rank of a job of another size. The
        samples of the epoch that the job has not read are dealt to these ranks, in the global
        order.

        Args:
            leave_out: numbers of batches of the saved epoch, from 0 on, to be skipped: for example
                those on which a training diverged. With `DistributedSampler` these are the global
                batches; give the same to all ranks. Only with torch's samplers.

        Warns, and restarts the epoch, if torch itself makes the batches. Also warns for a custom
        sampler that cannot be restored (see `state_dict`).

        Raises:
            ConfigError: the state is of another version or kind of loader, or incomplete.
        """
        if not _may_take(self):
            warnings.warn(with_rank(f"{_TORCHS}: the epoch restarts"), stacklevel=2)
            return
        _state_of(self).position.take_up(self, state, leave_out)

    def set_epoch(self, epoch: int) -> None:
        """Call `set_epoch(epoch)` on the sampler, batch sampler and dataset that have it."""
        batches: Any = self.batch_sampler
        inner = [attribute(batches, "sampler")]
        if type(batches) is RehearsedBatches:  # of memory.over()
            inner.append(batches.batches)
        changed = self.__dict__.get("_creel_batches")
        called: list[object] = []
        for part in (self.sampler, batches, *inner, self.dataset, changed):
            set_epoch: Callable[[int], object] | None = attribute(part, "set_epoch")
            if set_epoch is not None and not any(part is c for c in called):
                set_epoch(epoch)
                called.append(part)

    def stats(self) -> dict[str, object]:
        """Return this loader's counters in this process, as `creel stats --json` names them."""
        return _counters_of(self)

    def _repr_html_(self) -> str:
        """Return what a notebook shows of this loader: what it reads, and its counters."""
        return cell(self, _counters_of(self))

    def __getstate__(self) -> dict[str, Any]:
        # The state belongs to this process and object: it is neither pickled nor copied.
        own = {"_creel_state", "_creel_returned"}
        return {k: v for k, v in self.__dict__.items() if k not in own}


def _state_of(loader: DataLoader[Any]) -> LoaderState:
    """Return the state that outlives iterators, one per loader and process."""
    begun: LoaderState | None = vars(loader).get("_creel_state")
    if begun is None or not begun.belongs_to(loader):
        begun = vars(loader)["_creel_state"] = LoaderState(loader, args_of(loader))
        weakref.finalize(loader, begun.close).atexit = False
    return begun


def _numbers_of(loader: DataLoader[Any]) -> NDArray[np.int64]:
    if isinstance(loader.dataset, IterableDataset) or MISSING is not None:
        raise ConfigError("the samples of an IterableDataset have no numbers")
    return Returned.of(loader).numbers()


def _counters_of(loader: DataLoader[Any]) -> dict[str, object]:
    begun: LoaderState | None = vars(loader).get("_creel_state")
    here = begun is not None and begun.belongs_to(loader)
    return (begun.observers.meter if begun is not None and here else Meter()).stats()


def _with_rows(dataset: Any, batch_sampler: Any, memory: Rehearsal | None) -> tuple[Any, Any]:
    """Return a dataset and batch sampler with the rows of a memory, as far as they are known."""
    if memory is not None and isinstance(dataset, Stream):
        return dataset, rehearsed_stream(batch_sampler, memory.content())
    if memory is not None:
        return memory.behind(dataset, frames=2), batch_sampler
    if type(dataset) is Rehearsed and type(batch_sampler) is not RehearsedBatches:
        text = "nothing replays them: give rehearsal=, or the batch sampler of memory.over()"
        warnings.warn(f"the dataset has rows of a memory, but {text}", stacklevel=3)
    return dataset, batch_sampler


def _rehearse(loader: DataLoader[Any], memory: Rehearsal, replicate: Any) -> None:
    """Add rows of the memory, as it is now, to each batch."""
    if not loader._auto_collation:  # noqa: SLF001  torch's
        raise ConfigError("rehearsal needs batches: give batch_size or batch_sampler")
    if type(loader.batch_sampler) is RehearsedBatches:
        raise ConfigError("batch_sampler has rows of a memory already: leave out rehearsal")
    ranks = None if replicate is None else partial(place_of, replicate)
    content = memory.content()
    if content.kept or content.growth is not None:
        batches: Any = loader.batch_sampler
        first = length_of(loader.dataset)
        vars(loader)["_creel_batches"] = RehearsedBatches(batches, content, first, ranks)


def checked(args: LoaderArgs, dataset: object) -> LoaderArgs:
    """Return the arguments as they work together.

    Raises:
        ConfigError: one has a wrong value, or some exclude each other.
    """
    check_choice("remap", args.remap, ("global-batch", None))
    check_choice("seeding", args.seeding, ("sample", None))
    check_choice("workers", args.workers, ("own", "shared"))
    args.tolerance().check(dataset)
    iterable = isinstance(dataset, IterableDataset)
    if args.remap is not None and iterable:
        raise ConfigError(
            "remap needs a map-style dataset: an IterableDataset has no order to deal to ranks"
        )
    if args.replicate is not None and MISSING is None:
        check_replicate(args.replicate)
        if args.remap is not None or iterable:
            raise ConfigError("replicate cannot be combined with remap or an IterableDataset")
    if args.rehearsal is not None:
        if not isinstance(args.rehearsal, Rehearsal):
            raise wrong("rehearsal", args.rehearsal, "a creel.Rehearsal or None")
        if args.remap is not None or iterable:
            raise ConfigError("rehearsal cannot be combined with remap or an IterableDataset")
        if MISSING is not None:
            text = "use memory.over() in place of rehearsal="
            raise ConfigError(f"this torch lacks {MISSING}: {text}")
    if args.creel is not None and MISSING is None and not switched_off():
        config_of(args.creel)  # raises for a wrong setting here, not at the first epoch
    shared = args.workers == "shared"
    return args._replace(seeding="sample") if shared else args


def _workers_auto(args: LoaderArgs, num_workers: str) -> int:
    """Return the number of workers for `num_workers="auto"`.

    Raises:
        ConfigError: it is another word, or would change batches.
    """
    if num_workers != "auto":
        raise wrong("num_workers", num_workers, 'a number or "auto"')
    if args.workers == "own":
        raise ConfigError(
            'num_workers="auto" needs workers="shared": else batches depend on how many there are'
        )
    return workers_auto(cores(), ranks_here(rank_and_world()[1], os.environ))


def _check_seeding(loader: DataLoader[Any]) -> None:
    """Raise ConfigError if samples of this loader are to be seeded one by one, but cannot be."""
    args = args_of(loader)
    if args.seeding is None:
        return
    if isinstance(loader.dataset, (IterableDataset, MapDataPipe)):
        kind = type(loader.dataset).__name__
        option = 'workers="shared"' if args.workers == "shared" else "seeding"
        raise ConfigError(f"{option} needs a map-style dataset: samples of {kind} have no numbers")
    if MISSING is not None:
        raise ConfigError(f"this torch lacks {MISSING}, which seeding needs")
    if loader.num_workers and not _starts_processes(loader.multiprocessing_context):
        raise ConfigError("seeding needs workers that are processes: threads share generators")


def _may_take(loader: DataLoader[Any]) -> bool:
    """Whether creel's iterators can serve this loader; otherwise torch's do."""
    if switched_off():  # first, since it must work with broken settings too
        return False
    if sys.platform != "linux":
        _warn_once("creel needs Linux: this DataLoader behaves as torch's")
        return False
    if MISSING is not None:
        _warn_once(
            f"this torch lacks what creel needs ({MISSING}): this DataLoader behaves as torch's"
        )
        return False
    args = args_of(loader)
    alone = args.remap is None and args.replicate is None  # other ranks expect the same
    if newer := vars(loader).get("_creel_newer"):
        if not alone:
            raise ConfigError(f"remap and replicate do not go with {newer}=, of a newer torch")
        _warn_once(f"{newer}= is of a newer torch: this DataLoader behaves as torch's")
        return False
    if loader.num_workers and alone and (why := _refused_memfds()):
        _warn_once(f"this system gives no memfd ({why}): this DataLoader behaves as torch's")
        return False
    if loader.num_workers and not _starts_processes(loader.multiprocessing_context):
        if not alone:
            raise ConfigError("remap and replicate need workers that are processes")
        return False
    is_map = loader._dataset_kind == DatasetKind.Map  # noqa: SLF001  torch's
    if not is_map or isinstance(loader.dataset, MapDataPipe):
        return False
    return not _state_of(loader).config.loader.disable


def _newer(arguments: dict[str, Any]) -> str:
    """Return the first argument that only a newer torch knows, not as by default; "" if none."""
    known = (name for name in arguments if name in _OF_TORCH)
    return next((name for name in known if arguments[name] != _OF_TORCH[name].default), "")


def _starts_processes(context: object) -> bool:
    """Whether this multiprocessing context (None: the default) starts processes.

    Its workers may be threads, for example, as in MONAI.
    """
    process_class = BaseProcess if context is None else getattr(context, "Process", None)
    return isinstance(process_class, type) and issubclass(process_class, BaseProcess)


@cache
def _refused_memfds() -> str:
    """Return why the system gives no memfds, which workers need; "" if it does."""
    try:
        os.close(memfd("creel-probe"))
    except OSError as e:
        if e.errno in {errno.ENOSYS, errno.EPERM, errno.EACCES}:
            return os.strerror(e.errno)
    return ""


def _warn_once(text: str) -> None:
    global _warned  # noqa: PLW0603  once per process
    if not _warned:
        _warned = True
        warnings.warn(with_rank(text), stacklevel=4)


_TORCHS = "this DataLoader's batches are torch's own, which cannot be resumed"
_warned = False
