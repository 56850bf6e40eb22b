"""LoaderState: the state of a loader that all its iterators share."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate

from creel.config import Config
from creel.errors import ConfigError, CreelError
from creel.loader.client.cluster.ranks import rank_and_world
from creel.loader.client.connections import connected, start_daemon_early
from creel.loader.data.binding.bind import Binding, Gather, bind, nothing
from creel.loader.data.binding.tree import declares, keepings_in, keeps_samples, wrapped_in
from creel.loader.data.binding.wrapped import configure, recording
from creel.loader.data.buffers import BufferPool
from creel.loader.data.datasets.base import CreelDataset
from creel.loader.data.reading import storage
from creel.loader.data.reading.bad_samples import Tolerance
from creel.loader.data.user_code.protected import length
from creel.loader.data.user_code.values import whole, wrong
from creel.loader.line.batches.reattach import StreamSearch
from creel.loader.line.observers.advice import Advice
from creel.loader.line.observers.meter import Meter
from creel.loader.line.observers.own_files import OwnFiles
from creel.loader.line.options.loader_args import LoaderArgs
from creel.loader.line.order.epoch_order import (
    PROGRESS_VERSION,
    EpochOrder,
    Progress,
    StateBefore,
    index_sampler,
    rehearsed_batches,
)
from creel.loader.line.order.samplers import before, resharded, resized, resume, without_batches
from creel.loader.line.steps.batch_stream import (
    BatchStream,
    open_batch_stream,
    open_counting_stream,
)
from creel.loader.making.groups.exchange import agreed, check_unchanged
from creel.loader.making.groups.replicate import Role, join_group
from creel.loader.torch_private import collate
from creel.policies.direct import DirectReads
from creel.policies.order.remap import Exchange

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from creel.loader.data.decoded.keeping import Keeping
    from creel.loader.making.workers.pool import Slots

_log = logging.getLogger("creel.loader")

#: Sessions of one process from which on more of them cost more than they save, for files that lie
#: in the page cache. Hundreds of small loaders are used in simulations of federated learning.
_MANY_SESSIONS = 32


class LastRun(Protocol):
    """What remains of an iterator's last epoch (`EpochRun`)."""

    finished: bool

    def progress(self, delivered: int | None) -> Progress:
        """Return the position in training, as `DataLoader.state_dict`."""
        ...


