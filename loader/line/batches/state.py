"""LoaderState: the state of a loader that all its iterators share."""

from __future__ import annotations

import logging
import os
import weakref
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import default_collate

from creel.cache.storage import lookup
from creel.config import Config
from creel.errors import ConfigError, CreelError
from creel.loader.client.cluster.ranks import rank_and_world
from creel.loader.client.connections import connected, start_daemon_early
from creel.loader.data.binding.bind import Binding, Gather, bind, empty_binding
from creel.loader.data.binding.tree import declares, keepings_in, keeps_samples, wrapped_in
from creel.loader.data.binding.wrapped import configure, holds_paths, lead, recording
from creel.loader.data.buffers import BufferPool
from creel.loader.data.datasets.base import CreelDataset
from creel.loader.data.user_code.protected import length
from creel.loader.data.user_code.values import wrong
from creel.loader.line.batches.position import Position
from creel.loader.line.batches.rank_groups import RankGroups
from creel.loader.line.batches.reattach import StreamSearch
from creel.loader.line.observers.observers import Observers
from creel.loader.line.options.loader_args import LoaderArgs
from creel.loader.line.order.epoch_order import StateBefore
from creel.loader.line.order.samplers import before
from creel.loader.line.steps.batch_stream import (
    BatchStream,
    open_batch_stream,
    open_counting_stream,
)
from creel.loader.torch_private import collate
from creel.policies.direct import DirectReads

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from creel.loader.data.decoded.keeping import Keeping
    from creel.loader.making.places.other_ranks import OtherRanks
    from creel.loader.making.places.place import Slots

_log = logging.getLogger("creel.loader")

#: Sessions of one process from which on more of them cost more than they save, for files that lie
#: in the page cache. Hundreds of small loaders are used in simulations of federated learning.
_MANY_SESSIONS = 32


