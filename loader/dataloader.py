"""`creel.DataLoader`: torch's DataLoader, to the bit, and faster."""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import torch.utils.data
from torch.utils.data import MapDataPipe
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from creel.errors import ConfigError
from creel.loader.home import VERSION, Course, Home, Progress, prepare_resume, settings
from creel.loader.iterate import OwnIter
from creel.loader.solo import GatherIter, SoloIter

if TYPE_CHECKING:
    from torch.utils.data import Dataset, Sampler

T_co = TypeVar("T_co", covariant=True)

#: Attributes that belong to this process and object: never pickled, never copied.
_OURS = ("_creel_home",)

#: torch >= 2.6. Asked here: `creel verify` puts our class in the place of torch's.
_TORCH_HAS_IN_ORDER = "in_order" in torch.utils.data.DataLoader.__init__.__annotations__


class DataLoader(torch.utils.data.DataLoader[T_co]):
    """A drop-in for `torch.utils.data.DataLoader`.

    Same arguments, same batches in the same order with the same random augmentation, same errors.

    Args:
        creel: None: use the node's daemon, or start one for this person; False: no daemon; a str:
            its address; a dict: options of `creel.config`. Any value pickles.
        workers: "own": as in torch, batch i is made by worker i mod num_workers.
        on_error: "raise": as in torch, a sample that cannot be read raises.

    `CREEL_DISABLE=1` in the environment, as `loader.disable`, makes it torch's class in all but
    name.
    """

    def __init__(
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
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
        workers: str = "own",
        on_error: str = "raise",
        **kwargs: Any,
    ) -> None:
        # Public names equal to the parameters', set first: Lightning rebuilds loaders from them.
        self.creel = creel
        self.workers = workers
        self.on_error = on_error
        _check("workers", workers, "own")
        _check("on_error", on_error, "raise")
        if creel:
            settings(creel)  # what is wrong with it is said here, not at the first epoch
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
        if _may_take(self):
            self._home().expect(self)

    # --- torch's hooks ------------------------------------------------------------------------

    def _get_iterator(self) -> _BaseDataLoaderIter:
        if not _may_take(self):
            return super()._get_iterator()
        home = self._home()
        if self.num_workers == 0:
            return SoloIter(self, home)
        self.check_worker_number_rationality()
        course = Course(home, self)
        kind = GatherIter if GatherIter.can(self, course) else OwnIter
        try:
            return kind(self, home, course)
        except BaseException:
            course.leave()
            raise

    def _home(self) -> Home:
        """What lasts from iterator to iterator in this process."""
        home: Home | None = self.__dict__.get("_creel_home")
        if home is None or home.pid != os.getpid():
            home = self.__dict__["_creel_home"] = Home(self)
            weakref.finalize(self, home.close).atexit = False
        return home

    # --- beyond torch: resuming, and what it costs ----------------------------------------------

    def state_dict(self, *, delivered: int | None = None) -> Progress:
        """Where the training is, to go on from there in another process; O(1).

        Args:
            delivered: batches of this epoch that were really used, for a caller that runs ahead;
                None: all that were returned.

        A state taken before the first epoch, or at the end of one, begins the next epoch. The order
        of torch's samplers is resumed to the bit, with any `num_workers`. A sampler of one's own
        gets back what its `state_dict()` gave as the epoch began, else its `epoch`, by its
        `load_state_dict()` or `set_epoch()`; with neither, what it counts or draws by itself is not
        resumed. Nor are the global generators that it draws from, the dataset's own state, or
        random augmentation made in workers, whose generators begin anew. With `in_order=False`
        batches count as if they came in order.

        Where the batches are torch's own (an iterable dataset, CREEL_DISABLE=1, not Linux) it is
        not known where they are: a warning, and a state that begins anew.

        Raises:
            ConfigError: `delivered` is negative.
        """
        if delivered is not None and delivered < 0:
            raise ConfigError(f"delivered is {delivered}: batches that were used, 0 or more")
        if not _may_take(self):
            warnings.warn(f"{_TORCHS}: from this state_dict the epoch begins anew", stacklevel=2)
            return Progress(version=VERSION, epoch=-1, batches=0, finished=False)
        home = self._home()
        if home.resume is not None:
            return home.resume
        if home.course is None:
            return Progress(version=VERSION, epoch=-1, batches=0, finished=False)
        return home.course.progress(delivered)

    def load_state_dict(self, state: Progress) -> None:
        """Let the next `iter()` go on from a `state_dict`; those after it are whole epochs again.

        Where the batches are torch's own the next epoch begins anew, after a warning. Another one
        is for a sampler of one's own that can be told nothing (see `state_dict`).

        Raises:
            ConfigError: the state is of another version or kind of loader, or not whole.
        """
        if not _may_take(self):
            warnings.warn(f"{_TORCHS}: it begins the epoch anew", stacklevel=2)
            return
        prepare_resume(self._home(), self, state)

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to sampler, batch sampler and dataset, where they take it."""
        inner = getattr(self.batch_sampler, "sampler", None)
        told: list[object] = []
        for part in (self.sampler, self.batch_sampler, inner, self.dataset):
            tell: Callable[[int], object] | None = getattr(part, "set_epoch", None)
            if tell is not None and not any(part is t for t in told):
                tell(epoch)
                told.append(part)

    def stats(self) -> dict[str, object]:
        """Counters of this loader in this process: batches, stalls by cause, direct reads."""
        return self._home().meter.stats()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in _OURS}


def _check(name: str, value: str, *known: str) -> None:
    if value not in known:
        raise ConfigError(f"{name}={value!r} is not known; it is one of {', '.join(known)}")


def _may_take(loader: DataLoader[Any]) -> bool:
    """Whether our own workers can serve this loader; torch's own do otherwise."""
    if os.environ.get("CREEL_DISABLE") == "1":  # whatever else is wrong with the settings
        return False
    if sys.platform != "linux":
        _warn_platform()
        return False
    is_map = loader._dataset_kind == _DatasetKind.Map  # noqa: SLF001  torch's
    if not is_map or isinstance(loader.dataset, MapDataPipe):
        return False
    return not loader._home().config.loader.disable  # noqa: SLF001  ours


def _warn_platform() -> None:
    global _warned  # noqa: PLW0603  once per process
    if not _warned:
        _warned = True
        warnings.warn("creel needs Linux; this DataLoader is torch's", stacklevel=4)


_TORCHS = "this DataLoader's batches are torch's own, which cannot be resumed"
_warned = False