class LoaderState:
    """One loader's state in one process, over all its iterators; not copied, pickled or forked."""

    def __init__(self, loader: DataLoader[Any], args: LoaderArgs) -> None:
        self.args = args
        self.pid = os.getpid()
        self._loader = weakref.ref(loader)
        self.config, self._origins = config_of(args.creel)
        storage.use(self.config.fetch)
        self.buffers = BufferPool()  # kept over epochs: fresh pages cost time
        self.spare: Slots = ()  # for the next epoch's workers
        self.meter = Meter()
        self.tolerance = Tolerance(args.on_error, args.max_bad_samples)
        #: (number, address, reason) of bad samples that the daemon is yet to be told of.
        self.bad_unreported: list[tuple[int, str, str]] = []
        self.uncounted_s = 0.0  # seconds of epochs that had no session, not even for statistics
        #: Batches, and their samples, that the daemon does not know of.
        self.uncounted: NDArray[np.int64] = np.zeros(2, np.int64)
        self.direct = DirectReads(allowed=self.config.loader.direct == "auto")
        self.order: EpochOrder | None = None
        self.epoch = -1
        self.run: LastRun | None = None
        self.advice = Advice()
        self.own_files = OwnFiles()
        self.resume: Progress | None = None
        #: Of the samples of a resumed epoch that was finished; None after the next has begun.
        self.finished_seed: int | None = None
        self._stream: BatchStream | None = None  # a session without an iterator, for the next
        self._bound: tuple[object, Binding | None] = (None, None)
        self._keepings: list[Keeping] = []  # of the dataset's parts that keep decoded samples
        self._exchange: Exchange | None = None
        self._role: Role = None
        self._joined = False
        self._closed = False

    def belongs_to(self, loader: object) -> bool:
        """Whether this is the state of the loader here: not of what it is a copy or a fork of."""
        return self.pid == os.getpid() and self._loader() is loader

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()  # a subclass may pickle its whole `__dict__`

    def binding(self, loader: DataLoader[Any]) -> Binding | None:
        """Return the binding of the loader's dataset; None if it has no objects or creel=False."""
        if self.args.creel is False:
            return None
        if isinstance(self.args.creel, (dict, str)):
            for one in wrapped_in(loader.dataset):
                configure(one, self.config, self._origins)
        self._keepings = keepings_in(loader.dataset)
        for keeping in self._keepings:
            keeping.begin(self, self.config.loader.recheck, self.config.disk)
        dataset, binding = self._bound
        if dataset is not loader.dataset or binding is None or not binding.still():
            self._bound = (loader.dataset, _binding_of(loader.dataset))
        return self._bound[1]

    def before(self, loader: DataLoader[Any]) -> StateBefore:
        """Return the state an epoch begins from; call it before torch's iterator is constructed."""
        return before(loader, self.order, foresee=self.config.loader.foresee)

    def exchange(self, loader: DataLoader[Any]) -> Exchange | None:
        """Return how the ranks exchange samples, as agreed in the first epoch; None: not at all.

        Raises:
            ConfigError: as `exchange.agreed` and `exchange.check_unchanged`.
        """
        if self.args.remap is None:
            return None
        if self._exchange is None:
            self._exchange = agreed(index_sampler(loader))
        check_unchanged(self._exchange, index_sampler(loader))
        return self._exchange if self._exchange.moves else None

    def role(self, loader: DataLoader[Any]) -> Role:
        """Return this rank's role in its group, as agreed with the other ranks at the first call.

        Raises:
            ConfigError: as `replicate.join_group`.
        """
        if self.args.replicate is not None and not self._joined:
            binding = self.binding(loader)
            plain = binding is not None and self.only_copies(loader, binding)
            rows = rehearsed_batches(loader)
            memory = "" if rows is None else rows.digest
            self._role = join_group(loader, self.args.replicate, plain=plain, memory=memory)
            self._joined = True
        return self._role

    @property
    def needed_by_ranks(self) -> bool:
        """Whether other ranks depend on this rank's creel, for batches or for exchanged samples."""
        return self._role is not None or (self._exchange is not None and self._exchange.moves)

    def start_daemon_early(self, loader: DataLoader[Any]) -> None:
        """Start a daemon when the loader is made, if its dataset may have objects to cache.

        The dataset is bound later, at its first read, because it may change in place until then. A
        dataset whose reads must be recorded needs no daemon before they are (`EpochRun.deliver`).
        """
        if self.args.creel is not False and declares(loader.dataset):
            start_daemon_early(self.config)

    def take_stream(self, binding: Binding | None, *, wait: bool = True) -> BatchStream | None:
        """Return a free or a new session for an iterator; None without a daemon.

        `wait`: whether to open a new one, which waits for the daemon.
        """
        stream, self._stream = self._stream, None
        if stream is not None:
            if stream.alive and stream.binding is (binding or nothing()):
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
        already, nor for rows, which the arena delivers faster than any file, unless this process
        has many sessions: each event of one costs the daemon a look at all.

        The same holds for an epoch that begins with all its samples kept decoded.
        """
        if self.config.loader.direct != "auto" or self.args.replicate is not None:
            return False
        if binding.leaves and all(leaf.read_once for leaf in binding.leaves):
            return True
        kept = binding.kept()
        known = (s for s in (stream, self._stream) if s is not None and s.binding is binding)
        if not kept and any(s.alive and s.session.holds_most() for s in known):
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
        return gather is not None and not gather.has_code and gather.nbytes > 0

    def collates_plainly(self, loader: DataLoader[Any]) -> bool:
        """Whether a batch is torch's default collation of its samples, which are read together.

        With `on_error` they are read one by one, since rows copied together fail together.
        """
        return (
            self.args.on_error == "raise"
            and loader._auto_collation  # noqa: SLF001  torch's
            and loader.collate_fn is default_collate
            and collate.default_collate_fn_map.get(torch.Tensor) is collate.collate_tensor_fn
        )

    def note_kept(self) -> None:
        """Set in the meter what the stores of decoded samples have; tell them what was read."""
        stores = [one.store for one in self._keepings if one.store is not None]
        mine = [store for store in stores if store.counted_by(self)]
        meter = self.meter
        by = "busy" if meter["busy_decode_ns"] else "stall"  # without workers training waits
        worked = meter[f"{by}_decode_ns"] + meter[f"{by}_collate_ns"]
        for store in mine:
            hits = meter["decoded_hits"]
            read = hits + meter["decoded_misses"]
            store.read(read, hits, meter[f"{by}_source_ns"], worked)
        self.meter["decoded_samples"] = sum(store.kept for store in mine)
        self.meter["decoded_nbytes"] = sum(store.used_nbytes for store in mine)

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
        self.own_files.epoch_begins(
            unserved=unserved,
            batches=batches or 0,
            waited_s=self.meter.waited_s,
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
        self.run, self.order, self.spare = None, None, ()
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
        if self._role is not None and os.getpid() == self.pid:
            self._role.close()


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


def prepare_resume(
    loader_state: LoaderState,
    loader: DataLoader[Any],
    state: Progress,
    leave_out: Iterable[int] = (),
) -> None:
    """Make the next epoch the one saved in `state`, or the one after it if that is finished.

    leave_out: batches of the saved epoch to skip.

    Raises:
        ConfigError: the state is of another version or kind of loader, or incomplete.
    """
    if not state:
        return
    found: object = state
    if not isinstance(found, Mapping) or "version" not in found:
        raise ConfigError("this is not a state_dict of a creel.DataLoader: start without it")
    if state["version"] != PROGRESS_VERSION:
        raise ConfigError(f"this state_dict has version {state['version']}, not {PROGRESS_VERSION}")
    lacks = {"epoch", "batches", "finished"} - state.keys()
    if lacks or ("order" not in state and state["epoch"] >= 0):
        # torch.distributed.checkpoint loses keys: it fills in only those that a fresh state has.
        raise ConfigError("this state_dict lacks keys: save and load it as one value (pickle)")
    loader_state.epoch = state["epoch"]
    loader_state.resume = None
    if "order" in state:
        held: Any = weakref.proxy(loader)
        batches, over = state["batches"], state["finished"]
        left = _numbers(leave_out)
        given = without_batches(held, state["order"], batches, left) if left else state["order"]
        given, batches, over = resharded(held, given, batches=batches, over=over)
        given, batches = resized(held, given, batches=batches, over=over)
        order = resume(held, given, over=over, batches=batches, previous=loader_state.order)
        loader_state.order = loader_state.order if order is None else order
        loader_state.finished_seed = state.get("seed") if over else None
        if not over:
            loader_state.resume = Progress(**{**state, "order": given, "batches": batches})


def _numbers(leave_out: Iterable[int]) -> list[int]:
    """Return the numbers of batches to leave out.

    Raises:
        ConfigError: they are no numbers from 0 on.
    """
    if isinstance(leave_out, Iterable):
        numbers = [whole(one) for one in leave_out]
        if all(one is not None and one >= 0 for one in numbers):
            return [one for one in numbers if one is not None]
    raise wrong("leave_out", leave_out, "numbers of batches, from 0 on")


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