class LoaderState:
    """One loader's state in one process, over all its iterators; not copied, pickled or forked."""

    def __init__(self, loader: DataLoader[Any], args: LoaderArgs) -> None:
        self.args = args
        self.pid = os.getpid()  # a forked child makes a state of its own
        self._loader = weakref.ref(loader)
        #: `_origins`: which file or variable each setting is from.
        self.config, self._origins = config_of(args.creel)
        lookup.use(self.config.fetch)
        self.buffers = BufferPool()  # kept over epochs: fresh pages cost time
        self.spare: Slots = ()  # for the next epoch's workers
        self.tolerance = args.tolerance()
        self.observers = Observers(self.tolerance)
        self.direct = DirectReads(allowed=self.config.loader.direct == "auto")
        self.position = Position()
        self.groups = RankGroups(args)
        self._stream: BatchStream | None = None  # a session without an iterator, for the next
        #: Of a dataset: its binding, and its parts that keep decoded samples.
        self._bound: tuple[object, Binding | None, list[Keeping]] = (None, None, [])
        self._closed = False  # no iterator leaves it a session any more

    def belongs_to(self, loader: object) -> bool:
        """Whether this is the state of the loader here: not of what it is a copy or a fork of."""
        return self.pid == os.getpid() and self._loader() is loader

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()  # a subclass may pickle its whole `__dict__`

    def binding(self, loader: DataLoader[Any]) -> Binding | None:
        """Return the binding of the loader's dataset; None if it has no objects or creel=False."""
        keepings = keepings_in(loader.dataset)
        for keeping in keepings:
            keeping.begin(self, self.config.loader.recheck, self.config.disk)
        if self.args.creel is False:
            return None
        for wrapped in wrapped_in(loader.dataset):
            lead(wrapped)
            if isinstance(self.args.creel, (dict, str)):
                configure(wrapped, self.config, self._origins)
        dataset, binding, _ = self._bound
        self._bound = (dataset, binding, keepings)
        return self.bound(loader)

    def bound(self, loader: DataLoader[Any]) -> Binding | None:
        """Return `binding` as it is by now, in the middle of an epoch."""
        dataset, binding, keepings = self._bound
        if dataset is not loader.dataset or binding is None or not binding.is_current():
            binding = _binding_of(loader.dataset)
        self._bound = (loader.dataset, binding, keepings)
        return binding

    @property
    def loader(self) -> DataLoader[Any] | None:
        """The loader; None if it was deleted."""
        return self._loader()

    def before(self, loader: DataLoader[Any]) -> StateBefore:
        """Return the state an epoch begins from; call it before torch's iterator is constructed."""
        return before(loader, self.position.order, foresee=self.config.loader.foresee)

    def other_ranks(self, loader: DataLoader[Any]) -> OtherRanks:
        """Return the ranks that share this one's batches; see `RankGroups.others`."""

        def plain() -> bool:
            binding = self.binding(loader)
            return binding is not None and self.only_copies(loader, binding)

        return self.groups.others(loader, plain)

    def start_daemon_early(self, loader: DataLoader[Any]) -> None:
        """Start a daemon when the loader is made, if its dataset may have objects to cache.

        The dataset is bound later, at its first read, because it may change in place until then. A
        dataset whose reads must be recorded, and that holds no list of its files, needs no daemon
        before they are.
        """
        dataset = loader.dataset
        if self.args.creel is False:
            return
        if declares(dataset) or any(map(holds_paths, wrapped_in(dataset))):
            start_daemon_early(self.config)

    def take_stream(self, binding: Binding | None, *, wait: bool = True) -> BatchStream | None:
        """Return a free or a new session for an iterator; None without a daemon.

        `wait`: whether to open a new one, which waits for the daemon.
        """
        stream, self._stream = self._stream, None
        if stream is not None:
            if stream.alive and stream.binding is (binding or empty_binding()):
                return stream
            stream.close()
        return None if binding is None or not wait else self.open(binding)

    def open(self, binding: Binding) -> BatchStream | None:
        """Open a session, waiting for the daemon; warn of settings that the daemon lacks."""
        return open_batch_stream(binding, self.config, self._origins)

    def search(self, binding: Binding | None) -> StreamSearch:
        """Open a session in a thread; without a binding one that only counts, if a daemon runs."""
        if binding is None:
            return StreamSearch(partial(open_counting_stream, self.config), once=True)
        return StreamSearch(partial(self.open, binding))

    def page_cached(
        self, loader: DataLoader[Any], binding: Binding, stream: BatchStream | None
    ) -> bool:
        """Whether user code reads the dataset's files, and they lie in the page cache.

        A copy in the arena would then cost more than it saves: each file is copied twice, and the
        daemon takes CPU time from the readers. This does not hold for files that are in the arena
        already, unless samples open them: a copy of a kilobyte then takes longer than the file
        (benchmarks/many_files.py --raw). Nor does it hold for rows, which the arena delivers faster
        than any file, unless this process has many sessions: each event of one costs the daemon a
        look at all.

        The same holds for an epoch that begins with all its samples kept decoded.
        """
        if self.config.loader.direct != "auto" or self.groups.share:
            return False
        if binding.leaves and all(leaf.read_once for leaf in binding.leaves):
            return True
        kept = binding.kept()
        known = (s for s in (stream, self._stream) if s is not None and s.binding is binding)
        held = any(s.alive and s.session.holds_most() for s in known)
        if held and not kept and not binding.opens_files:
            return False
        if rank_and_world()[1] > 1:  # other nodes may depend on what this one reads
            alone = stream is not None and not (stream.joining or stream.session.client.cluster)
        else:
            alone = True
        if kept:
            return alone
        client = connected(self.config.daemon.name)
        many = client is not None and len(client.sessions) >= _MANY_SESSIONS
        return alone and (many or not self.only_copies(loader, binding)) and binding.in_page_cache()

    def direct_in(
        self, loader: DataLoader[Any], binding: Binding
    ) -> tuple[Gather, CreelDataset] | None:
        """Return a dataset that builds whole batches itself, and how; None if user code does."""
        leaf = binding.leaves[0]
        if binding.dataset is not leaf or not isinstance(leaf, CreelDataset):
            return None
        if not leaf.builds_batches:
            return None
        gather = binding.gather() if self.only_copies(loader, binding) else None
        return None if gather is None else (gather, leaf)

    def only_copies(self, loader: DataLoader[Any], binding: Binding) -> bool:
        """Whether batches are rows copied from the arena, made without any user code."""
        if loader.worker_init_fn is not None:
            return False
        gather = binding.gather() if self.collates_plainly(loader) else None
        if gather is None or gather.has_code or not gather.nbytes:
            return False
        return all(stage.gathers(gather) for stage in self.args.stages(self.tolerance))

    def collates_plainly(self, loader: DataLoader[Any]) -> bool:
        """Whether a batch is torch's default collation of its samples."""
        return (
            loader._auto_collation  # noqa: SLF001  torch's
            and loader.collate_fn is default_collate
            and collate.default_collate_fn_map.get(torch.Tensor) is collate.collate_tensor_fn
        )

    def note_kept(self) -> None:
        """Set in the meter what the stores of decoded samples have; tell them what was read."""
        stores = [keeping.store for keeping in self._bound[2] if keeping.store is not None]
        mine = [store for store in stores if store.counted_by(self)]
        meter = self.observers.meter
        by = "busy" if meter["busy_decode_ns"] else "stall"  # without workers training waits
        worked = meter[f"{by}_decode_ns"] + meter[f"{by}_collate_ns"]
        for store in mine:
            hits = meter["decoded_hits"]
            read = hits + meter["decoded_misses"]
            store.read(read, hits, meter[f"{by}_source_ns"], worked)
        meter["decoded_samples"] = sum(store.kept for store in mine)
        meter["decoded_nbytes"] = sum(store.used_nbytes for store in mine)

    def own_files_may_be_awaited(self, loader: DataLoader[Any], *, known: bool) -> None:
        """Begin an epoch of `own_files`: whether samples may read files that creel does not serve.

        Below `creel.wrap` that is known once their reads were recorded. Samples that are kept are
        read once in any case.

        known: whether the order is torch's own: else the loader's length is the person's to count.
        """
        binding, wrapped = self._bound[1], wrapped_in(loader.dataset)
        unserved = binding is None if not wrapped else not any(map(recording, wrapped))
        if self.args.creel is False or keeps_samples(loader.dataset):
            unserved = False
        batches = length(loader) if known else None
        self.observers.own_files.epoch_begins(
            unserved=unserved,
            batches=batches or 0,
            waited_s=self.observers.meter.waited_s,
            wrapped=bool(wrapped),
            serves=None if binding is None else binding.serves,
        )

    def leave_stream(self, stream: BatchStream) -> None:
        """Take back an iterator's session: keep one for reuse, close others."""
        if os.getpid() != self.pid or self._closed or self._stream is not None:
            stream.close()
        else:
            self._stream = stream

    def keep_slots(self, spare: Slots) -> None:
        """Keep the slots of an iterator's workers for the next iterator, if there may be one."""
        self.spare = () if self._closed else spare

    def close(self) -> None:
        """Close the sessions and let go of all memory, when the loader is deleted.

        An iterator that is still in use, and its run, refer to this state: without a reference back
        it is freed with them, not by Python's cyclic collector.
        """
        self._closed = True
        self.position, self.spare = Position(), ()
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
        if os.getpid() == self.pid:
            self.groups.close()


