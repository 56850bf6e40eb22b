"""What a loader keeps in this process from iterator to iterator, and where it is in its epoch."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

import torch
from torch.utils.data import BatchSampler
from torch.utils.data._utils.collate import default_collate

from creel.config import Config
from creel.errors import ConfigError
from creel.loader import storage
from creel.loader.feed import Feed, expect_daemon, foreseen, open_feed
from creel.loader.follow import samples_in
from creel.loader.gather import Ring
from creel.loader.meter import Meter
from creel.loader.orders import index_sampler
from creel.loader.samplers import Begun, Moment, Order, State, adopt, resume
from creel.loader.sources import Binding, bind, promising
from creel.loader.unmet import warn_of_unmet

if TYPE_CHECKING:
    from creel.loader.dataloader import DataLoader

#: Seconds from one time that the daemon's statistics hear of us to the next; `creel top` looks once
#: a second.
_COUNT_S = 0.25
#: Of `Progress`; a state of another version is refused.
VERSION = 1


class Progress(TypedDict, total=False):
    """`DataLoader.state_dict()`: plain values, fit for JSON."""

    version: int
    epoch: int  # epochs begun before this one
    batches: int  # of this epoch, returned to the caller
    finished: bool
    order: State


class TorchIter(Protocol):
    """What `Course` needs of torch's iterators."""

    _sampler_iter: Any
    _base_seed: Any
    _num_workers: int


class Home:
    """One loader's lasting state in one process; a copy, a pickle and a fork start without."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.pid = os.getpid()
        self.config, self._origins = settings(loader.creel)
        storage.use(self.config.fetch)
        self.ring = Ring()  # here, as an epoch's first batches would each cost their pages again
        self.meter = Meter()
        self.order: Order | None = None
        self.epoch = -1
        self.course: Course | None = None
        self.resume: Progress | None = None
        self._feeds: list[Feed] = []
        self._bound: tuple[object, Binding | None] = (None, None)
        self._closed = False

    def binding(self, loader: DataLoader[Any]) -> Binding | None:
        """The objects behind the loader's dataset; None where there are none, or no daemon."""
        if loader.creel is False:
            return None
        dataset, binding = self._bound
        if dataset is not loader.dataset or binding is None or not binding.current():
            self._bound = (loader.dataset, bind(loader.dataset))
        return self._bound[1]

    def expect(self, loader: DataLoader[Any]) -> None:
        """The loader was made, and will want a daemon if there is anything to cache.

        What is bound is seen when it is read first: until then the dataset may change in place.
        """
        if loader.creel is not False and promising(loader.dataset):
            expect_daemon(self.config)

    def take_feed(self, loader: DataLoader[Any]) -> Feed | None:
        """A session for an iterator: one that is free, or a new one; None without a daemon."""
        binding = self.binding(loader)
        while self._feeds:
            feed = self._feeds.pop()
            if feed.alive and feed.binding is binding:
                return feed
            feed.close()
        opened = None if binding is None else open_feed(binding, self.config)
        if opened is not None:
            warn_of_unmet(opened.client, self.config, self._origins)
        return opened

    def leave_feed(self, feed: Feed) -> None:
        """An iterator is done with its session."""
        if self._closed or self._feeds or os.getpid() != self.pid:
            feed.close()
        else:
            self._feeds.append(feed)

    def close(self) -> None:
        """The loader is gone."""
        self._closed = True
        while self._feeds:
            self._feeds.pop().close()