def _binding_of(dataset: object) -> Binding | None:
    """Return the binding of a dataset; None also where its own code raises, which torch never runs.

    Raises:
        CreelError: it declares what it does not have.
    """
    try:
        return bind(dataset)
    except CreelError:
        raise
    except Exception as e:  # noqa: BLE001  whatever a property or method of the person's raises
        _warn_unbound(type(dataset).__name__, repr(e))
        return None


@cache
def _warn_unbound(kind: str, why: str) -> None:
    _log.warning("creel reads %s without a cache: what it declares raises %s", kind, why)


def config_of(given: bool | str | dict[str, Any] | None) -> tuple[Config, dict[str, str]]:
    """Return the configuration for a loader's `creel` argument, and each value's origin.

    Raises:
        ConfigError: an unknown key or a value of the wrong type.
    """
    if isinstance(given, str):
        key, is_setting, value = given.partition("=")
        if is_setting:
            raise ConfigError(
                f"creel={given!r}: a str is the name of a daemon; give settings as a dict, as"
                f" creel={{{key.strip()!r}: {value.strip()!r}}}"
            )
        given = {"daemon.name": given}
    if not isinstance(given, (dict, bool, type(None))):
        raise wrong("creel", given, "None, False, a daemon's name or a dict of settings")
    flags = given if isinstance(given, dict) else None
    return Config.load(flags, origin="DataLoader(creel=...)")