class Course:
    """One iterator's way through one epoch: the order, what the daemon was told, the position."""

    def __init__(self, home: Home, loader: DataLoader[Any]) -> None:
        self._home = home
        self.feed = home.take_feed(loader)
        #: What its readers were made for; None: to read by themselves.
        self._binding = None if self.feed is None else self.feed.binding
        self.skipped = 0
        self.delivered = 0
        self._counted = 0  # of these, batches that the daemon's statistics know of
        self._counted_at = 0.0
        self._untold: dict[int, int] = {}  # samples of batches that the daemon knows not of
        self._many = True  # samples in a batch
        self.finished = False
        self.slices = False  # an array of the order stands for a list of ints
        self.order: Order | None = None
        self.epoch = 0
        self._foreseen = False

    def begin(self, loader: DataLoader[Any], it: TorchIter, before: Moment) -> Order:
        """An epoch begins: torch's iterator has made its draws; from here on we pull."""
        home = self._home
        if self.feed is not None and not self.feed.alive:
            self.feed.close()
            self.feed = None
        if self.feed is None and self._binding is not None:
            feed = home.take_feed(loader)
            if feed is not None and feed.binding is self._binding:
                self.feed = feed
            elif feed is not None:  # workers that live on have the dataset as it was
                home.leave_feed(feed)
        if home.order is not None and self.feed is not None:
            home.order.judge(wrong=self.feed.mistaken)
        resume, home.resume = home.resume, None
        begun = Begun(it._sampler_iter, it._base_seed, before)  # noqa: SLF001
        # A proxy: the order lives in the loader's own iterator, which must not keep it alive.
        held: Any = weakref.proxy(loader)
        given = None if resume is None else resume["order"]
        foresee = home.config.loader.foresee
        order = adopt(held, begun, previous=home.order, state=given, foresee=foresee)
        self.skipped = 0 if resume is None else resume["batches"]
        home.epoch = home.epoch + 1 if resume is None else resume["epoch"]
        home.order, home.course = order, self
        self.order, self.epoch = order, home.epoch
        self._count()
        self.delivered, self.finished, self._foreseen = self.skipped, False, False
        self._counted = self.skipped
        self._untold.clear()
        self._many = loader._auto_collation  # noqa: SLF001  torch's
        if self.feed is not None:
            start = time.monotonic_ns()
            foreseen(order, 0)  # a copy of a sampler may run here; the order keeps what it gave
            home.meter.sampler_ns += time.monotonic_ns() - start
            self.feed.begin(order, self.skipped)
        if self.skipped:
            order.skip(self.skipped)
        self.slices = order.known and type(index_sampler(loader)) is BatchSampler
        it._sampler_iter, it._base_seed = order, order.base_seed  # noqa: SLF001
        return order

    def give(self, i: int, index: object) -> int:
        """The session's step of the i-th batch from here on, about to be read; -1: direct."""
        if self.feed is None:
            return -1
        step = self.feed.give(self.skipped + i, index)
        if step < 0:
            self._untold[self.skipped + i] = samples_in(index) if self._many else 1
        return step

    def done(self, i: int) -> None:
        """All batches below the i-th from here on have arrived."""
        if self.feed is not None:
            self.feed.done(self.skipped + i)
            self._foresee(self.feed)

    def _foresee(self, feed: Feed) -> None:
        if not self._foreseen and self.order is not None:
            self._foreseen = True
            start = time.monotonic_ns()
            feed.foresee(self.order)
            self._home.meter.sampler_ns += time.monotonic_ns() - start

    def deliver(self) -> None:
        """A batch goes to the caller."""
        self._home.meter.batches += 1
        self.delivered += 1
        if self.due():
            self._count()

    def due(self) -> bool:
        """Whether the daemon's statistics should hear of us: often, but not for each batch."""
        if self.feed is None or self.delivered == self._counted:
            return False
        return time.monotonic() - self._counted_at >= _COUNT_S

    def _count(self) -> None:
        """Tell the daemon's statistics of the batches since the last time.

        A daemon that does not serve at the moment is told later: it may only be stopped.
        """
        self._counted_at = time.monotonic()
        if self.feed is None or not self.feed.alive:
            return
        first, self._counted = self._counted, self.delivered
        more = self._home.meter.unsaid()
        sizes = [self._untold.pop(i) for i in range(first, self._counted) if i in self._untold]
        if sizes:
            more |= {"batches": len(sizes), "samples": sum(sizes)}
        self.feed.count(first, self._counted, more)

    def finish(self) -> None:
        """The epoch is over, and its iterator ends."""
        self.finished = True
        self.leave()

    def leave(self) -> None:
        """The iterator ends."""
        self._count()
        feed, self.feed = self.feed, None
        if feed is not None:
            feed.left()
            self._home.leave_feed(feed)

    def progress(self, delivered: int | None) -> Progress:
        """Where the caller is who got `delivered` batches of the epoch (None: all returned)."""
        order = self.order
        if order is None:
            return Progress(version=VERSION, epoch=-1, batches=0, finished=False)
        over = self.finished and delivered is None
        return Progress(
            version=VERSION,
            epoch=self.epoch,
            batches=self.delivered if delivered is None else delivered,
            finished=over,
            order=order.state(over=over),
        )


def prepare_resume(home: Home, loader: DataLoader[Any], state: Progress) -> None:
    """Let the next epoch be the one that `state` tells of, or the one after it when it is over.

    Raises:
        ConfigError: the state is not of this version or of another kind of loader.
    """
    if not state:
        return
    given: object = state
    if not isinstance(given, Mapping) or "version" not in given:
        raise ConfigError("this is no state_dict of a creel.DataLoader: begin without it")
    if state["version"] != VERSION:
        raise ConfigError(f"this state_dict has version {state['version']}, not {VERSION}")
    lacks = {"epoch", "batches", "finished"} - state.keys()
    if lacks or ("order" not in state and state["epoch"] >= 0):
        # As torch.distributed.checkpoint does, which fills in only what a fresh state has.
        raise ConfigError("this state_dict has lost keys: save and load it as one value (pickle)")
    home.epoch = state["epoch"]
    home.resume = None
    if "order" in state:
        held: Any = weakref.proxy(loader)
        over, batches = state["finished"], state["batches"]
        order = resume(held, state["order"], over=over, batches=batches, previous=home.order)
        home.order = home.order if order is None else order
        home.resume = None if over else state


def settings(given: bool | str | dict[str, Any] | None) -> tuple[Config, dict[str, str]]:
    """The configuration for a loader's `creel` argument, and where each value came from.

    Raises:
        ConfigError: an unknown key or a value of the wrong type.
    """
    if isinstance(given, str):
        given = {"daemon.name": given}
    if not isinstance(given, (dict, bool, type(None))):
        raise ConfigError(f"creel={given!r}: give None, False, an address or a dict of settings")
    flags = given if isinstance(given, dict) else None
    return Config.load(flags, origin="DataLoader(creel=...)")


def collates_plainly(loader: DataLoader[Any]) -> bool:
    """Whether a batch is just torch's default collation of its samples."""
    from torch.utils.data._utils import collate

    return (
        loader._auto_collation  # noqa: SLF001  torch's
        and loader.collate_fn is default_collate
        and collate.default_collate_fn_map.get(torch.Tensor) is collate.collate_tensor_fn
    )
